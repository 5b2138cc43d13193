"""NCCL's communicators: created before they are needed, and aborted when a membership ends.

A learner that waits in NCCL waits for a kernel on its device. Closing connections does not end that kernel; aborting
the communicator does. An aborted collective appears complete although its result is invalid, so a learner must check
whether its membership has ended before it uses a result.
"""

import os
import threading
import warnings
from collections.abc import Collection
from contextlib import suppress

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _world

from starling.training.streams import synchronize

BACKEND = "nccl"
"""The backend for means if each learner has its own device."""
SETTINGS = {
    # When a peer is lost, the watchdog must neither end the process nor abort: the learner aborts when the membership
    # changes, because only then does it know that results are invalid.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # The watchdog's monitor must not end the process either, also not after an error reported by a peer.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # After an error the watchdog sleeps four times as long as this, and destroying its group waits for it.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250",
}
"""Environment variables that torch reads when it creates a group on NCCL (torch 2.10 to 2.13)."""


def outlive_lost_peers() -> None:
    """Keep this process alive when a peer is lost. Affects groups created later; the user's own settings win."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)


def connect(group: ProcessGroup, device: torch.device) -> None:
    """Create the communicator of `group` now instead of in its first collective.

    All members call this before `Connections.note`, which records the connections of the membership.
    """
    dist.broadcast(torch.zeros(1, device=device), group=group, group_src=0)
    synchronize(device)


def abort(done: Collection[str] = ()) -> set[str]:
    """Abort NCCL in this process's groups, except for those named in `done`; returns the names of the aborted groups.

    May be called by any thread. Groups of other backends are not aborted: torch's `abort` does not end their waits.
    """
    found = {
        str(group.group_name): backend for group in list(_world.pg_names) if (backend := _on_nccl(group)) is not None
    }
    aborting = [
        threading.Thread(target=_abort, args=(name, backend), name="starling-abort")
        for name, backend in found.items()
        if name not in done
    ]
    for thread in aborting:  # in parallel: an abort frees memory, which waits for the kernels of all communicators
        thread.start()
    for thread in aborting:
        thread.join()
    return set(found) - set(done)


def _on_nccl(group: ProcessGroup) -> Backend | None:
    """The backend of a group on CUDA, if that is NCCL."""
    with suppress(RuntimeError):  # the group has no backend on CUDA
        backend = group._get_backend(torch.device("cuda"))
        return backend if backend.name() == "nccl" else None
    return None


def _abort(name: str, backend: Backend) -> None:
    try:
        backend.abort()
    except RuntimeError as error:
        warnings.warn(f"NCCL did not abort group {name}: {error}", stacklevel=1)
