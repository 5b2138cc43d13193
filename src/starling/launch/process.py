"""A learner's process: its start by a launcher, its end together with its child processes, and the handling of stop
signals.

On this machine, learners start as forks of one process that has already imported torch and the training loop. The
imports take seconds of processor time, which would dominate every start on a machine with fewer cores than learners,
and the replacement of a lost learner. The process that forks computes nothing and has no connections but those to its
launcher. Learners share its memory of the imported modules.

`LearnerProcess`, `Site` and `Machines` are the launcher's interface to the place where learners run. `LocalProcess` is
a process on this machine; `starling.launch.on_ray` has the processes on a Ray cluster.
"""

import gc
import json
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from subprocess import DEVNULL, STDOUT, Popen, TimeoutExpired
from types import FrameType
from typing import IO

from starling.engines.processes import run_token
from starling.engines.processes.forks import owned
from starling.errors import StarlingError
from starling.launch.link import JOINS, SCRATCH, VARIABLE, WATCHED, Line
from starling.timeouts import LOADERS, TERMINATION, Seconds


@dataclass(frozen=True)
class Program:
    """The program that every learner of a run executes."""

    command: tuple[str, ...]
    """Command line of the program."""
    world: int
    """Number of learners at the start."""
    log_folder: Path
    """Folder of the learners' output. A learner's output is written to `learner-<id>.log` in this folder."""
    token: str = field(repr=False)
    """Token of the run; see `run_token`."""
    is_watched: bool
    """Whether the launcher announces memberships after losses."""

    def log(self, learner_id: int) -> Path:
        """Return the file of a learner's output."""
        return self.log_folder / f"learner-{learner_id}.log"


@dataclass
class LearnerProcess:
    """A learner's process as a launcher or a coordinator sees it, on whichever machine it runs.

    This class itself stands for a process that was started elsewhere: it counts as running until its line is closed.
    """

    log: Path = Path()
    line: Line = field(default_factory=Line)
    """Launcher's end of the connection to the process."""
    node: str = ""
    """Node of the cluster on which the process runs; empty on the launcher's machine."""
    lost: str = ""
    """Cause of the loss of the process, if it was not a signal; empty otherwise."""
    error: StarlingError | None = None
    """Error with which the process could not be started, or that it reported when it failed."""
    killed_because: str = ""
    """Reason why the launcher killed the process; empty if the launcher did not kill it."""
    can_stop: bool = False
    """Whether the process is able to save and end together with the others on a stop request."""

    @property
    def exit_code(self) -> int | None:
        """The exit code of the process; None while it runs, negative if a signal killed it or its machine was lost."""
        return 0 if self.line.closed_at else None

    @property
    def is_running(self) -> bool:
        """Whether the process runs or has yet to be started."""
        return self.exit_code is None

    def signal(self, number: int) -> None:
        """Send the process a signal, if it runs."""

    def wait(self, seconds: Seconds) -> bool:
        """Wait for the process to exit, and return whether it has exited."""
        return True

    def kill(self) -> None:
        """Send SIGKILL, and wait for the process to exit. If the process was started elsewhere, hang up."""
        self.line.hang_up()

    def signal_group(self, number: int) -> bool:
        """Send a signal to the process and its loading processes, and return whether any of them exists. Number 0 only
        performs this check."""
        return False

    def forget(self) -> None:
        """Release the resources of the process. The process and its loading processes must have ended."""


@dataclass(frozen=True)
class Site:
    """The place where the learners of one run are started, for as long as the run lasts."""

    start: Callable[[int, bool], LearnerProcess]
    """Function that starts a learner, given its id and whether it joins a running experiment."""
    abandon: Callable[[], None]
    """Function that removes the files that the start of learners has left, because the run has ended or this process is
    about to exit."""


Machines = Callable[[Program], AbstractContextManager[Site]]
"""The machines on which learners can be started, which are this machine or those of a cluster. The value is a context
that prepares the start of learners. Learners find their store at the site."""


@dataclass
class LocalProcess(LearnerProcess):
    """A process on this machine."""

    popen: "Popen[bytes] | Forked" = field(kw_only=True)
    _is_cleared: bool = False
    """Whether the process and its child processes are gone. Their process group's number may have been reused."""

    @property
    def exit_code(self) -> int | None:
        return self.popen.poll()

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)

    def wait(self, seconds: Seconds) -> bool:
        with suppress(TimeoutExpired):
            self.popen.wait(seconds)
        return self.popen.poll() is not None

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()

    def signal_group(self, number: int) -> bool:
        if self._is_cleared:
            return False
        try:
            os.killpg(self.popen.pid, number)
        except (ProcessLookupError, PermissionError):  # the group is gone, or another user's group has its number
            return False
        return True

    def forget(self) -> None:
        self._is_cleared = True


def start(
    program: Program,
    learner_id: int,
    joins: bool,
    scratch: Path,
    place: Mapping[str, object],
    line: socket.socket,
    folder: Path | None = None,
    preloaded: "Preloaded | None" = None,
) -> LocalProcess:
    """Start a learner on this machine.

    Args:
        program: The program that the learner executes.
        learner_id: The learner's id, which is also its first rank.
        joins: Whether the learner joins a running experiment.
        scratch: The folder for the learner's temporary files.
        place: The environment variables that describe where the learner runs, and where its store is.
        line: The learner's end of the connection to the launcher, which the learner inherits.
        folder: The learner's current folder. None uses the current folder of this process.
        preloaded: The process that forks the learner if the program is a module. None starts a new Python process.
    """
    log = program.log(learner_id)
    environment = {
        "RANK": learner_id,
        "WORLD_SIZE": program.world,
        "TORCHELASTIC_USE_AGENT_STORE": True,  # tells torch that the launcher, not learner 0, owns the store
        **place,
        VARIABLE: line.fileno(),
        SCRATCH: scratch,
        run_token.VARIABLE: program.token,
        "TMPDIR": scratch,
        WATCHED: int(program.is_watched),
        JOINS: int(joins),
    }
    variables = {**os.environ, **{name: str(value) for name, value in environment.items()}}
    interpreter, *module = program.command
    with log.open("ab") as output:
        if preloaded and (interpreter, module[0]) == (sys.executable, "-m"):
            forked = preloaded.fork(module[1:], variables, output, line, folder or Path.cwd())
            if forked is not None:
                return LocalProcess(log, popen=forked)
        popen = Popen(
            list(program.command),
            env=variables,
            stdin=DEVNULL,
            stdout=output,
            stderr=STDOUT,
            pass_fds=[line.fileno()],
            start_new_session=True,  # so that a signal to the group also reaches its loading processes
            cwd=folder,
        )
    return LocalProcess(log, popen=popen)


def scratch_folder() -> Path:
    """Create a folder for learners' temporary files. It is needed because loading processes that are killed do not
    remove their files."""
    usual = tempfile.gettempdir()
    parent = usual if len(usual) <= 50 else "/tmp"  # loading hangs when the path of a socket exceeds 107 characters
    return Path(tempfile.mkdtemp(prefix="starling-", dir=parent))


def end(processes: Sequence[LearnerProcess]) -> None:
    """End all learners and their loading processes. A learner that can stop is killed at once. Any other learner is
    killed if it has not exited `TERMINATION` seconds after SIGTERM."""
    for process in processes:
        if process.is_running:
            # after SIGTERM, a learner that can stop would first save
            process.signal(signal.SIGKILL if process.can_stop else signal.SIGTERM)
            process.signal(signal.SIGCONT)  # a stopped process does not handle SIGTERM
    deadline = time.monotonic() + TERMINATION
    for process in processes:
        if not process.wait(max(0.0, deadline - time.monotonic())):
            process.kill()
        process.line.close()
    end_loaders(processes)


def end_loaders(processes: Sequence[LearnerProcess]) -> None:
    """End the loading processes that outlived their learners.

    Python's resource tracker is one of them: it ignores SIGTERM, and exits once it has removed their semaphores.
    """
    deadline = time.monotonic() + LOADERS
    left = [process for process in processes if process.signal_group(signal.SIGTERM)]
    while left and time.monotonic() < deadline:
        time.sleep(0.01)
        left = [process for process in left if process.signal_group(0)]
    for process in left:
        process.signal_group(signal.SIGKILL)
    for process in processes:
        process.forget()


def signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGTERM, or the number of a real-time signal, which has no name."""
    return next((each.name for each in signal.Signals if each == number), f"signal {number}")


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def end_now(number: int) -> None:
    """End this process with the exit code that a shell reports for the signal."""
    os._exit(128 + number)


@contextmanager
def on_stop_signal(
    on_signal: Callable[[int], None], on_second: Callable[[int], None] = end_now
) -> Generator[None, None, None]:
    """Inside the context, call `on_signal` with the number of the first SIGINT or SIGTERM, and `on_second` with
    that of the next, which ends this process at once.

    A thread handles the signals, so that they take effect even while the main thread waits inside torch. Outside the
    main thread, the context does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)

    def listen() -> None:
        handlers = iter([on_signal])
        while received := ours.recv(64):
            for number in received:  # the numbers of all signals with a Python handler, not only of these two
                if number in STOP_SIGNALS:
                    next(handlers, on_second)(number)

    thread = threading.Thread(target=listen, name="starling-signals", daemon=True)
    thread.start()
    before = {number: signal.signal(number, _handled_by_thread) for number in STOP_SIGNALS}
    wakeup = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        theirs.close()
        thread.join()
        ours.close()


def _handled_by_thread(number: int, frame: FrameType | None) -> None:
    """Replaces Python's handler, whose exception would be lost in callbacks from C code, such as soundfile's."""


_MODULES = ("torch._dynamo", "torch.utils.tensorboard", "starling.experiment.train")
"""What a learner imports; the first optimizer of a process imports Dynamo."""
_NUMBERS = 64  # bytes that hold a process number or an exit code


class Forked:
    """A forked process, with the part of the interface of `subprocess.Popen` that a launcher needs.

    Args:
        pid: The process's number.
        handle: A descriptor of the process, as from `os.pidfd_open`.
        report: The socket on which the process that forked this one sends its exit code. If no code comes, because the
            sender is gone, this process counts as killed.
    """

    def __init__(self, pid: int, handle: int, report: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._handle, self._report, self._lock = handle, report, threading.Lock()

    def poll(self) -> int | None:
        """Return the exit code; None while the process runs, negative if a signal killed it."""
        with self._lock:  # a second stop signal is handled in a thread of its own
            if self.returncode is None and self._has_ended(0.0):
                self.returncode = int(self._report.recv(_NUMBERS) or -signal.SIGKILL)
                self._report.close()
                os.close(self._handle)
            return self.returncode

    def wait(self, timeout: Seconds | None = None) -> int | None:
        """Wait for the process to end, and return its exit code. Raises TimeoutExpired."""
        if self.returncode is None and not self._has_ended(timeout):
            raise TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return self.poll()

    def _has_ended(self, within: Seconds | None) -> bool:
        polling = select.poll()
        polling.register(self._handle, select.POLLIN)
        return bool(polling.poll(None if within is None else 1000.0 * within))

    def send_signal(self, number: int) -> None:
        """Send the process a signal, if it runs."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, number)

    def kill(self) -> None:
        """Send the process SIGKILL, if it runs."""
        self.send_signal(signal.SIGKILL)


class Preloaded:
    """A process that imports torch and `modules`, and then forks others. It ends with this process at the latest."""

    def __init__(self, modules: Sequence[str]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", __name__, *modules]
        with theirs:
            self._process = Popen(
                command, stdin=theirs.fileno(), stdout=DEVNULL, stderr=DEVNULL, start_new_session=True
            )
        self._line = owned(ours)

    def close(self) -> None:
        """End the process; its forks continue."""
        self._line.close()
        self._process.kill()
        self._process.wait()

    def fork(
        self, module: Sequence[str], env: Mapping[str, str], output: IO[bytes], line: socket.socket, folder: Path
    ) -> Forked | None:
        """Start a module with arguments as `python -m` would; None if the process that forks is gone.

        Args:
            module: The module and its arguments.
            env: All environment variables, to which the descriptor of `line` is added.
            output: The file that gets the standard output and error.
            line: The process's end of the connection to its launcher.
            folder: The current folder.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with tempfile.TemporaryFile("w+") as errand, theirs:
            json.dump((list(module), dict(env), str(folder)), errand)
            errand.seek(0)
            with suppress(OSError):
                files = [theirs.fileno(), errand.fileno(), output.fileno(), line.fileno()]
                socket.send_fds(self._line, [b"fork"], files)
        number, handles, *_ = socket.recv_fds(owned(ours), _NUMBERS, 1, socket.MSG_CMSG_CLOEXEC)
        if number:
            return Forked(int(number), handles[0], ours)
        ours.close()
        return None


@contextmanager
def preloading(modules: Sequence[str] = ()) -> Generator[Preloaded | None, None, None]:
    """Within this context, a process imports torch and these modules, and then forks others. None where the system
    cannot do so."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):  # no Linux, or one older than 5.3, or a sandbox that forbids the call
        yield None
        return
    with closing(Preloaded(modules)) as preloaded:
        yield preloaded


def serve(line: socket.socket, modules: Sequence[str]) -> None:
    """Import the modules, fork a process for each request on `line`, and report how it ends, until `line` is closed."""
    for module in (*_MODULES, *modules):
        with suppress(ImportError):  # a learner that needs the module reports the error
            import_module(module)
    gc.collect()
    gc.freeze()  # a collection in a forked process would copy the memory that it shares
    with DefaultSelector() as selector:
        selector.register(line, EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.data is not None:
                    selector.unregister(key.fd)
                    _report(key.fd, *key.data)
                    continue
                request, files, _, _ = socket.recv_fds(line, _NUMBERS, 4, socket.MSG_CMSG_CLOEXEC)
                if not request:
                    os._exit(0)  # without the second that an orderly exit takes with this many modules
                report, *others = files
                with socket.socket(fileno=report) as reporting:
                    if (pid := os.fork()) == 0:
                        reporting.close()
                        selector.close()
                        line.close()
                        become(*others)
                        return
                    for number in others:
                        os.close(number)
                    handle = os.pidfd_open(pid)
                    with suppress(OSError):  # its launcher may be gone
                        socket.send_fds(reporting, [str(pid).encode()], [handle])
                    selector.register(handle, EVENT_READ, (pid, reporting.dup()))


def _report(handle: int, pid: int, report: socket.socket) -> None:
    _, status = os.waitpid(pid, 0)
    os.close(handle)
    with report, suppress(OSError):  # its launcher may be gone
        report.send(str(os.waitstatus_to_exitcode(status)).encode())


def become(errand: int, output: int, line: int) -> None:
    """Be the process that a request describes, to the end of this process."""
    os.setsid()
    with open(errand, "rb") as file, open(os.devnull, "rb") as nothing:  # noqa: PTH123 - the first is a descriptor
        module, environment, folder = json.load(file)
        for number, standard in ((nothing.fileno(), 0), (output, 1), (output, 2)):
            os.dup2(number, standard)
    os.close(output)
    os.environ.clear()
    os.environ.update(environment, **{VARIABLE: str(line)})
    os.chdir(folder)
    if not sys.flags.safe_path:
        sys.path[0] = folder
    Path("/proc/self/comm").write_text(f"learner-{environment['RANK']}", encoding="utf-8")  # its name for ps and top
    tempfile.tempdir = None  # depends on the environment
    sys.modules["numpy"].random.seed()  # all forked processes would draw the same numbers; `random` sees to this itself
    name, *sys.argv[1:] = module
    runpy.run_module(name, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    serve(socket.socket(fileno=os.dup(0)), sys.argv[1:])
