"""The process group of a membership, whose connections can be cut.

torch offers no way to end waits in a gloo group for peers that are alive but will not take part. Shutting down the
connection ends them: all waits on it fail immediately, in both processes.

A learner that waits in NCCL waits for a kernel on its device. Closing connections does not end that kernel, but
aborting the communicator does. An aborted collective appears complete although its result is invalid, so a learner must
check whether its membership has ended before it uses a result.
"""

import os
import socket
import threading
import warnings
from collections.abc import Collection, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import PrefixStore, _world

from starling.engines.processes.backend import check_files
from starling.engines.processes.forks import Identity, clone_store, identity, keep_from_children, sockets
from starling.engines.processes.handshake import Peers
from starling.errors import PeerLost
from starling.training.streams import synchronize

BACKEND = "nccl"
"""Backend for means if each learner has its own device."""
SETTINGS = {
    # When a peer is lost, the watchdog must neither end the process nor abort: the learner aborts when the membership
    # changes, because only then does it know that results are invalid.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # The watchdog's monitor must not end the process either, not even after a peer has reported an error.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # After an error the watchdog sleeps four times as long as this, and destroying its group waits for the watchdog.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250",
}
"""Environment variables that torch reads when it creates a group on NCCL (torch 2.10 to 2.13)."""


class Connections:
    """The TCP connections that this process opens between the construction of this object and the last call of `note`
    or, if `note` is not called, of `cut`. Listening sockets are not included. Children of the process hold none of
    these connections."""

    def __init__(self) -> None:
        self._before = sockets()
        self._is_complete = False
        self._made: dict[int, Identity] = {}
        self._aborted: set[str] = set()
        self._aborting = threading.Lock()  # groups destroyed after a cut must have been aborted

    def note(self, is_complete: bool = True) -> None:
        """Record the connections opened so far. If `is_complete`, connections opened later do not count."""
        self._made = {number: own for number, own in sockets().items() if self._before.get(number) != own}
        self._is_complete = is_complete
        keep_from_children(self._made)

    def cut(self) -> None:
        """Shut down the connections that still exist, and abort NCCL in all groups. Any thread may call this method,
        and may call it repeatedly."""
        if not self._is_complete:
            self.note(is_complete=False)
        for number, own in self._made.items():
            with suppress(OSError):  # the connection is already closed
                if identity(number) == own:
                    _shut_down(number)
        with self._aborting:
            self._aborted |= abort(self._aborted)


def _shut_down(descriptor: int) -> None:
    with socket.socket(fileno=os.dup(descriptor)) as each:
        is_tcp = each.family in (socket.AF_INET, socket.AF_INET6) and each.type == socket.SOCK_STREAM
        if is_tcp and not each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            each.shutdown(socket.SHUT_RDWR)


@contextmanager
def process_group(peers: Peers, device: torch.device) -> Generator[Connections, None, None]:
    """Within this context, `torch.distributed` has a default process group. The context yields the connections of the
    group; the caller must call `note` on them once it has created all groups.

    The connections are cut when the membership ends or an error occurs within the context, so that no thread keeps
    waiting for the other learners. If learners are watched, NCCL's watchdog must not end a process that lost a peer.
    """
    place = peers.place
    by_nccl = place.has_own_device(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if by_nccl and peers.feed.is_watched:
        for name, value in SETTINGS.items():  # the user's own settings take precedence
            os.environ.setdefault(name, value)
    connections = Connections()
    store = clone_store(place.store)  # its connection can be cut while it waits
    try:
        with (
            peers.telling(lambda _: connections.cut()),
            peers.waits.waiting("connecting to the others", range(place.world), is_group=True),
        ):
            dist.init_process_group(
                f"cpu:gloo,cuda:{BACKEND}" if by_nccl else "gloo",
                store=PrefixStore("group/0", store),
                rank=place.rank,
                world_size=place.world,
                timeout=timedelta(seconds=peers.timeout_seconds),
            )
    except RuntimeError as error:
        # so that later groups have the same names on all learners, even if only some failed here
        _world.group_count = 0
        check_files(place.rank)
        raise PeerLost(
            f"learner {place.rank} lost {peers.silent()} while connecting to the others ({str(error).splitlines()[0]})"
        ) from error
    connections.note(is_complete=False)
    try:
        with peers.telling(lambda _: connections.cut()):
            yield connections
    except BaseException:
        connections.cut()
        raise
    finally:
        dist.destroy_process_group()


def connect(group: ProcessGroup, device: torch.device) -> None:
    """Create the communicator of `group` now instead of in the group's first collective.

    All members must call this function before `Connections.note`, which records the connections of the membership.
    """
    dist.broadcast(torch.zeros(1, device=device), group=group, group_src=0)
    synchronize(device)


def abort(done: Collection[str] = ()) -> set[str]:
    """Abort NCCL in this process's groups, except the groups named in `done`, and return the names of the aborted
    groups.

    Any thread may call this function. Groups on other backends are not aborted, because torch's `abort` does not end
    their waits.
    """
    found = {
        name: backend
        for group in list(_world.pg_names)
        if (name := str(group.group_name)) not in done and (backend := _on_nccl(group)) is not None
    }
    # in parallel, because an abort frees memory, which waits for the kernels of all communicators
    with ThreadPoolExecutor(max(1, len(found)), "starling-abort") as pool:
        list(pool.map(_abort, found, found.values()))
    return set(found)


def _on_nccl(group: ProcessGroup) -> Backend | None:
    """Return the backend of a group on CUDA if that backend is NCCL, else None."""
    with suppress(RuntimeError):  # the group has no backend on CUDA
        backend = group._get_backend(torch.device("cuda"))
        return backend if backend.name() == "nccl" else None
    return None


def _abort(name: str, backend: Backend) -> None:
    try:
        backend.abort()
    except RuntimeError as error:
        warnings.warn(f"NCCL did not abort group {name}: {error}", stacklevel=1)
