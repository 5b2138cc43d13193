"""A learner's process: its start by a launcher, its end together with its child processes, and the handling of stop
signals.

`LearnerProcess`, `Site` and `Machines` are the launcher's interface to the place where learners run. `LocalProcess` is
a process on this machine; `starling.launch.on_ray` has the processes on a Ray cluster.
"""

import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen, TimeoutExpired
from types import FrameType
from typing import TYPE_CHECKING

from starling.engines.processes import run_token
from starling.errors import StarlingError
from starling.launch.link import JOINS, SCRATCH, VARIABLE, WATCHED, Line
from starling.timeouts import LOADERS, TERMINATION

if TYPE_CHECKING:
    from starling.launch.preloaded import Forked, Preloaded

Seconds = float


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
