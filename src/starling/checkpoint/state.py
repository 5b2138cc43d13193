"""The state of one learner, as a checkpoint stores it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from starling.workload import Position

if TYPE_CHECKING:
    from torch import Tensor

    from starling.checkpoint.cut import ShardOfIsland


OWN_PREFIX = "own."
"""Begins the names of those parts of a strategy's state that differ between learners."""
MEMBERSHIP_PREFIX = OWN_PREFIX + "membership."
"""Begins the names of those that are void once the membership changes."""


def name_of_state(name: str, is_common: bool, for_membership: bool) -> str:
    """The name under which a state stores what `Learner.strategy_state` returns."""
    if for_membership:
        return MEMBERSHIP_PREFIX + name
    return name if is_common else OWN_PREFIX + name


def beyond_membership(strategy: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What of a strategy's state is valid in other memberships, too."""
    return {name: each for name, each in strategy.items() if not name.startswith(MEMBERSHIP_PREFIX)}


def has_common(strategy: Mapping[str, Tensor]) -> bool:
    """Whether a strategy's state includes what all learners have in common."""
    return any(not name.startswith(OWN_PREFIX) for name in strategy)


@dataclass(frozen=True)
class ShardState:
    """A model shard: a piece of the weights that one learner serves to all, or that all share in memory."""

    start: int
    stop: int
    """The shard is `weights[start:stop]` of the model's weights `[P]`."""
    weights: Tensor
    """`[stop - start]`, on the CPU."""
    optimizer: dict[str, Any]
    """The `state_dict` of the shard's optimizer."""


@dataclass(frozen=True)
class LearnerState:
    """One learner's state between two mini-batches. It includes no random generators, because every seed is derived
    from the run's seed and the ticket."""

    rank: int
    world: int
    position: Position
    """The run's data position to which this state belongs."""
    minutes: float
    """Time spent training, on the engine's clock."""
    weights: Tensor
    """Flat, `[P]`, on the CPU."""
    buffers: dict[str, Tensor]
    """The model's buffers by name, on the CPU."""
    optimizer: dict[str, Any]
    """The optimizer's `state_dict`."""
    epochs_ended: int | None = None
    """How many epochs have ended; None unless this is the state at the end of an epoch."""
    shards: tuple[ShardState, ...] = ()
    """The model shards that this learner keeps. Their weights are also in `weights`. If any learner keeps shards, the
    shards are the model."""
    strategy: dict[str, Tensor] = field(default_factory=dict)
    """What the strategy keeps between its steps, by name, on the CPU; see `Learner.strategy_state`."""
    shard_of_island: ShardOfIsland | None = None
    """Which part of an island's model `weights` `[P']` and `optimizer` are; None: they are those of a whole model."""
    of_strategy: str = ""
    """The strategy under which it trained, with its options, as `Strategy.described` has it; empty: unknown."""
    under_shards: Tensor | None = None
    """The weights with which a worker computes, where `weights` has those of its shards: `[n]`, for all its shards in
    their order. None: they are the shards'."""
    is_worker: bool = True
    """Whether it computes gradients. The weights of a learner that does not are valid only in its shards."""
    is_complete: bool = True
    """False: the states of other learners may have averaging rounds that this one lacks; do not save it."""

    def copy(self) -> LearnerState:
        """A deep copy in CPU memory, which later training does not change."""
        shards = (replace(shard, weights=own(shard.weights), optimizer=own(shard.optimizer)) for shard in self.shards)
        return replace(
            self,
            weights=own(self.weights),
            buffers=own(self.buffers),
            optimizer=own(self.optimizer),
            strategy=own(self.strategy),
            shards=tuple(shards),
            under_shards=own(self.under_shards),
        )

    def with_strategy_of(self, other: LearnerState) -> LearnerState:
        """This state with the common part of another learner's strategy state."""
        mine = {name: each for name, each in self.strategy.items() if name.startswith(OWN_PREFIX)}
        common = {name: each for name, each in other.strategy.items() if not name.startswith(OWN_PREFIX)}
        return replace(self, strategy=own(common) | mine)

    def for_computing(self) -> LearnerState:
        """This state with the weights with which the learner computes, also where it keeps shards."""
        if self.under_shards is None:
            return self
        weights, start = self.weights.clone(), 0
        for shard in self.shards:
            stop = start + shard.stop - shard.start
            weights[shard.start : shard.stop] = self.under_shards[start:stop]
            start = stop
        return replace(self, weights=weights, under_shards=None)

    def tensors(self) -> Iterator[Tensor]:
        """All its tensors except the shards' weights, which are part of `weights`."""
        kept = [self.strategy, [shard.optimizer for shard in self.shards], self.under_shards]
        yield from _tensors([self.weights, self.buffers, self.optimizer, kept])

    @property
    def kept(self) -> list[tuple[int, int]]:
        """`start` and `stop` of each of its shards."""
        return [(shard.start, shard.stop) for shard in self.shards]


def own(value: Any) -> Any:
    """A copy of nested dictionaries, lists and tuples, with every tensor copied to new CPU memory."""
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
