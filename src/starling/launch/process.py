"""One learner process of a launcher: how it is started, spoken to, and ended with all that it started."""

import json
import os
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen, TimeoutExpired
from typing import Any

from starling.engines.processes import run_token
from starling.errors import StarlingError
from starling.launch.link import JOINS, SCRATCH, VARIABLE, WATCHED
from starling.launch.rendezvous import loopback_interface

Seconds = float
GRACE: Seconds = 5.0
"""How long learners may take to end after being asked to, before they are killed."""
LOADING_GRACE: Seconds = 2.0
"""How long loading processes may take to clean up after their learners have ended."""


@dataclass
class Process:
    rank: int
    popen: "Popen[bytes]"
    line: socket.socket
    log: Path
    unread: bytearray = field(default_factory=bytearray)
    doing: str = "starting"
    error: StarlingError | None = None
    heard: float = field(default_factory=time.monotonic)
    """When it gave its last sign of life."""
    silence: Seconds = 0.0
    """For how long it had given none when it was killed."""
    view: int = -1
    """The view of who is there that it last said to compute in."""
    joins: bool = False
    """Whether the others computed already when it was started."""
    is_ready: bool = False
    """Whether it could join them."""
    arrived: int = -1
    """The view whose members it last said to be about to meet."""
    has_computed: bool = False
    is_out: bool = False
    """Whether the others go on without it."""
    can_stop: bool = False
    """Whether it has met the others, and knows how to save and end together with them."""
    is_gone: bool = False
    """Whether nothing is left of it and of what it started: its number may be another's now."""
    signalled: int | None = None
    """The signal by which it was itself asked to stop."""

    @property
    def is_running(self) -> bool:
        return self.popen.poll() is None

    @property
    def was_killed(self) -> bool:
        """Whether a signal ended it, and not an error of its own."""
        return (self.popen.poll() or 0) < 0 and self.error is None

    def death(self) -> str:
        """How it was killed, and meanwhile doing what."""
        if self.silence:
            return f"learner {self.rank} gave no sign of life for {self.silence:.1f} s while {self.doing} and was ended"
        return f"learner {self.rank} was killed by {signal_name(-self.popen.returncode)} while {self.doing}"

    def end_in_words(self) -> str:
        """How it ended, whatever it was."""
        if self.silence or self.was_killed:
            return self.death()
        if self.popen.returncode == 0:
            return f"learner {self.rank} left, for others with which it belongs together were gone"
        how = self.error or f"it ended with exit code {self.popen.returncode} while {self.doing}"
        return f"learner {self.rank}: {how}; its log: {self.log}"

    def tell(self, message: dict[str, Any]) -> None:
        with suppress(OSError):  # it has ended; that will be noticed
            self.line.sendall(json.dumps(message).encode() + b"\n")


def start(
    command: Sequence[str],
    rank: int,
    world: int,
    port: int,
    log_folder: Path,
    scratch: Path,
    token: str,
    is_watched: bool,
    joins: bool = False,
) -> Process:
    """Start a learner; `joins` if others compute already."""
    ours, theirs = socket.socketpair()
    log = log_folder / f"learner-{rank}.log"
    place = {
        "RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": world,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,  # torch's word for: the store is not learner 0's
        "GLOO_SOCKET_IFNAME": loopback_interface(),
        VARIABLE: theirs.fileno(),
        SCRATCH: scratch,
        run_token.VARIABLE: token,
        "TMPDIR": scratch,
        WATCHED: int(is_watched),
        JOINS: int(joins),
    }
    with log.open("ab") as output, theirs:
        popen = Popen(
            list(command),
            env={**os.environ, **{name: str(value) for name, value in place.items()}},
            stdin=DEVNULL,
            stdout=output,
            stderr=STDOUT,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # so that it can be ended together with its loading processes
        )
    return Process(rank, popen, ours, log, joins=joins)


def end(processes: list[Process]) -> None:
    """End what still runs, learners and their loading processes: asked first, killed after `GRACE`."""
    for process in processes:
        if process.popen.poll() is None:
            process.popen.send_signal(signal.SIGKILL if process.can_stop else signal.SIGTERM)  # it would save first
            process.popen.send_signal(signal.SIGCONT)  # one that is stopped could not end
    deadline = time.monotonic() + GRACE
    for process in processes:
        try:
            process.popen.wait(max(0.0, deadline - time.monotonic()))
        except TimeoutExpired:
            process.popen.kill()
            process.popen.wait()
        process.line.close()
    end_loading(processes, time.monotonic() + LOADING_GRACE)


def end_loading(processes: list[Process], deadline: float) -> None:
    """End the loading processes that outlived their learners.

    Python's resource tracker among them ignores SIGTERM, and ends by itself once it has removed their semaphores.
    """
    left = [process for process in processes if signal_group(process, signal.SIGTERM)]
    while left and time.monotonic() < deadline:
        time.sleep(0.01)
        left = [process for process in left if signal_group(process, 0)]
    for process in left:
        signal_group(process, signal.SIGKILL)
    for process in processes:
        process.is_gone = True


def signal_group(process: Process, number: int) -> bool:
    """Signal a learner's process group; whether there is one."""
    if process.is_gone:
        return False
    try:
        os.killpg(process.popen.pid, number)
    except (ProcessLookupError, PermissionError):  # it is gone, and another's may have its number
        return False
    return True


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
