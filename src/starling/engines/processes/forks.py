"""Keeps the connections of a process out of the children that it forks, such as loading processes.

A connection ends only when the last process that holds it closes it, so a forked child that kept a connection would
hide its parent's death from the other processes. Most sockets belong to torch, which does not reveal their descriptors.
They are recognised because they appear while torch connects. In a child, their descriptors are redirected to /dev/null:
torch closes these descriptors later, and must not close a different file.
"""

from __future__ import annotations

import ctypes
import os
import stat
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from socket import AF_INET, AF_INET6, SO_ACCEPTCONN, SOL_SOCKET, socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

Identity = tuple[int, int]


def identity(descriptor: int) -> Identity | None:
    """Return the identity of a socket, or None for any other file."""
    status = os.fstat(descriptor)
    return (status.st_dev, status.st_ino) if stat.S_ISSOCK(status.st_mode) else None


def sockets() -> dict[int, Identity]:
    """All sockets of this process by descriptor."""
    found: dict[int, Identity] = {}
    for path in Path("/dev/fd").iterdir():
        with suppress(OSError):  # raised, for example, for the descriptor of the listing itself
            if own := identity(int(path.name)):
                found[int(path.name)] = own
    return found


def keep_from_children(own: Mapping[int, Identity]) -> None:
    """Ensure that children of this process, whether forked or executed, hold none of these sockets."""
    for number, which in list(_own.items()):  # other threads may add theirs
        if not _is(number, which):
            _own.pop(number, None)
    for number, which in own.items():
        if _is(number, which):
            _own[number] = which
            os.set_inheritable(number, False)  # gloo's would be inherited by programs that a child executes


@contextmanager
def own_connections() -> Generator[None, None, None]:
    """Ensure that children hold none of the sockets that are opened within this context and are still open at its
    end."""
    before = sockets()
    try:
        yield
    finally:
        keep_from_children({number: which for number, which in sockets().items() if before.get(number) != which})


def owned(line: socket) -> socket:
    """Return `line`, after ensuring that children of this process do not hold it."""
    if which := identity(line.fileno()):
        keep_from_children({line.fileno(): which})
    return line


def clone_store(store: Store) -> Store:
    """Return the same store over a separate connection. Each connection serves one wait or one request at a time."""
    with own_connections():
        clone: Store = store.clone()  # type: ignore[attr-defined]
    return clone


_own: dict[int, Identity] = {}


def _is(number: int, which: Identity) -> bool:
    with suppress(OSError):  # the socket is closed
        return identity(number) == which
    return False


def _port(number: int) -> tuple[int, bool]:
    """The local port of a socket, 0 if it has none, and whether the socket listens."""
    with socket(fileno=os.dup(number)) as line:
        if line.family not in (AF_INET, AF_INET6):
            return 0, False
        return int(line.getsockname()[1]), bool(line.getsockopt(SOL_SOCKET, SO_ACCEPTCONN))


def _let_go() -> None:
    """Close the inherited connections, including those that a store has accepted since they were recorded. This
    function is called in each forked child."""
    held = {number for number, which in _own.items() if _is(number, which)}
    listening = {port for port, listens in map(_port, held) if listens}
    held |= {number for number in sockets() if _port(number)[0] in listening}
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for number in held:
        os.dup2(nothing, number, inheritable=False)
    os.close(nothing)
    _own.clear()
    torch_distributed = sys.modules.get("torch.distributed.distributed_c10d")  # a launcher has not loaded it
    for group in torch_distributed._world.pg_map if torch_distributed else ():
        # its destructor waits for threads, which a child does not have
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


os.register_at_fork(after_in_child=_let_go)
