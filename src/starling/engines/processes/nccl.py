"""NCCL's communicators: made before they are needed, and aborted when a membership ends.

A learner that waits for others in NCCL waits in a kernel on its device, which no cut connection ends; aborting the
communicator does. An aborted collective then looks complete, whatever its result holds: so a learner that waited for
one must check whether its membership has ended before it uses the result.
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

SETTINGS = {
    # The watchdog neither ends the process when a peer is lost nor aborts by itself: the learner aborts when it hears
    # that the membership has changed, and only then it knows that results are void.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # Nor does the thread that monitors the watchdog end the process, now or after an error that a peer reports.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # A watchdog that saw an error sleeps for four times this long, and whoever destroys its group waits for it.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250",
}
"""Environment variables that torch reads when it makes a group on NCCL (torch 2.10 to 2.13)."""


def outlive_lost_peers() -> None:
    """Let this process live on when a peer is lost. Has an effect on groups made later; what the user set stays."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)


def connect(group: ProcessGroup, device: torch.device) -> None:
    """Make the communicator of `group` now, where torch would make it in the first collective.

    All its members call it, while the connections that it makes can still be told from others.
    """
    dist.broadcast(torch.zeros(1, device=device), group=group, group_src=0)
    synchronize(device)


def abort(done: Collection[str] = ()) -> set[str]:
    """End what NCCL does in the groups of this process, but for those with names in `done`; the names of the others.

    Called by any thread. Groups of other backends are left alone: torch's `abort` does not end what they wait for.
    """
    found = {
        str(group.group_name): backend for group in list(_world.pg_names) if (backend := _on_nccl(group)) is not None
    }
    aborting = [
        threading.Thread(target=_abort, args=(name, backend), name="starling-abort")
        for name, backend in found.items()
        if name not in done
    ]
    for thread in aborting:  # at once: an abort frees memory, for which it waits for the kernels of all communicators
        thread.start()
    for thread in aborting:
        thread.join()
    return set(found) - set(done)


def _on_nccl(group: ProcessGroup) -> Backend | None:
    """What a group uses on CUDA, if that is NCCL."""
    with suppress(RuntimeError):  # it has nothing there
        backend = group._get_backend(torch.device("cuda"))
        return backend if backend.name() == "nccl" else None
    return None


def _abort(name: str, backend: Backend) -> None:
    try:
        backend.abort()
    except RuntimeError as error:
        warnings.warn(f"NCCL did not abort group {name}: {error}", stacklevel=1)
