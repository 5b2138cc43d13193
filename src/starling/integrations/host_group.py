"""The process group of a host framework before its processes join, when they prepare together."""

from datetime import timedelta
from itertools import count

import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore

from starling.launch.joining import shared_place

_NUM_GROUPS = count()


def open_host_group(backend: str, timeout: timedelta | None = None, is_alone: bool = False) -> None:
    """Give `torch.distributed` a default process group, unless it has one. All processes must call this equally often.

    It uses the store that learners use later: a second one could not listen at the same port. A process that is alone,
    because others were lost, gets a group of its own.
    """
    if dist.is_initialized():
        return
    if is_alone:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        return
    place = shared_place()
    store = PrefixStore(f"host/{next(_NUM_GROUPS)}", place.store)
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world, timeout=timeout)
    store.set(f"connected/{place.rank}", "")  # a process that ended at once would disturb those still connecting
    store.wait([f"connected/{rank}" for rank in range(place.world)])


def close_host_group() -> None:
    """Make room for the learners' own process group."""
    if dist.is_initialized():
        dist.destroy_process_group()
