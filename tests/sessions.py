"""Programs started as a user starts them, and whatever they leave behind."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic

import psutil

from tests.warm_start import WarmPopen, of_a_launcher

_TIME_TO_END = 5.0
"""Seconds that processes have to notice the end of the one they serve, as multiprocessing's resource tracker does."""
_WARM = ("train", "simulate", "evaluate")
"""Commands of Starling that load torch. Others run as they are installed."""


def run_to_end(
    command: Sequence[str | Path], folder: Path, env: Mapping[str, str] | None = None
) -> tuple[int, str, list[psutil.Process]]:
    """Run a program in a session of its own: exit code, what it said, and the processes that it left, now killed.

    `starling train`, with its learners, and the other commands of `_WARM` start warm.
    """
    with (folder / "said").open("w+", encoding="utf-8") as said:
        process: subprocess.Popen[bytes] | WarmPopen
        if command[0] == "starling" and command[1] in _WARM:
            warm = {**(os.environ if env is None else env), **of_a_launcher()}
            arguments = [sys.executable, "-m", *map(str, command)]
            process = WarmPopen(arguments, env=warm, stdout=said.buffer, cwd=folder)
        else:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            code = process.wait(timeout=200)
        finally:
            left = [each for each in psutil.process_iter() if _session(each) == process.pid]
            deadline = monotonic() + _TIME_TO_END
            while left := [each for each in left if not _has_ended(each)]:
                if monotonic() > deadline:
                    break
                psutil.wait_procs(left, timeout=0.1)
            for each in left:
                each.send_signal(signal.SIGKILL)
        said.seek(0)
        return code, said.read(), left


def _has_ended(process: psutil.Process) -> bool:
    """Whether it is gone, or only waits for the system to take note of its end."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _session(process: psutil.Process) -> int:
    try:
        return os.getsid(process.pid)
    except ProcessLookupError:
        return -1
