"""A learner process's rank, local rank and device, and the store through which learners connect."""

from dataclasses import dataclass

import torch
from torch.distributed.distributed_c10d import Store


@dataclass(frozen=True)
class Place:
    """A learner's ranks and its store."""

    rank: int
    world: int
    local_rank: int
    """Its rank among the `local_world` learners of its machine."""
    local_world: int
    store: Store

    def has_own_device(self, device: torch.device) -> bool:
        """Whether each learner of this machine has its own CUDA device, as NCCL requires."""
        return device.type == "cuda" and self.local_world <= torch.cuda.device_count()


def choose_device(name: str, place: Place) -> torch.device:
    """The device of a learner. `auto` is CUDA if available; learners are assigned to its devices in turn."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    return torch.device("cuda", place.local_rank % torch.cuda.device_count())
