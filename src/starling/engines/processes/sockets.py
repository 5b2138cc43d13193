"""The connections of a process group, cut on purpose.

Nothing in torch ends the waits that several threads have in a gloo group, for peers that are alive but will not come.
A connection that is shut down does: in both processes, every wait on it fails at once. Where there is NCCL, which waits
on the device, its communicators are aborted as well.
"""

import os
import socket
import stat
import threading
from contextlib import suppress
from pathlib import Path

from starling.engines.processes import nccl

_Identity = tuple[int, int]


class Connections:
    """The TCP connections that this process makes between now and `note`, but for listening sockets."""

    def __init__(self) -> None:
        self._before = _sockets()
        self._made: dict[int, _Identity] = {}
        self._aborted: set[str] = set()
        self._aborting = threading.Lock()  # whoever destroys the groups after a cut must find them aborted

    def note(self) -> None:
        """Those made so far are the ones."""
        self._made = {number: own for number, own in _sockets().items() if self._before.get(number) != own}

    def cut_all(self) -> None:
        """Shut down those made until now. Called by any thread."""
        self.note()
        self.cut()

    def cut(self) -> None:
        """Shut down those that are still there, and abort what NCCL does in any group. Called by any thread, also
        several times."""
        for number, own in self._made.items():
            with suppress(OSError):  # it is gone
                if _identity(number) == own:
                    _shut_down(number)
        with self._aborting:
            self._aborted |= nccl.abort(self._aborted)


def _sockets() -> dict[int, _Identity]:
    """All sockets of this process by descriptor."""
    found: dict[int, _Identity] = {}
    for path in Path("/dev/fd").iterdir():
        with suppress(OSError):  # such as the descriptor that listing needed
            if identity := _identity(int(path.name)):
                found[int(path.name)] = identity
    return found


def _identity(descriptor: int) -> _Identity | None:
    """What tells a socket from the others; None for what is none."""
    status = os.fstat(descriptor)
    return (status.st_dev, status.st_ino) if stat.S_ISSOCK(status.st_mode) else None


def _shut_down(descriptor: int) -> None:
    with socket.socket(fileno=os.dup(descriptor)) as each:
        is_tcp = each.family in (socket.AF_INET, socket.AF_INET6) and each.type == socket.SOCK_STREAM
        if is_tcp and not each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            each.shutdown(socket.SHUT_RDWR)
