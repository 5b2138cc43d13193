"""The process that has imported torch and forks learners: each fork is like a process of its own."""

import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from starling.launch.link import VARIABLE
from starling.launch.process import Forked, LocalProcess, Preloaded, Program, preloading, start

TELL = """
import json, os, random, socket, sys
import numpy as np
numbers = [f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd")]
files = [os.readlink(each) for each in numbers if os.path.exists(each)]
print(json.dumps({
    "arguments": sys.argv[1:], "path": sys.path[0], "folder": os.getcwd(), "session": os.getsid(0),
    "rank": os.environ["RANK"], "old": os.environ.get("OLD"), "numbers": [random.random(), np.random.random()],
    "files": files, "torch": "torch._dynamo" in sys.modules, "name": __name__,
    "comm": open("/proc/self/comm").read(),
}), flush=True)
line = socket.socket(fileno=int(os.environ["LINE"]))
line.send(b"here")
sys.exit(int(line.recv(16)))
"""
"""What a fork is like; then it exits with the code that its launcher sends."""


@pytest.fixture(scope="module")
def preloaded() -> Iterator[Preloaded]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OLD", "1")
        with preloading() as found:
            assert found is not None
            yield found


def begin(preloaded: Preloaded, folder: Path, rank: int = 0) -> tuple[Forked, socket.socket]:
    """A fork that runs `TELL` and has begun, and the launcher's end of its line."""
    (folder / "tell.py").write_text(TELL.replace("LINE", VARIABLE))
    environment = {name: value for name, value in os.environ.items() if name != "OLD"} | {"RANK": str(rank)}
    ours, theirs = socket.socketpair()
    with (folder / f"said-{rank}").open("wb") as said, theirs:
        fork = preloaded.fork(["tell", "a", "b c"], environment, said, theirs, folder)
    assert fork is not None
    assert ours.recv(16) == b"here"
    return fork, ours


def test_a_fork_has_what_a_new_process_has(preloaded: Preloaded, tmp_path: Path) -> None:
    """Its arguments, environment, folder, output and session; random numbers of its own; and no file of others."""
    forks = [begin(preloaded, tmp_path, rank) for rank in range(2)]
    told = [json.loads((tmp_path / f"said-{rank}").read_text()) for rank in range(2)]
    for rank, (fork, line) in enumerate(forks):
        said = told[rank]
        assert said["arguments"] == ["a", "b c"]
        assert (said["path"], said["folder"]) == (str(tmp_path), str(tmp_path))
        assert (said["session"], said["rank"], said["old"], said["name"]) == (fork.pid, str(rank), None, "__main__")
        assert said["torch"]
        assert said["comm"] == f"learner-{rank}\n"
        assert fork.poll() is None
        line.send(b"3")
        assert fork.wait(60) == fork.poll() == 3
        line.close()
        files = said["files"]
        assert len([each for each in files if each.startswith("socket:")]) == 1  # its line
        assert str(tmp_path / f"said-{rank}") in files
        assert str(tmp_path / f"said-{1 - rank}") not in files
    assert told[0]["numbers"][0] != told[1]["numbers"][0]
    assert told[0]["numbers"][1] != told[1]["numbers"][1]


def test_a_killed_fork_is_reported_with_its_signal(preloaded: Preloaded, tmp_path: Path) -> None:
    fork, line = begin(preloaded, tmp_path)
    fork.kill()
    assert fork.wait(60) == -signal.SIGKILL
    fork.kill()  # it has ended
    line.close()


def test_forks_outlive_the_process_that_forks(tmp_path: Path) -> None:
    """They go on; then nobody knows their exit codes. A learner that starts later is a new Python process."""
    with preloading() as mortal:
        assert mortal is not None
        fork, line = begin(mortal, tmp_path)
        parent = psutil.Process(fork.pid).parent()
        assert parent is not None
        parent.kill()
        assert fork.poll() is None
        line.send(b"0")
        assert fork.wait(60) == -signal.SIGKILL
        line.close()
        program = Program((sys.executable, "-m", "json.tool", "--help"), 1, tmp_path, "token", is_watched=False)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            learner = start(program, 0, False, tmp_path, {}, theirs, preloaded=mortal)
        assert isinstance(learner, LocalProcess)
        assert learner.wait(60)
        assert learner.exit_code == 0
        assert "usage" in program.log(0).read_text()


def test_the_process_that_forks_ends_with_its_launcher(tmp_path: Path) -> None:
    with preloading() as found:
        assert found is not None
        fork, line = begin(found, tmp_path)
        parent = psutil.Process(fork.pid).parent()
        assert parent is not None
        line.send(b"0")
        fork.wait(60)
        line.close()
    assert not parent.is_running()


def test_without_process_descriptors_learners_are_new_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an old kernel, or in a sandbox that forbids the call, nothing is forked, so no learner is started twice."""

    def forbidden(pid: int) -> int:
        raise PermissionError(pid)

    monkeypatch.setattr(os, "pidfd_open", forbidden)
    with preloading() as found:
        assert found is None
