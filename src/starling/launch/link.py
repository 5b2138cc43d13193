"""The connection between a launcher or a coordinator and each of its learners: messages in both directions, and the
learner's heartbeat.

If the launcher dies, the learner reads end-of-file and exits, so that no process is left behind. If no heartbeat
arrives for a long time, the launcher concludes that the learner is stalled.

A learner that was started on the launcher's machine inherits its connection. Nodes of a cluster, and joined loops,
connect over TCP. Such a connection is accepted only if both sides know the run's token; each side proves its knowledge
with a message authentication code over the challenges of both sides, see `run_token`.
"""

import os
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from starling.engines.processes import run_token
from starling.engines.processes.forks import owned
from starling.errors import ProtocolError, StarlingError
from starling.launch import messages
from starling.timeouts import DOOR, FULL_PAUSE, HEARTBEAT_EVERY, TERMINATION, Seconds

VARIABLE = "STARLING_LINK_FD"
SCRATCH = "STARLING_SCRATCH"
"""Environment variable: folder for the temporary files of this run."""
JOINS = "STARLING_JOINS"
"""Environment variable: 1 if the learner joins a running experiment."""
WATCHED = "STARLING_WATCHED"
"""Environment variable: 1 if the launcher announces memberships after losses."""
ORPHANED = 3
"""Exit code of a learner whose launcher died."""
MessageT = TypeVar("MessageT", bound=messages.LauncherMessage)
Admit = Callable[[tuple[str, ...], socket.socket, messages.Greeted], None]
_LONGEST_LINE = 1024
_LOOK_EVERY = 0.5


class Line:
    """One end of a connection that carries messages. It never waits for the other end.

    Until the line is connected, it keeps the messages that are to be sent.
    """

    def __init__(self, connection: socket.socket | None = None) -> None:
        self.connection = connection
        self.closed_at = 0.0
        """Time at which the connection was closed, on the monotonic clock; 0 while it is open."""
        self.unread = bytearray()
        """The part of an incomplete message that has been received."""
        self.untold = bytearray()
        """Messages that could not be sent yet, because the other end does not read and the buffer is full."""

    def fileno(self) -> int:
        """The descriptor of the connection; -1 before the line is connected and after it was closed."""
        return -1 if self.connection is None else self.connection.fileno()

    def tell(self, message: messages.LauncherMessage) -> None:
        """Send a message. A part for which the buffer has no room is sent later by `tell_rest`; it is dropped if the
        connection is lost."""
        self.untold += messages.encode(message)
        self.tell_rest()

    def tell_rest(self) -> None:
        """Send the messages for which the buffer had no room."""
        if self.connection is not None:
            try:
                del self.untold[: self.connection.send(self.untold, socket.MSG_DONTWAIT)]
            except BlockingIOError:
                pass
            except OSError:
                self.untold.clear()

    def hear(self) -> list[bytes]:
        """Return the messages that are complete now. Raises `BlockingIOError` if no data has arrived, and `EOFError` at
        the end of the connection."""
        try:
            received = self.connection.recv(1 << 16, socket.MSG_DONTWAIT) if self.connection is not None else b""
        except BlockingIOError:
            raise
        except OSError:  # it was reset, or its machine does not answer any more
            received = b""
        if not received:
            raise EOFError
        self.unread += received
        if b"\n" not in received:
            return []
        *complete, self.unread = self.unread.split(b"\n")
        return [bytes(each) for each in complete]

    def hang_up(self) -> None:
        """End the connection. Both ends can still read the data that was sent, and then read end-of-file."""
        if self.connection is not None:
            with suppress(OSError):  # the other end has already shut it down
                self.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end."""
        if self.connection is not None:
            self.connection.close()
        self.closed_at = self.closed_at or time.monotonic()


class Link:
    """A learner's connection to its launcher or its coordinator: messages in both directions, and heartbeats.

    A thread calls `on_end` once the connection has ended, or has delivered an invalid message. Without `on_end`, this
    process then exits.
    """

    def __init__(self, connection: socket.socket, on_end: Callable[[Exception], None] | None = None) -> None:
        self._connection = owned(connection)
        self._sending, self._listening = threading.Lock(), threading.Lock()
        self._heard: list[messages.LauncherMessage] = []
        self._listeners: list[tuple[type[messages.LauncherMessage], Callable[[Any], None]]] = []
        self._on_end = on_end or self._exit
        self._is_closed = False
        self.heartbeat: Callable[[], messages.Heartbeat] = messages.Heartbeat
        """Function that creates the message that is sent every `HEARTBEAT_EVERY` seconds."""
        self.leftovers = [Path(os.environ[SCRATCH])] if SCRATCH in os.environ else []
        """Folders that this process removes if the launcher dies. Normally, the launcher removes them."""
        threading.Thread(target=self._hear, name="starling-link", daemon=True).start()
        threading.Thread(target=self._beat, name="starling-heart", daemon=True).start()

    @classmethod
    def from_environment(cls) -> "Link | None":
        """The link to the launcher that started this process; None under torchrun and Slurm."""
        descriptor = os.environ.pop(VARIABLE, None)
        return None if descriptor is None else cls(socket.socket(fileno=int(descriptor)))

    def send(self, message: messages.LearnerMessage) -> None:
        """Send a message."""
        line = messages.encode(message)
        with self._sending:
            self._connection.sendall(line)

    def listen(self, kind: type[MessageT], listener: Callable[[MessageT], None]) -> None:
        """Call `listener` with each message of a kind, in addition to other listeners. It is called at once with
        messages that have already arrived, and in the link's thread with later messages."""
        with self._listening:
            self._listeners.append((kind, listener))
            for message in self._heard:
                if isinstance(message, kind):
                    listener(message)

    def close(self, last: messages.LearnerMessage) -> None:
        """Send a last message, and hang up."""
        self._is_closed = True
        with suppress(OSError):
            self.send(last)
            self._connection.shutdown(socket.SHUT_RDWR)

    def _beat(self) -> None:
        while not self._is_closed:
            time.sleep(HEARTBEAT_EVERY)
            with suppress(OSError):  # the other end is gone, or a log cannot be written; the next message may succeed
                self.send(self.heartbeat())

    def _hear(self) -> None:
        error: Exception = ConnectionError("its connection closed")
        try:
            with self._connection.makefile("rb") as lines:
                for line in lines:
                    message = messages.decode_from_launcher(line)
                    with self._listening:
                        self._heard.append(message)
                        for kind, listener in self._listeners:
                            if isinstance(message, kind):
                                listener(message)
        except (OSError, ProtocolError) as own:
            error = own
        if not self._is_closed:
            self._on_end(error)

    def _exit(self, error: Exception) -> None:
        """End this learner and its loading processes, and remove the launcher's leftovers."""
        code, reason = (
            (error.exit_code, error) if isinstance(error, ProtocolError) else (ORPHANED, "the launcher is gone")
        )
        with suppress(OSError):  # the disk may be full
            sys.stderr.write(f"{reason}: this learner exits\n")
            sys.stderr.flush()
        for folder in self.leftovers:
            shutil.rmtree(folder, ignore_errors=True)
        if os.getpgrp() == os.getpid():  # the process group consists of this learner and its loading processes
            os.killpg(0, signal.SIGTERM)  # SIGKILL would leave their semaphores in shared memory
        os._exit(code)


@contextmanager
def reported_errors(link: Link | None) -> Generator[None, None, None]:
    """Report an error to the launcher, print its traceback, and exit with its exit code. Without a link, errors
    propagate."""
    try:
        yield
    except Exception as error:
        if link is None:
            raise
        traceback.print_exc()
        link.send(messages.Failed(type(error).__name__, str(error)))
        raise SystemExit(error.exit_code if isinstance(error, StarlingError) else 1) from error


@contextmanager
def letting_in(
    listener: socket.socket,
    token: str,
    unreachable: Seconds,
    admit: Admit,
    look_after: Callable[[], None] = lambda: None,
) -> Generator[None, None, None]:
    """Within this context, admit processes that know the run's token. Each connection is handled in a separate thread,
    so that a process without the token delays no other.

    `admit` is called in that thread with the sender's `who`, the connection, and the welcome that `admit` must send
    first. It raises `ProtocolError` to refuse the sender, and `KeyError` or `ValueError` for messages that no honest
    process sends. `look_after` is called twice a second. If the machine of an admitted process does not answer for
    `unreachable` seconds, its connection fails.
    """
    is_closed = threading.Event()

    def accept() -> None:
        listener.settimeout(_LOOK_EVERY)
        while not is_closed.is_set():
            look_after()
            try:
                line, _ = listener.accept()
            except TimeoutError:
                continue
            except OSError:  # mostly: no more files can be opened. The connection stays in the queue
                is_closed.wait(FULL_PAUSE)
                continue
            threading.Thread(target=_answer, args=[line, token, unreachable, admit], daemon=True).start()

    thread = threading.Thread(target=accept, name="starling-door", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_closed.set()
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # ends the wait in `accept`
        thread.join(TERMINATION)


def _answer(line: socket.socket, token: str, unreachable: Seconds, admit: Admit) -> None:
    try:
        line.settimeout(DOOR)
        challenge = run_token.new_challenge()
        line.sendall(challenge.encode() + b"\n")
        hello = messages.decode_from_learner(read_line(line), -1)
        if not isinstance(hello, messages.Hello) or not run_token.is_proof(
            hello.proof, token, "guest", challenge, hello.challenge, *hello.who
        ):
            raise ProtocolError(
                f"it does not belong to this run: its run token is another one; set {run_token.VARIABLE} to the same "
                "value for all learners of a run, or for none of them"
            )
        _settle(line, unreachable)
        admit(hello.who, line, messages.Greeted(proof=run_token.proof(token, "host", hello.challenge, *hello.who)))
    except ProtocolError as error:
        with suppress(OSError):
            line.sendall(messages.encode(messages.Greeted(str(error))))
        line.close()
    except (OSError, KeyError, ValueError):
        line.close()


def knock(address: str, port: int, token: str, unreachable: Seconds, *who: str) -> socket.socket:
    """Connect as `who` to a process that admits others with `letting_in`. `unreachable` has the same meaning as there.

    Raises `OSError` if no process listens at the address, and `ProtocolError` if it refuses or does not know the token.
    """
    line = socket.create_connection((address, port), timeout=DOOR)
    try:
        challenge, own = read_line(line).decode(errors="replace"), run_token.new_challenge()
        line.sendall(messages.encode(messages.Hello(who, own, run_token.proof(token, "guest", challenge, own, *who))))
        answer = messages.decode_from_launcher(read_line(line))
        if not isinstance(answer, messages.Greeted):
            raise ProtocolError("it did not answer")
        if answer.refused or not run_token.is_proof(answer.proof, token, "host", own, *who):
            raise ProtocolError(answer.refused or "what listens there does not know the run token")
        return _settle(line, unreachable)
    except BaseException:
        line.close()
        raise


def _settle(line: socket.socket, unreachable: Seconds) -> socket.socket:
    """Configure a connection so that it fails once the other machine has not answered for `unreachable` seconds. The
    kernel of a machine answers even while its processes are stopped or busy."""
    line.settimeout(None)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": unreachable - 1}
    for name, value in (options | {"TCP_USER_TIMEOUT": 1000 * unreachable}).items():
        if hasattr(socket, name):  # some systems lack these options
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), int(value))
    return owned(line)


def read_line(line: socket.socket) -> bytes:
    """Read a short line byte by byte, so that no data after the line is consumed."""
    content = b""
    while not content.endswith(b"\n"):
        content += (byte := line.recv(1))
        if not byte:
            raise ConnectionRefusedError("the other side closed the connection")
        if len(content) > _LONGEST_LINE:
            raise ConnectionRefusedError("the other side does not speak this protocol")
    return content[:-1]
