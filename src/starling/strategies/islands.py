"""Islands: super-learners whose ranks hold one model together."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

from pydantic import Field, model_validator

from starling.configuration import Config
from starling.errors import ConfigError
from starling.strategies.base import Strategy, SyncGroups, always


class Island(Config):
    """How the learners of a run form islands; the `island:` section of a recipe."""

    sharded: int = Field(default=1, ge=1, le=64)
    """Number of learners that together hold one model: with torch's `fully_shard`, each learner keeps 1/n of the
    weights, gradients and optimizer state, and computes its own mini-batches. With 1, each learner has its own
    model."""
    tensor: int = Field(default=1, ge=1, le=64)
    """Number of learners that together compute one mini-batch: torch's tensor parallelism divides the layers in the
    model's `tensor_plan` into n parts. Each learner keeps 1/n of the weights and of the optimizer state of these
    layers. With 1, no layer is divided."""

    @model_validator(mode="after")
    def _one_dimension(self) -> Self:
        if self.sharded > 1 and self.tensor > 1:
            raise ValueError("sharded and tensor cannot be combined; leave out one of them")
        return self

    @property
    def size(self) -> int:
        """The number of learners of one island."""
        return self.sharded * self.tensor


NO_ISLANDS = Island()
"""Setting under which each learner has its own model."""


@dataclass(frozen=True)
class IslandStrategy(Strategy):
    """A strategy between islands, for engines and recipes, whose learners are the ranks of islands.

    Rank i of an island exchanges messages with rank i of the other islands, as one of the learners of `between`. The
    ranks of an island claim mini-batches together: one each or, with `tensor`, one for all. An island that loses a rank
    is lost.
    """

    between: Strategy = None  # type: ignore[assignment]
    island: Island = NO_ISLANDS

    def sync_groups(self, options: Any, world: int) -> SyncGroups:
        size = self.island.size
        groups = self.between.sync_groups(options, max(1, world // size))
        return SyncGroups(size * groups.num_workers, size * groups.size)

    def survivors(self, options: Any, world: int, lost: Collection[int]) -> Sequence[int]:
        size = self.island.size
        kept = self.between.survivors(options, world // size, {rank // size for rank in lost})
        return [island * size + member for island in kept for member in range(size)]

    def compresses_gradients(self, options: Config) -> bool:
        return self.between.compresses_gradients(options)

    def validate(self, options: Any, world: int) -> None:
        between, size = self.between, self.island.size
        if between.is_served or not between.steps_itself:
            raise ConfigError(
                f"island: {between.name} keeps its model outside the learners, so that islands cannot hold it; choose "
                "another strategy, such as allreduce or adpsgd, or leave out island"
            )
        if world % size:
            kind = "tensor" if self.island.tensor > 1 else "sharded"
            raise ConfigError(
                f"island.{kind}: {world} learners cannot be divided into islands of {size}; choose a multiple of "
                f"{size} learners"
            )
        between.validate(options, world // size)

    def __reduce__(self) -> tuple[Callable[[Strategy, Island], Strategy], tuple[Strategy, Island]]:
        return between_islands, (self.between, self.island)


def between_islands(strategy: Strategy, island: Island) -> Strategy:
    """Return the strategy that runs `strategy` between islands like `island`, or `strategy` itself if each island is
    one learner."""
    between = strategy.between if isinstance(strategy, IslandStrategy) else strategy
    if island.size == 1:
        return between
    given = {field.name: getattr(between, field.name) for field in fields(Strategy)}
    if island.sharded > 1:
        given["averages_gradients"] = always
    return IslandStrategy(**given, between=between, island=island)
