"""What a checkpoint holds of one learner."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from starling.workload import Position

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ShardState:
    """A piece of the model that a learner keeps for all, or shares with all."""

    start: int
    stop: int
    """Its place in the weights `[P]`: from `start` to before `stop`."""
    weights: Tensor
    """`[stop - start]`, on the CPU."""
    optimizer: dict[str, Any]
    """Its optimizer's `state_dict`."""


@dataclass(frozen=True)
class LearnerState:
    """One learner at a moment between two mini-batches. Random generators need no place here: every seed is derived
    from the run's seed and the ticket."""

    rank: int
    world: int
    position: Position
    """What all learners together have done when this learner is as it is here."""
    minutes: float
    """Time spent training, on the engine's clock."""
    weights: Tensor
    """Flat, `[P]`, on the CPU."""
    buffers: dict[str, Tensor]
    """The model's buffers by name, on the CPU."""
    optimizer: dict[str, Any]
    """The optimizer's `state_dict`."""
    epochs_ended: int | None = None
    """How many epochs had ended when this was the end of one; None at other moments."""
    shards: tuple[ShardState, ...] = ()
    """The model shards that this learner keeps; where any learner keeps shards, they are the model. Their weights are
    also in `weights`."""
    is_worker: bool = True
    """Whether it computes gradients, so that its weights mean anything beside what it keeps."""

    def copy(self) -> LearnerState:
        """The same in CPU memory of its own, which stays as it is when the learner continues."""
        shards = (replace(shard, weights=own(shard.weights), optimizer=own(shard.optimizer)) for shard in self.shards)
        return replace(
            self,
            weights=own(self.weights),
            buffers=own(self.buffers),
            optimizer=own(self.optimizer),
            shards=tuple(shards),
        )

    def tensors(self) -> Iterator[Tensor]:
        """All that a checkpoint holds of it, but for the shards' weights, which are in `weights` too."""
        yield from _tensors([self.weights, self.buffers, self.optimizer, [shard.optimizer for shard in self.shards]])

    @property
    def kept(self) -> list[tuple[int, int]]:
        """The places of its shards in the weights."""
        return [(shard.start, shard.stop) for shard in self.shards]


def own(value: Any) -> Any:
    """Nested dictionaries, lists and tuples with every tensor copied into CPU memory of its own."""
    from torch import Tensor

    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: own(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        items = [own(each) for each in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in nested dictionaries, lists and tuples."""
    from torch import Tensor

    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)
