"""How a launcher and the nodes of a cluster connect: over TCP, and only if both know the run's token.

Each side proves that over challenges of both (see `run_token`). Afterwards the connection carries a learner's messages.
"""

import json
import socket
import threading
import time
from collections.abc import Callable

from starling.engines.processes.forks import owned
from starling.engines.processes.run_token import is_proof, new_challenge, proof
from starling.launch.coordinator import FULL, keep_alive
from starling.timeouts import DOOR, FULL_PAUSE, TERMINATION, UNREACHABLE

_LONGEST_HELLO = 1024
_LOOK_EVERY = 0.5


class Door:
    """Lets nodes in that know the run's token, each in a thread of its own, so that a stranger delays none of them.

    `admit` is called with the name that a node gave, its own name, and the connection; it raises KeyError for a name
    that it does not know. `look_after` is called twice a second.
    """

    def __init__(
        self,
        listener: socket.socket,
        token: str,
        admit: Callable[[str, str, socket.socket], None],
        look_after: Callable[[], None] = lambda: None,
    ) -> None:
        self._listener = listener
        self._token = token
        self._admit = admit
        self._look_after = look_after
        self._is_closed = False
        self._thread = threading.Thread(target=self._open, name="starling-door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Accept no more connections."""
        self._is_closed = True
        self._thread.join(TERMINATION)

    def _open(self) -> None:
        self._listener.settimeout(_LOOK_EVERY)
        while not self._is_closed:
            self._look_after()
            try:
                line, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if error.errno not in FULL:
                    return
                time.sleep(FULL_PAUSE)
                continue
            threading.Thread(target=self._answer, args=[line], daemon=True).start()

    def _answer(self, line: socket.socket) -> None:
        try:
            line.settimeout(DOOR)
            challenge = new_challenge()
            line.sendall(challenge.encode() + b"\n")
            hello = {key: str(value) for key, value in dict(json.loads(read_line(line))).items()}
            name, node, theirs = hello["name"], hello["node"], hello["challenge"]
            if not is_proof(hello["proof"], self._token, "node", challenge, name, node, theirs):
                raise ConnectionRefusedError
            line.sendall(proof(self._token, "launcher", challenge, name, theirs).encode() + b"\n")
            line.settimeout(None)
            keep_alive(line, 1, 1, int(UNREACHABLE) - 1)
            self._admit(name, node, owned(line))
        except (OSError, ValueError, KeyError, TypeError):
            line.close()


def knock(address: str, port: int, token: str, name: str, node: str) -> socket.socket:
    """Connect to the launcher's door as `node`, for the learner that was started as `name`."""
    line = socket.create_connection((address, port), timeout=DOOR)
    try:
        challenge, own = read_line(line), new_challenge()
        hello = {"name": name, "node": node, "challenge": own}
        hello["proof"] = proof(token, "node", challenge, name, node, own)
        line.sendall(json.dumps(hello).encode() + b"\n")
        if not is_proof(read_line(line), token, "launcher", challenge, name, own):
            raise ConnectionRefusedError("what listens there is not the launcher of this run")
        line.settimeout(None)
        keep_alive(line, 1, 1, int(UNREACHABLE) - 1)
        owned(line)
    except BaseException:
        line.close()
        raise
    return line


def read_line(line: socket.socket) -> str:
    """A short line, read byte by byte, so that nothing after it is taken."""
    content = bytearray()
    while not content.endswith(b"\n"):
        if not (byte := line.recv(1)):
            raise ConnectionRefusedError("the other side closed the connection")
        content += byte
        if len(content) > _LONGEST_HELLO:
            raise ConnectionRefusedError("the other side does not speak this protocol")
    try:
        return content[:-1].decode()
    except UnicodeDecodeError:
        raise ConnectionRefusedError("the other side does not speak this protocol") from None
