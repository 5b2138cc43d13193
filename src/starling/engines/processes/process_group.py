"""The process group of a membership, whose connections can be cut.

torch cannot end waits in a gloo group for peers that are alive but will not take part. Shutting down the connection
does: all waits on it fail immediately, in both processes. NCCL waits on the device, so its communicators are aborted.
"""

import os
import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _world

from starling.engines.processes import nccl
from starling.engines.processes.backend import check_files
from starling.engines.processes.forks import Identity, clone_store, identity, keep_from_children, sockets
from starling.engines.processes.handshake import Peers
from starling.errors import PeerLost


class Connections:
    """The TCP connections that this process opens between construction and `note`, without listening sockets. Its
    children hold none of them."""

    def __init__(self) -> None:
        self._before = sockets()
        self._made: dict[int, Identity] = {}
        self._aborted: set[str] = set()
        self._aborting = threading.Lock()  # groups destroyed after a cut must have been aborted

    def note(self) -> None:
        """Record the connections opened so far."""
        self._made = {number: own for number, own in sockets().items() if self._before.get(number) != own}
        keep_from_children(self._made)

    def cut_all(self) -> None:
        """Shut down all connections opened so far. May be called by any thread."""
        self.note()
        self.cut()

    def cut(self) -> None:
        """Shut down the recorded connections that still exist, and abort NCCL in all groups. May be called by any
        thread, repeatedly."""
        for number, own in self._made.items():
            with suppress(OSError):  # the connection is already closed
                if identity(number) == own:
                    _shut_down(number)
        with self._aborting:
            self._aborted |= nccl.abort(self._aborted)


def _shut_down(descriptor: int) -> None:
    with socket.socket(fileno=os.dup(descriptor)) as each:
        is_tcp = each.family in (socket.AF_INET, socket.AF_INET6) and each.type == socket.SOCK_STREAM
        if is_tcp and not each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            each.shutdown(socket.SHUT_RDWR)


@contextmanager
def process_group(peers: Peers, device: torch.device) -> Generator[Connections, None, None]:
    """Within this context `torch.distributed` has a default process group; yields its connections.

    The announcement of a later membership interrupts connecting. Within the context the caller must end waits itself.
    If learners are watched, that requires that NCCL's watchdog ends no process that lost a peer.
    """
    place = peers.place
    by_nccl = place.has_own_device(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if by_nccl and peers.feed.is_watched:
        nccl.outlive_lost_peers()
    connections = Connections()
    store = clone_store(place.store)  # its connection can be cut while it waits
    try:
        with (
            peers.telling(lambda change: connections.cut_all()),
            peers.waits.waiting("connecting to the others", range(place.world), is_group=True),
        ):
            dist.init_process_group(
                f"cpu:gloo,cuda:{nccl.BACKEND}" if by_nccl else "gloo",
                store=PrefixStore("group/0", store),
                rank=place.rank,
                world_size=place.world,
                timeout=timedelta(seconds=peers.timeout_seconds),
            )
    except RuntimeError as error:
        _world.group_count = (
            0  # so that later groups have the same names on all learners, even if only some failed here
        )
        check_files(place.rank)
        raise PeerLost(
            f"learner {place.rank} lost {peers.silent()} while connecting to the others ({str(error).splitlines()[0]})"
        ) from error
    connections.note()
    try:
        yield connections
    finally:
        dist.destroy_process_group()
