"""Learner processes, forked from one process that has loaded torch: `WarmPopen` is `Popen` for them.

What a learner does, from its first line to its last, is what it does when it is started as usual; only Python and torch
need not be loaded, which takes seconds. `python -m tests.warm_start` is the process that becomes learners: it forks a
keeper for each, which forks the learner and tells when that has ended.
"""

import fcntl
import gc
import importlib
import json
import os
import runpy
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing.connection import wait as any_readable  # `select.select` refuses files above 1,023
from pathlib import Path
from types import ModuleType
from typing import IO, Any, ClassVar, Self

import psutil

ADDRESS = "STARLING_WARM_START"
"""Environment variable: the Unix socket of the process that becomes learners, for processes of Ray and launchers."""
_STARTED = "STARLING_WARM_STARTED"
"""Environment variable: the file to which a launcher of its own process adds the processes of its learners."""
MODULES = (
    "torch._dynamo",  # what the first optimizer of a process loads
    "torch.utils.tensorboard",
    "starling.cli",
    "starling.experiment.train",
    "starling.speech.task",
    "starling.speech.training.set_up",
    "starling.launch.coordinator",
    "tests.contract.learner_process",
    "tests.contract.machines_process",
    "tests.engines.attached_process",
    "tests.engines.device_process",
    "tests.engines.drop_in_process",
    "tests.engines.hostile_process",
    "tests.engines.served_process",
    "tests.engines.surviving_process",
    "tests.launch.learner_process",
    "tests.launch.joining_process",
    "tests.launch.promise_process",
    "tests.launch.stopping_process",
)
_LONGEST_MESSAGE = 1 << 17
_OUT_OF_THE_WAY = 300
"""Above all numbers of files that a learner is to have."""


class WarmPopen:
    """A Python module, code or script as a process; what `starling.launch.process` needs of `subprocess.Popen`."""

    started: ClassVar[list["WarmPopen"]] = []
    """All of this process, the newest last."""
    _server: ClassVar["subprocess.Popen[bytes] | None"] = None
    _line: ClassVar[socket.socket | None] = None
    address: ClassVar[Path]
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(
        self,
        args: Sequence[str],
        *,
        env: Mapping[str, str],
        stdout: IO[bytes],
        stdin: int = subprocess.DEVNULL,
        stderr: int = subprocess.STDOUT,
        pass_fds: Sequence[int] = (),
        start_new_session: bool = True,
        cwd: Path | None = None,
    ) -> None:
        assert (args[0], stdin, stderr) == (sys.executable, subprocess.DEVNULL, subprocess.STDOUT)
        assert start_new_session
        self.args, self.returncode, self.rank = args, None, int(env.get("RANK", -1))
        self._report, theirs = socket.socketpair()
        self._unread = b""
        asked = {"command": args[1:], "env": dict(env), "folder": str(cwd or Path.cwd()), "numbers": list(pass_fds)}
        with theirs:
            files = [theirs.fileno(), stdout.fileno(), *pass_fds]
            socket.send_fds(self._to_server(), [json.dumps(asked).encode()], files)
        self.keeper, self.pid = int(self._word()), int(self._word())
        self.started.append(self)
        if _STARTED in os.environ:
            with Path(os.environ[_STARTED]).open("a", encoding="utf-8") as file:
                file.write(f"{self.pid}\n")

    returncode: int | None

    def poll(self) -> int | None:
        if self.returncode is None and (self._unread or any_readable([self._report], 0.0)):
            self.returncode = int(self._word())
            self._report.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not self._unread and not any_readable([self._report], timeout):
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it may end in between; `subprocess.Popen` does the same
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _word(self) -> str:
        while b"\n" not in self._unread:
            received = self._report.recv(64)
            if not received:
                raise EOFError("the keeper of a learner is gone")
            self._unread += received
        word, _, self._unread = self._unread.partition(b"\n")
        return word.decode()

    @classmethod
    def _to_server(cls) -> socket.socket:
        with cls._lock:
            if cls._line is None and ADDRESS in os.environ:
                cls._line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                cls._line.connect(os.environ[ADDRESS])
            elif cls._line is None:
                cls._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                cls.address = Path(tempfile.mkdtemp(prefix="starling-warm-")) / "socket"
                with theirs, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                    listener.bind(str(cls.address))
                    listener.listen()
                    cls._server = subprocess.Popen(
                        [sys.executable, "-m", __name__, str(listener.fileno())],
                        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
                        stdin=theirs,
                        pass_fds=[listener.fileno()],
                        cwd=Path(__file__).parents[1],
                    )
            return cls._line

    @classmethod
    def open(cls) -> Path:
        """The socket at which other processes, too, can ask for learners."""
        cls._to_server()
        return cls.address

    @classmethod
    def close(cls) -> None:
        """End the process that becomes learners."""
        if cls._server is not None and cls._line is not None:
            cls._line.close()
            cls._server.wait()
            cls._server = cls._line = None
            shutil.rmtree(cls.address.parent, ignore_errors=True)

    @classmethod
    def helpers(cls) -> set[int]:
        """The processes that are there for learners to be started, by number."""
        server = {cls._server.pid} if cls._server else set()
        return server | {each.keeper for each in cls.started}


def start(args: Sequence[str], **how: Any) -> "WarmPopen | subprocess.Popen[bytes]":
    """A program; warm if it is a learner: a Python module, or Python code that stands in the command, with an
    environment of its own. The process that forks learners has none."""
    is_learner = args[1] in ("-m", "-c") and "env" in how
    return WarmPopen(args, **how) if is_learner else subprocess.Popen(args, **how)


def of_a_launcher() -> dict[str, str]:
    """The environment variables of a process of `WarmPopen` whose learners are to be warm, too."""
    address = WarmPopen.open()
    return {ADDRESS: str(address), _STARTED: str(address.parent / f"started-{secrets.token_hex(8)}")}


class WarmProgram(WarmPopen):
    """A launcher in a process of its own, as `python -m MODULE ...` or `python SCRIPT ...` in a folder, warm as its
    learners; what it says is `output`. As a context, it is ended at the end."""

    def __init__(self, arguments: Sequence[str], folder: Path, **environment: str) -> None:
        env = {**os.environ, **of_a_launcher(), **environment}
        self._pids = Path(env[_STARTED])
        reading, writing = os.pipe()
        self.output = os.fdopen(reading, encoding="utf-8")
        with os.fdopen(writing, "wb") as theirs:
            super().__init__([sys.executable, *arguments], env=env, stdout=theirs, cwd=folder)

    def learners(self) -> list[psutil.Process]:
        """The processes of the learners that it has started, in the order of their starts."""
        return [psutil.Process(int(pid)) for pid in self._pids.read_text(encoding="utf-8").split()]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *of: object) -> None:
        self.kill()
        self.wait()
        self.output.close()


def use_in_this_process() -> None:
    """Let the learners that this process starts be warm: what a process of Ray calls first."""
    from starling.launch import launcher, process

    process.Popen = start  # type: ignore[assignment]
    launcher.preloading = lambda modules: nullcontext()  # type: ignore[assignment,misc,return-value]


class Learners:
    """Learners without a launcher that have been started together; they meet at the store on `port`."""

    def __init__(self, processes: "Sequence[WarmPopen | subprocess.Popen[bytes]]", folder: Path, port: int) -> None:
        self.port = port
        self.pids = [process.pid for process in processes]
        self._processes = processes
        self._folder = folder

    def end(self, rank: int, within: float = 100.0) -> tuple[int, str]:
        """Wait for a learner to end: its exit code, negative for a signal, and what it said.

        TimeoutError if it does not end `within` so many seconds.
        """
        try:
            code = self._processes[rank].wait(within)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"learner {rank} has not ended for {within} s") from error
        return code, (self._folder / f"learner-{rank}.log").read_text(encoding="utf-8")

    def is_running(self, rank: int) -> bool:
        return self._processes[rank].poll() is None

    def kill(self) -> None:
        """End those that are left."""
        for process in self._processes:
            process.kill()
            process.wait()


@contextmanager
def start_learners(command: Sequence[str], world: int, folder: Path, is_cold: bool = False) -> Iterator[Learners]:
    """What `command` starts as so many learners without a launcher, with logs in `folder`; none is left behind.

    Those that are cold are not forked from a process that has loaded torch, which may have asked for CUDA's devices.
    """
    from starling.launch.launcher import loopback_store

    popen: Any = subprocess.Popen if is_cold else WarmPopen
    processes: list[WarmPopen | subprocess.Popen[bytes]] = []
    with loopback_store() as port:
        place = {
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        try:
            for rank in range(world):
                with (folder / f"learner-{rank}.log").open("wb") as log:
                    env = {**os.environ, **place, "RANK": str(rank)}
                    processes.append(popen(command, env=env, stdout=log, stderr=subprocess.STDOUT))
            yield Learners(processes, folder, port)
        finally:
            Learners(processes, folder, port).kill()


def run_learners(
    command: Sequence[str], world: int, folder: Path, within: float = 280.0, is_cold: bool = False
) -> None:
    """Run `command` as so many learners without a launcher; all of them must end well, `within` so many seconds."""
    with start_learners(command, world, folder, is_cold) as started:
        for rank in range(world):
            code, said = started.end(rank, within)
            assert code == 0, said


def own_learners() -> Iterator[tuple[int, psutil.Process]]:
    """The learners that a launcher in this process has running, each with its rank; the newest last."""
    for warm in WarmPopen.started:
        if warm.poll() is None:
            yield warm.rank, psutil.Process(warm.pid)
    yield from learners_of(os.getpid())


def learners_of(launcher: int) -> list[tuple[int, psutil.Process]]:
    """The learners that a launcher has forked from a process that has imported torch, each with its rank."""
    found = []
    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process(launcher).children(recursive=True):
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                name, is_zombie = process.name(), process.status() == psutil.STATUS_ZOMBIE
                if name.startswith("learner-") and not is_zombie and os.getsid(process.pid) == process.pid:
                    found.append((int(name.removeprefix("learner-")), process))
    return found


def own_learner(rank: int) -> psutil.Process:
    """The newest process of one learner. StopIteration if there is none."""
    return next(process for each, process in reversed(list(own_learners())) if each == rank)


def serve(line: socket.socket, listener: socket.socket) -> None:
    """Become learners when told to, through `line` or a connection to `listener`, until `line` is closed."""
    for module in MODULES:
        importlib.import_module(module)
    (only,) = Path("/proc/self/task").iterdir()  # a process with threads cannot be forked safely
    assert only.name == str(os.getpid())
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for keepers
    others: list[socket.socket] = [listener]
    while True:
        for source in any_readable([line, *others]):
            if source is listener:
                others.append(listener.accept()[0])
                continue
            message, files, _, _ = socket.recv_fds(source, _LONGEST_MESSAGE, 16)
            if message and os.fork() == 0:
                for each in (line, *others):
                    each.close()
                keep(json.loads(message), *files)
                return
            for file in files:
                os.close(file)
            if not message and source is line:
                return
            if not message:
                others.remove(source)
                source.close()


def keep(asked: dict[str, Any], report: int, log: int, *files: int) -> None:
    """Start a learner, wait for it, and tell how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        os.close(report)
        become(asked, log, *files)
        return
    for file in (log, *files):
        os.close(file)
    os.write(report, f"{os.getpid()}\n{pid}\n".encode())
    _, status = os.waitpid(pid, 0)
    os.write(report, f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def become(asked: dict[str, Any], *files: int) -> None:
    """Be one learner from here to the end of this process."""
    os.setsid()
    away = [fcntl.fcntl(file, fcntl.F_DUPFD, _OUT_OF_THE_WAY) for file in files]
    for file in files:
        os.close(file)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    log, *others = away
    for file, number in ((log, 1), (log, 2), *zip(others, asked["numbers"], strict=True)):
        os.dup2(file, number)
    for file in away:
        os.close(file)
    os.environ.clear()
    os.environ.update(asked["env"])
    os.chdir(asked["folder"])
    sys.path[0] = asked["folder"]
    tempfile.tempdir = None
    if _STARTED in os.environ:
        from tests import warm_start  # not as the program that this process was

        warm_start.use_in_this_process()
    first, *arguments = asked["command"]
    if first == "-c":
        code, *sys.argv[1:] = arguments
        sys.modules["__main__"] = program = ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), program.__dict__)  # noqa: S102 - as Python does
        return
    if first != "-m":
        sys.argv = [first, *arguments]
        runpy.run_path(first, run_name="__main__")
        return
    module, *sys.argv[1:] = arguments
    sys.modules.pop(module, None)  # it runs afresh, as the program
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    serve(socket.socket(fileno=os.dup(0)), socket.socket(fileno=int(sys.argv[1])))
