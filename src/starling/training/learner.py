"""The operations of every learner on its replica, on every engine, and checks of the strategy's requests.

Without these checks gloo would abort the process on vectors of different sizes, and silently reinterpret different
dtypes. Each raises `ProtocolError`.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Self, TypeVar

import torch
from torch import Tensor

from starling.checkpoint.state import name_of_state
from starling.errors import NonFiniteError, ProtocolError
from starling.learner import Background, Handle, Learner, LocalOptimizer, Shards
from starling.training.job import Statistics
from starling.training.replica import Replica

T = TypeVar("T")


class ReplicaLearner(Learner, LocalOptimizer, Background, Shards):
    """The operations of all learners on their replica, on every engine. A learner is also its own `optimizer`,
    `background` and `shards`: their methods share its state."""

    rank: int = 0
    world: int = 1
    seed: int = 0
    replica: Replica
    statistics: Statistics
    gradient_version = 0
    """Version of the weights at which the newest gradient is computed."""
    is_averaged = False
    """Whether a mean of the newest gradient has begun."""
    most_not_finite: int
    """Number of consecutive non-finite gradients that ends the run."""

    @property
    def weights(self) -> Tensor:
        return self.replica.weights

    @property
    def version(self) -> int:
        return self.replica.version

    @property
    def _itself(self) -> Self:
        return self

    optimizer = background = shards = _itself

    @property
    def shapes(self) -> Sequence[torch.Size]:
        return [parameter.shape for parameter in self.replica.parameters]

    def replace(self, weights: Tensor, piece: slice | None = None) -> None:
        self.replica.replace(weights, piece)

    def snapshot(self, piece: slice | None = None) -> Tensor:
        return self.replica.snapshot(piece)

    def clip(self, gradient: Tensor) -> Tensor | None:
        is_finite = math.isfinite(self.replica.clip(gradient))
        self.count_finite(is_finite)
        return gradient if is_finite else None

    def count_finite(self, is_finite: bool) -> None:
        """Count non-finite gradients, which are skipped. Raises NonFiniteError after many in a row."""
        statistics = self.statistics
        statistics.num_not_finite += not is_finite
        statistics.not_finite_in_a_row = 0 if is_finite else statistics.not_finite_in_a_row + 1
        if statistics.not_finite_in_a_row == self.most_not_finite:
            raise NonFiniteError(self.not_finite())

    @abstractmethod
    def not_finite(self) -> str:
        """The message that too many gradients in a row were not finite."""

    def pieces(self, largest: int, state: bool = False) -> Sequence[slice]:
        return self.replica.pieces(largest, state)

    def reset(self) -> None:
        self.replica.reset_optimizer()

    def strategy_state(
        self, name: str, initial: Tensor, is_common: bool = True, for_membership: bool = False, of_rounds: bool = False
    ) -> Tensor:
        return self.replica.state_of_strategy(name_of_state(name, is_common, for_membership, of_rounds), initial)

    @abstractmethod
    def start_on_memory(self, num_bytes: int, passes: int, do: Callable[[], T]) -> Handle[T]:
        """Start `do`, which makes `passes` passes over `num_bytes` of host memory."""

    # checks of what the strategy asks

    def check_peer(self, peer: int) -> None:
        """Raise ProtocolError unless there is a learner `peer`."""
        if not 0 <= peer < self.world:
            raise ProtocolError(f"learner {self.rank} cannot exchange with learner {peer} among {self.world} learners")

    def check_group(self, group: Sequence[int] | None, sync_group: range) -> None:
        """Check that a mean is over the learner's own sync group."""
        chosen = range(self.world) if group is None else group
        if chosen != sync_group and list(chosen) != list(sync_group):
            raise ProtocolError(
                f"learner {self.rank} cannot average over learners {list(chosen)}: its sync group is {list(sync_group)}"
            )

    def check_mean(self, vector: Tensor) -> None:
        """Check that an averaged vector has the dtype of the weights and is not longer than they are."""
        weights = self.replica.weights
        if vector.dim() != 1 or vector.dtype != weights.dtype or len(vector) > len(weights):
            raise ProtocolError(
                f"learner {self.rank} cannot average {vector.dtype} {list(vector.shape)}: "
                f"its weights are {weights.dtype} {list(weights.shape)}"
            )


def changed_beneath(rank: int) -> ProtocolError:
    """The error if a strategy changes weights while it computes a gradient at them."""
    return ProtocolError(
        f"learner {rank}: its weights changed while a gradient at `weights` was under way; "
        "take the gradient at `snapshot()` instead"
    )


def given_away(rank: int) -> ProtocolError:
    """The error if a strategy awaits a gradient after giving it to `mean`."""
    return ProtocolError(
        f"learner {rank} awaited a gradient after giving it to `mean`; await the mean, or the gradient before that"
    )
