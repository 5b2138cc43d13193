"""Starts learner processes on this machine, watches them, and leaves none behind.

When a learner is killed, or has given no sign of life for too long and is killed therefore, the others may go on: they
are told the next view of who is there.
"""

import json
import math
import os
import selectors
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from starling import errors
from starling.engines import run_token
from starling.errors import PeerLost, StarlingError, Stopped
from starling.launch.link import SCRATCH, VARIABLE, WATCHED
from starling.launch.rendezvous import loopback_interface

Seconds = float
GRACE: Seconds = 5.0
"""How long learners may take to end after being asked to, before they are killed."""
LOADING_GRACE: Seconds = 2.0
"""How long loading processes may take to clean up after their learners have ended."""
CAUSE_PATIENCE: Seconds = 1.0
"""How long to look for the cause after a learner said only that it lost another."""


OnMessage = Callable[[int, dict[str, Any]], None]


@dataclass(frozen=True)
class Loss:
    """A learner that a run went on without."""

    learner: int
    reason: str
    """How it ended, in words."""


@dataclass
class _Process:
    rank: int
    popen: "subprocess.Popen[bytes]"
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
        return f"learner {self.rank} was killed by {_signal_name(-self.popen.returncode)} while {self.doing}"

    def tell(self, message: dict[str, Any]) -> None:
        with suppress(OSError):  # it has ended; that will be noticed
            self.line.sendall(json.dumps(message).encode() + b"\n")


@contextmanager
def loopback_store() -> Generator[int, None, None]:
    """A store on a free port of the loopback interface, nowhere else; the port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        port = int(listener.getsockname()[1])
        # a bound socket handed over is the only way to keep TCPStore off the other interfaces
        store = TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(listener.fileno())
        )
        yield port
        del store


def launch(
    command: Sequence[str],
    world: int,
    log_folder: Path,
    on_message: OnMessage = lambda rank, message: None,
    on_loss: Callable[[Loss], None] | None = None,
    silence_seconds: Seconds = math.inf,
) -> list[Loss]:
    """Run `world` processes of `command` as learners until all have ended; the losses that were borne.

    What a learner prints goes to `log_folder/learner-<rank>.log`; what it sends through its `Link` to `on_message`.
    When one fails the others are ended and its error is raised here; `PeerLost` when it was killed; `Stopped` when
    this process is asked to end (a second signal ends everything at once). With `on_loss`, which is called then, the
    others go on without one that was killed. Who gives no sign of life for `silence_seconds` is killed.
    """
    log_folder.mkdir(parents=True, exist_ok=True)
    processes: list[_Process] = []
    token = run_token.new_token()
    with loopback_store() as port, _scratch() as scratch, _signals(processes, scratch) as received:
        try:
            for rank in range(world):
                process = _start(command, rank, world, port, log_folder, scratch, token, on_loss is not None)
                processes.append(process)
            watch = _Watch(processes, on_message, on_loss, silence_seconds, received)
            watch.until_all_ended()
            return watch.losses
        finally:
            _end(processes)


@contextmanager
def _scratch() -> Generator[Path, None, None]:
    """A folder for the learners' temporary files: loading processes that are killed leave some behind."""
    usual = tempfile.gettempdir()
    parent = usual if len(usual) <= 50 else "/tmp"  # loading hangs when the path of a socket exceeds 107 characters
    with tempfile.TemporaryDirectory(prefix="starling-", dir=parent, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _start(
    command: Sequence[str],
    rank: int,
    world: int,
    port: int,
    log_folder: Path,
    scratch: Path,
    token: str,
    is_watched: bool,
) -> _Process:
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
    }
    with log.open("ab") as output, theirs:
        popen = subprocess.Popen(
            list(command),
            env={**os.environ, **{name: str(value) for name, value in place.items()}},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # so that it can be ended together with its loading processes
        )
    return _Process(rank, popen, ours, log)


class _Watch:
    """Watches learners until all have ended."""

    def __init__(
        self,
        processes: list[_Process],
        on_message: OnMessage,
        on_loss: Callable[[Loss], None] | None,
        silence_seconds: Seconds,
        received: "list[int]",
    ) -> None:
        self.losses: list[Loss] = []
        self._processes = processes
        self._on_message = on_message
        self._on_loss = on_loss
        self._silence_seconds = silence_seconds
        self._received = received
        self._view = 0

    def until_all_ended(self) -> None:
        """Pass messages on until all processes have ended well, but for those whose loss is borne; raise what else went
        wrong."""
        with selectors.DefaultSelector() as selector:
            for process in self._processes:
                selector.register(process.line, selectors.EVENT_READ, process)
            while any(process.is_running for process in self._processes):
                _read(selector, self._on_message, timeout=0.05)
                if self._received:
                    name = signal.Signals(self._received[0]).name
                    raise Stopped(f"stopped by {name}; the learners were ended", self._received[0])
                self._end_the_silent()
                if any(process.popen.poll() for process in self._watched()) and not self._bear(selector):
                    break
            deadline = time.monotonic() + CAUSE_PATIENCE
            # a learner that still runs may go on talking: it is not listened to for ever
            while (
                _read(selector, self._on_message, timeout=0.0) or _is_unexplained(self._watched())
            ) and time.monotonic() < deadline:
                _read(selector, self._on_message, timeout=0.05)
        failed = [process for process in self._watched() if process.popen.poll()]
        if failed:
            raise _cause(failed)

    def _watched(self) -> list[_Process]:
        """All but those whose loss was borne."""
        lost = {loss.learner for loss in self.losses}
        return [process for process in self._processes if process.rank not in lost]

    def _bear(self, selector: selectors.BaseSelector) -> bool:
        """Whether the others go on without those that have failed; if so, they are told."""
        while _read(selector, self._on_message, timeout=0.0):  # what they said last
            pass
        failed = [process for process in self._watched() if process.popen.poll()]
        left = [process for process in self._watched() if process.is_running]
        if (
            self._on_loss is None
            or not all(process.was_killed for process in failed)
            or not left
            or any(process.view < 0 for process in [*failed, *left])  # they have not all met yet
        ):
            return False
        self._view += 1
        reasons = [process.death() for process in failed]
        for process in left:
            members = [each.rank for each in left]
            process.tell({"view": self._view, "members": members, "reason": "; ".join(reasons)})
        for process, reason in zip(failed, reasons, strict=True):
            _end_loading([process], time.monotonic() + LOADING_GRACE)
            self.losses.append(Loss(process.rank, reason))
            self._on_loss(self.losses[-1])
        return True

    def _end_the_silent(self) -> None:
        now = time.monotonic()
        for process in self._watched():  # before learners have met, they load libraries, and wait for each other
            if process.is_running and process.view >= 0 and now - process.heard > self._silence_seconds:
                process.silence = now - process.heard
                process.popen.kill()
                process.popen.wait()


def _read(selector: selectors.BaseSelector, on_message: OnMessage, timeout: Seconds) -> bool:
    """Handle what learners sent; whether there was any."""
    ready = selector.select(timeout)
    for key, _ in ready:
        process: _Process = key.data
        try:
            received = process.line.recv(65536)
        except ConnectionResetError:
            received = b""
        if not received:
            selector.unregister(process.line)
            continue
        process.heard = time.monotonic()
        process.unread += received
        if b"\n" not in received:
            continue
        *lines, process.unread = process.unread.split(b"\n")
        for line in lines:
            message = json.loads(line)
            if not message:
                continue
            process.doing = message.get("doing", process.doing)
            process.view = message.get("view", process.view)
            if "error" in message:
                process.error = _revived(message["error"], message["message"])
            on_message(process.rank, message)
    return bool(ready)


def _revived(name: str, text: str) -> StarlingError:
    """The error that a learner reported, here."""
    kind = getattr(errors, name, StarlingError)
    if isinstance(kind, type) and issubclass(kind, StarlingError) and kind is not Stopped:
        return kind(text)
    return StarlingError(f"{name}: {text}")


def _is_unexplained(processes: list[_Process]) -> bool:
    """Whether learners failed, but only by losing others."""
    failed = [process for process in processes if process.popen.poll()]
    return bool(failed) and all(isinstance(process.error, PeerLost) for process in failed)


def _cause(failed: list[_Process]) -> StarlingError:
    """The first cause among failures: a death, then an error of a learner's own, then the loss of another."""
    for process in failed:
        if process.was_killed:
            return PeerLost(f"{process.death()}; its log: {process.log}")
    for process in failed:
        if process.error is None:
            return StarlingError(
                f"learner {process.rank} ended with exit code {process.popen.returncode} while {process.doing}; "
                f"its log: {process.log}"
            )
    own = [process for process in failed if not isinstance(process.error, PeerLost)]
    first = (own or failed)[0]
    return first.error or StarlingError(f"learner {first.rank} failed; its log: {first.log}")


def _end(processes: list[_Process]) -> None:
    """End what still runs, learners and their loading processes: asked first, killed after `GRACE`."""
    for process in processes:
        if process.popen.poll() is None:
            process.popen.terminate()
            process.popen.send_signal(signal.SIGCONT)  # one that is stopped could not end
    deadline = time.monotonic() + GRACE
    for process in processes:
        try:
            process.popen.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.popen.kill()
            process.popen.wait()
        process.line.close()
    _end_loading(processes, time.monotonic() + LOADING_GRACE)


def _end_loading(processes: list[_Process], deadline: float) -> None:
    """End the loading processes that outlived their learners.

    Python's resource tracker among them ignores SIGTERM, and ends by itself once it has removed their semaphores.
    """
    left = [process for process in processes if _signal_group(process, signal.SIGTERM)]
    while left and time.monotonic() < deadline:
        time.sleep(0.01)
        left = [process for process in left if _signal_group(process, 0)]
    for process in left:
        _signal_group(process, signal.SIGKILL)


def _signal_group(process: _Process, number: int) -> bool:
    """Signal a learner's process group; whether there is one."""
    try:
        os.killpg(process.popen.pid, number)
    except ProcessLookupError:
        return False
    return True


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


@contextmanager
def _signals(processes: list[_Process], scratch: Path) -> Generator[list[int], None, None]:
    """A list that SIGINT and SIGTERM are added to instead of ending this process; the second one ends it."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) > 1:
            for process in processes:
                _signal_group(process, signal.SIGTERM)
                process.popen.kill()  # also one that is stopped, and would not see the end of its line
            shutil.rmtree(scratch, ignore_errors=True)
            os._exit(128 + number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
