"""A learner process's rank, local rank, device and cores, and the store through which learners connect."""

import os
from dataclasses import dataclass, replace

import torch
from torch.distributed.distributed_c10d import PrefixStore, Store

NODE_CPUS = "STARLING_NODE_CPUS"
"""Environment variable: on a Ray cluster, the number of CPUs that the node offers, which may be less than the number
that it has."""


@dataclass(frozen=True)
class Place:
    """The ranks and the store of a learner."""

    rank: int
    world: int
    local_rank: int
    """Rank of the learner among the `local_world` learners of its machine."""
    local_world: int
    store: Store
    owns_device: bool = False
    """Whether the learner sees one CUDA device, which no other learner uses and which a cluster's scheduler has
    assigned to it."""
    sums_in_order: bool = False
    """Whether means always add vectors in rank order, although the backend's own means take less time."""
    first: int = 0
    step: int = 1
    """Learner r of this place is process `first + r * step` of the membership."""
    num_rows: int = 1
    """Number of places that divide the processes of the membership: one for each rank of an island."""

    def process(self, rank: int) -> int:
        """Return the number of a learner in the membership's process group."""
        return self.first + rank * self.step

    def row(self, size: int) -> "Place":
        """Return the place of this learner among the learners that hold the same model shard. There is one such learner
        in each island of `size` ranks."""
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
    """Return the device of a learner. `auto` selects CUDA if it is available, and then assigns the CUDA devices to
    learners in turn."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    return torch.device("cuda", place.local_rank % torch.cuda.device_count())


def cores_here() -> int:
    """Return the number of cores that this process may use. On a Ray cluster, it is at most the number of CPUs that the
    node offers."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, int(os.environ.get(NODE_CPUS, cores)))
