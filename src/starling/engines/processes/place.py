"""Where a learner process stands: its rank, its machine, its device, and the store through which learners meet."""

from dataclasses import dataclass

import torch
from torch.distributed.distributed_c10d import Store


@dataclass(frozen=True)
class Place:
    """A learner's place among all learners."""

    rank: int
    world: int
    local_rank: int
    """Its rank among the learners of its machine, of which there are `local_world`."""
    local_world: int
    store: Store

    def has_own_device(self, device: torch.device) -> bool:
        """Whether no two learners of this machine share a CUDA device, which NCCL would refuse."""
        return device.type == "cuda" and self.local_world <= torch.cuda.device_count()


def choose_device(name: str, place: Place) -> torch.device:
    """The device of a learner. `auto` is CUDA where available; devices are assigned in turn."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    return torch.device("cuda", place.local_rank % torch.cuda.device_count())
