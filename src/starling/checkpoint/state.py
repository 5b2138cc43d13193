"""What one learner must keep so that a run can go on from it."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from starling.workload import Ticket


@dataclass(frozen=True)
class LearnerState:
    """One learner at a moment between two mini-batches. Random generators need no place here: every seed is derived
    from the run's seed and the ticket."""

    rank: int
    world: int
    position: Ticket
    """The first ticket that nobody has claimed."""
    minutes: float
    """Time spent training, on the engine's clock."""
    weights: Tensor
    """Flat, `[P]`, on the CPU."""
    buffers: dict[str, Tensor]
    """The model's buffers by name, on the CPU."""
    optimizer: dict[str, Any]
    """The optimizer's `state_dict`."""
