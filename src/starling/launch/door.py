"""How a launcher, or the coordinator of joined loops, and those that belong to its run connect: over TCP, and only if
both know the run's token.

Each side proves that over challenges of both (see `run_token`). Afterwards the connection carries a learner's messages.
"""

import socket
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress

from starling.engines.processes.forks import owned
from starling.engines.processes.run_token import VARIABLE, is_proof, new_challenge, proof
from starling.errors import ProtocolError
from starling.launch.messages import Greeted, Hello, decode_from_launcher, decode_from_learner, encode
from starling.timeouts import DOOR, FULL_PAUSE, TERMINATION

Seconds = float
Admit = Callable[[tuple[str, ...], socket.socket, Greeted], None]
_LONGEST_LINE = 1024
_LOOK_EVERY = 0.5


@contextmanager
def letting_in(
    listener: socket.socket,
    token: str,
    unreachable: Seconds,
    admit: Admit,
    look_after: Callable[[], None] = lambda: None,
) -> Generator[None, None, None]:
    """Within this context, let those in that know the run's token, each in a thread of its own, so that a stranger
    delays none of them.

    `admit` is called in that thread with who comes, the connection, and the welcome that it sends first. It raises
    `ProtocolError` to refuse, `KeyError` or `ValueError` for what no honest process says. `look_after` is called twice
    a second. If the machine of one that was let in does not answer for `unreachable` seconds, its connection fails.
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
        challenge = new_challenge()
        line.sendall(challenge.encode() + b"\n")
        hello = decode_from_learner(read_line(line), -1)
        if not isinstance(hello, Hello) or not is_proof(
            hello.proof, token, "guest", challenge, hello.challenge, *hello.who
        ):
            raise ProtocolError(
                f"it does not belong to this run: its run token is another one; set {VARIABLE} to the same value "
                "for all learners of a run, or for none of them"
            )
        _settle(line, unreachable)
        admit(hello.who, line, Greeted(proof=proof(token, "host", hello.challenge, *hello.who)))
    except ProtocolError as error:
        with suppress(OSError):
            line.sendall(encode(Greeted(str(error))))
        line.close()
    except (OSError, KeyError, ValueError):
        line.close()


def knock(address: str, port: int, token: str, unreachable: Seconds, *who: str) -> socket.socket:
    """Connect to a door as `who`. `unreachable` is as for the door.

    Raises `OSError` if there is none, `ProtocolError` if it refuses, or does not know the token.
    """
    line = socket.create_connection((address, port), timeout=DOOR)
    try:
        challenge, own = read_line(line).decode(errors="replace"), new_challenge()
        line.sendall(encode(Hello(who, own, proof(token, "guest", challenge, own, *who))))
        answer = decode_from_launcher(read_line(line))
        if not isinstance(answer, Greeted):
            raise ProtocolError("it did not answer")
        if answer.refused or not is_proof(answer.proof, token, "host", own, *who):
            raise ProtocolError(answer.refused or "what listens there does not know the run token")
        return _settle(line, unreachable)
    except BaseException:
        line.close()
        raise


def _settle(line: socket.socket, unreachable: Seconds) -> socket.socket:
    """Let a connection last, until the other machine has not answered for `unreachable` seconds. The kernel of a
    machine answers even while its processes are stopped or busy."""
    line.settimeout(None)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": unreachable - 1}
    for name, value in (options | {"TCP_USER_TIMEOUT": 1000 * unreachable}).items():
        if hasattr(socket, name):  # not on every system
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), int(value))
    return owned(line)


def read_line(line: socket.socket) -> bytes:
    """A short line, read byte by byte, so that nothing after it is taken."""
    content = b""
    while not content.endswith(b"\n"):
        content += (byte := line.recv(1))
        if not byte:
            raise ConnectionRefusedError("the other side closed the connection")
        if len(content) > _LONGEST_LINE:
            raise ConnectionRefusedError("the other side does not speak this protocol")
    return content[:-1]
