"""A learner's process: how a launcher starts it, sends it messages, and ends it together with its child processes."""

import os
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen, TimeoutExpired

from starling.engines.processes import run_token
from starling.launch.link import JOINS, SCRATCH, VARIABLE, WATCHED
from starling.launch.messages import LauncherMessage, encode
from starling.timeouts import LOADERS, TERMINATION


@dataclass
class LearnerProcess:
    """A process and the launcher's end of the socket to it."""

    popen: "Popen[bytes]"
    line: socket.socket
    log: Path
    unread: bytearray = field(default_factory=bytearray)
    """The received part of an incomplete message."""
    can_stop: bool = False
    """Whether it is able to save and end together with the others on a stop request."""
    is_cleared: bool = False
    """Whether it and its child processes are gone. Their process group's number may have been reused."""

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative if a signal killed it."""
        return self.popen.poll()

    @property
    def is_running(self) -> bool:
        return self.popen.poll() is None

    def tell(self, message: LauncherMessage) -> None:
        """Send a message. If the process has exited, the message is dropped: `Watch` notices the exit."""
        with suppress(OSError):
            self.line.sendall(encode(message))

    def kill(self) -> None:
        """Send SIGKILL, and wait for the process to exit."""
        self.popen.kill()
        self.popen.wait()


def start(
    command: Sequence[str],
    learner_id: int,
    world: int,
    port: int,
    log_folder: Path,
    scratch: Path,
    token: str,
    is_watched: bool,
    joins: bool = False,
) -> LearnerProcess:
    """Start a learner; `joins` says whether it joins a running experiment."""
    ours, theirs = socket.socketpair()
    log = log_folder / f"learner-{learner_id}.log"
    place = {
        "RANK": learner_id,
        "WORLD_SIZE": world,
        "LOCAL_RANK": learner_id,
        "LOCAL_WORLD_SIZE": world,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,  # tells torch that the launcher, not learner 0, owns the store
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
            start_new_session=True,  # so that a signal to the group also reaches its loading processes
        )
    return LearnerProcess(popen, ours, log)


def end(processes: list[LearnerProcess]) -> None:
    """End all learners and their loading processes. A learner that can stop is killed at once, any other one if it has
    not exited `TERMINATION` seconds after SIGTERM."""
    for process in processes:
        if process.popen.poll() is None:
            # after SIGTERM, a learner that can stop would first save
            process.popen.send_signal(signal.SIGKILL if process.can_stop else signal.SIGTERM)
            process.popen.send_signal(signal.SIGCONT)  # a stopped process does not handle SIGTERM
    deadline = time.monotonic() + TERMINATION
    for process in processes:
        try:
            process.popen.wait(max(0.0, deadline - time.monotonic()))
        except TimeoutExpired:
            process.popen.kill()
            process.popen.wait()
        process.line.close()
    end_loaders(processes)


def end_loaders(processes: list[LearnerProcess]) -> None:
    """End the loading processes that outlived their learners.

    Python's resource tracker is one of them: it ignores SIGTERM, and exits once it has removed their semaphores.
    """
    deadline = time.monotonic() + LOADERS
    left = [process for process in processes if signal_group(process, signal.SIGTERM)]
    while left and time.monotonic() < deadline:
        time.sleep(0.01)
        left = [process for process in left if signal_group(process, 0)]
    for process in left:
        signal_group(process, signal.SIGKILL)
    for process in processes:
        process.is_cleared = True


def signal_group(process: LearnerProcess, number: int) -> bool:
    """Signal a learner's process group; return whether it exists."""
    if process.is_cleared:
        return False
    try:
        os.killpg(process.popen.pid, number)
    except (ProcessLookupError, PermissionError):  # it is gone, or another user's group has its number
        return False
    return True


def loopback_interface() -> str:
    """The name of this machine's loopback interface."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name.startswith("lo")), "lo")


def signal_name(number: int) -> str:
    """The name of a signal, such as SIGTERM."""
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
