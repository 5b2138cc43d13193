"""Learner processes without a launcher, forked from one process that has loaded torch: starting one takes no seconds.

`python -m tests.warm_start MODULE...` loads modules, and then becomes, whenever it is told to, several learners: each
is a process of its own that runs a module as `python -m` would, and ends as Python ends.
"""

import importlib
import json
import os
import runpy
import select
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from starling.launch.launcher import loopback_store

MODULES = (
    "torch._dynamo",  # what the first optimizer of a process loads
    "tests.contract.learner_process",
    "tests.engines.drop_in_process",
    "tests.engines.served_process",
    "tests.launch.learner_process",
    "tests.launch.stopping_process",
    "tests.launch.promise_process",
)


class Learners:
    """Learners that have been started together; they meet at the store on `port`."""

    def __init__(self, line: "Line", folder: Path, pids: list[int], port: int) -> None:
        self._line = line
        self._folder = folder
        self._codes: dict[int, int] = {}
        self.pids = pids
        self.port = port

    def end(self, rank: int, within: float = 100.0) -> tuple[int, str]:
        """Wait for a learner to end: its exit code, negative for a signal, and what it said.

        TimeoutError if no learner ends `within` so many seconds.
        """
        while rank not in self._codes:
            ended = self._line.hear(within)
            self._codes[self.pids.index(ended["pid"])] = ended["code"]
        return self._codes[rank], (self._folder / f"learner-{rank}.log").read_text(encoding="utf-8")

    def is_running(self, rank: int) -> bool:
        """Whether a learner is there still, as far as has been heard."""
        return rank not in self._codes and Path(f"/proc/{self.pids[rank]}").exists()

    def kill(self) -> None:
        """End those that are left."""
        for rank, pid in enumerate(self.pids):
            if rank not in self._codes:
                os.kill(pid, 9)
                self.end(rank)


class Line:
    """To and from the process that becomes learners."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, *MODULES],
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._unread = b""

    def say(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        self._process.stdin.flush()

    def hear(self, within: float = 100.0) -> dict[str, Any]:
        assert self._process.stdout is not None
        while b"\n" not in self._unread:
            if not select.select([self._process.stdout], [], [], within)[0]:
                raise TimeoutError(f"no learner has ended for {within} s")
            received = os.read(self._process.stdout.fileno(), 65536)
            if not received:
                raise EOFError("the process that becomes learners is gone")
            self._unread += received
        line, _, self._unread = self._unread.partition(b"\n")
        heard: dict[str, Any] = json.loads(line)
        return heard

    def close(self) -> None:
        self._process.communicate()

    def run(self, command: Sequence[str], world: int, folder: Path) -> None:
        """Run `command` as so many learners; all of them must end well."""
        with self.learners(command, world, folder) as learners:
            for rank in range(world):
                code, said = learners.end(rank, within=280.0)
                assert code == 0, said

    @contextmanager
    def learners(self, command: Sequence[str], world: int, folder: Path) -> Generator[Learners, None, None]:
        """What `command`, some `python -m MODULE ARGUMENTS`, starts as so many learners; none is left behind."""
        _, flag, *module_and_arguments = command
        assert flag == "-m"
        with loopback_store() as port:
            place = {
                "WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }
            self.say({"run": module_and_arguments, "place": place, "folder": str(folder)})
            learners = Learners(self, folder, self.hear()["pids"], port)
            try:
                yield learners
            finally:
                learners.kill()


def serve(modules: Sequence[str]) -> None:
    """Become learners when told to, and tell when each of them has ended."""
    for module in modules:
        importlib.import_module(module)
    (only,) = Path("/proc/self/task").iterdir()  # a process with threads cannot be forked safely
    assert only.name == str(os.getpid())
    for line in sys.stdin:
        asked = json.loads(line)
        pids = []
        for rank in range(int(asked["place"]["WORLD_SIZE"])):
            pid = os.fork()
            if pid == 0:
                become(rank, asked["run"], asked["place"], Path(asked["folder"]))
                return
            pids.append(pid)
        tell({"pids": pids})
        for _ in pids:
            pid, status = os.wait()
            tell({"pid": pid, "code": os.waitstatus_to_exitcode(status)})


def tell(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def become(rank: int, command: Sequence[str], place: Mapping[str, str], folder: Path) -> None:
    """Be one learner from here to the end of this process."""
    os.environ.update({**place, "RANK": str(rank)})
    nothing = os.open(os.devnull, os.O_RDONLY)
    log = os.open(folder / f"learner-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for old, new in ((0, nothing), (1, log), (2, log)):
        os.dup2(new, old)
    sys.argv[1:] = command[1:]
    del sys.modules[command[0]]  # it runs afresh, as the program
    runpy.run_module(command[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    serve(sys.argv[1:])
