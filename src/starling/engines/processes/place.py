"""A learner process's place: its rank, device and cores, the store through which learners connect, and the connections
that its children do not hold.

A connection ends with the last process that holds it, so a forked child would hide its parent's death from the others.
Most sockets belong to torch, which does not tell their descriptors; they are recognised because they appear while torch
connects. In a child, /dev/null takes their numbers, because torch, which closes them later, must not close something
else.
"""

from __future__ import annotations

import ctypes
import os
import stat
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from socket import AF_INET, AF_INET6, SO_ACCEPTCONN, SOL_SOCKET, socket
from typing import TYPE_CHECKING

import torch
from torch.distributed.distributed_c10d import PrefixStore, Store

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


NODE_CPUS = "STARLING_NODE_CPUS"
"""Environment variable: on a Ray cluster, the number of CPUs that the node offers, which may be fewer than it has."""


@dataclass(frozen=True)
class Place:
    """A learner's ranks and its store."""

    rank: int
    world: int
    local_rank: int
    """Rank of the learner among the `local_world` learners of its machine."""
    local_world: int
    store: Store
    owns_device: bool = False
    """Whether the learner sees one CUDA device, which no other learner uses and which a cluster's scheduler has
    assigned to it."""
    first: int = 0
    step: int = 1
    """Learner r of this place is process `first + r * step` of the membership."""
    num_rows: int = 1
    """Number of places that divide the processes of the membership: one for each rank of an island."""

    def process(self, rank: int) -> int:
        """The number of a learner in the membership's process group."""
        return self.first + rank * self.step

    def row(self, size: int) -> Place:
        """The place of this learner among those that hold the same shard, one in each island of `size`."""
        if size == 1:
            return self
        island, member = divmod(self.rank, size)
        store = PrefixStore(f"row/{member}", self.store)
        return replace(self, rank=island, world=self.world // size, store=store, first=member, step=size, num_rows=size)

    def has_own_device(self, device: torch.device) -> bool:
        """Whether each learner of this machine has its own CUDA device, as NCCL requires."""
        return device.type == "cuda" and (self.owns_device or self.local_world <= torch.cuda.device_count())

    def use_threads(self, threads: int | None) -> None:
        """Set torch's number of threads; None sets this learner's share of its machine's cores."""
        torch.set_num_threads(threads or max(1, cores_here() // self.local_world))


def choose_device(name: str, place: Place) -> torch.device:
    """The device of a learner. `auto` is CUDA if available; learners are assigned to its devices in turn."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    return torch.device("cuda", place.local_rank % torch.cuda.device_count())


def cores_here() -> int:
    """The number of cores that this process may use: on a Ray cluster, at most the node's CPUs."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, int(os.environ.get(NODE_CPUS, cores)))


Identity = tuple[int, int]


def identity(descriptor: int) -> Identity | None:
    """Identifies a socket; None for any other file."""
    status = os.fstat(descriptor)
    return (status.st_dev, status.st_ino) if stat.S_ISSOCK(status.st_mode) else None


def sockets() -> dict[int, Identity]:
    """All sockets of this process by descriptor."""
    found: dict[int, Identity] = {}
    for path in Path("/dev/fd").iterdir():
        with suppress(OSError):  # such as the descriptor of the listing itself
            if own := identity(int(path.name)):
                found[int(path.name)] = own
    return found


def keep_from_children(own: Mapping[int, Identity]) -> None:
    """Let children of this process, whether forked or executed, hold none of these sockets."""
    for number, which in list(_own.items()):  # other threads may add theirs
        if not _is(number, which):
            _own.pop(number, None)
    for number, which in own.items():
        if _is(number, which):
            _own[number] = which
            os.set_inheritable(number, False)  # gloo's would be inherited by programs that a child executes


@contextmanager
def own_connections() -> Generator[None, None, None]:
    """Children hold none of the sockets that are opened within this context and remain."""
    before = sockets()
    try:
        yield
    finally:
        keep_from_children({number: which for number, which in sockets().items() if before.get(number) != which})


def owned(line: socket) -> socket:
    """`line`, which children of this process do not hold."""
    if which := identity(line.fileno()):
        keep_from_children({line.fileno(): which})
    return line


def clone_store(store: Store) -> Store:
    """The store over a separate connection: each connection serves one wait or one request at a time."""
    with own_connections():
        clone: Store = store.clone()  # type: ignore[attr-defined]
    return clone


_own: dict[int, Identity] = {}


def _is(number: int, which: Identity) -> bool:
    with suppress(OSError):  # it is closed
        return identity(number) == which
    return False


def _port(number: int) -> tuple[int, bool]:
    """The local port of a socket, 0 if it has none, and whether the socket listens."""
    with socket(fileno=os.dup(number)) as line:
        if line.family not in (AF_INET, AF_INET6):
            return 0, False
        return int(line.getsockname()[1]), bool(line.getsockopt(SOL_SOCKET, SO_ACCEPTCONN))


def _let_go() -> None:
    """Close the inherited connections, including those that a store has accepted since. Called in each forked child."""
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
