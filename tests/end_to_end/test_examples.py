"""The examples do what they say, started as a user starts them."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("learners", "strategy"), [(2, "adpsgd"), pytest.param(3, "delay-by-one", marks=pytest.mark.soak)]
)
def test_the_classifier_learns_under_torchrun(learners: int, strategy: str, tmp_path: Path) -> None:
    """Far above the 25 % of chance, soon, with exit code 0, and no process is left.

    In step it is left to `make soak`: the example is the same.
    """
    torchrun = Path(sys.executable).parent / "torchrun"
    command = [torchrun, "--nproc-per-node", str(learners), ROOT / "examples" / "classifier.py", "--strategy", strategy]
    with (tmp_path / "log").open("w+", encoding="utf-8") as log:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = process.wait(timeout=200)
        finally:
            left = [each for each in psutil.process_iter() if _session(each) == process.pid]
            for each in left:
                each.send_signal(signal.SIGKILL)
        log.seek(0)
        said = log.read()
    assert code == 0, said
    assert not left
    reached = re.search(rf"accuracy (\S+) with {learners} learners under {strategy}", said)
    assert reached, said
    assert float(reached[1]) > 0.9


def _session(process: psutil.Process) -> int:
    try:
        return os.getsid(process.pid)
    except ProcessLookupError:
        return -1
