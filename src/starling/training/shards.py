"""Shards of the model in host memory, each with its own optimizer: a server's shard, or memory that learners share."""

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from starling.checkpoint.state import ShardState
from starling.errors import CheckpointError, ConfigError
from starling.learner import Handle, Shard
from starling.training.flat import is_no_gradient, split
from starling.training.job import Statistics
from starling.training.replica import Replica

T = TypeVar("T")
STEP_PASSES = 7
"""Passes of a step over the shard's memory: read the gradient; read and write the weights and Adam's two moments."""

SetRates = Callable[[Optimizer, Sequence[float], Tensor, float], None]
"""Sets the learning rates of a shard's optimizer: from its peak rates, the metadata of the step, and a scale."""


class StartOnMemory(Protocol):
    """Starts work that passes over `num_bytes` of host memory `passes` times."""

    def __call__(self, num_bytes: int, passes: int, do: Callable[[], T]) -> Handle[T]: ...


class Shards:
    """The model shards that one learner holds.

    After a resume, `saved` are the shards of its checkpoint; each held shard continues from the one in its place.
    """

    def __init__(
        self,
        rank: int,
        replica: Replica,
        statistics: Statistics,
        set_rates: SetRates,
        start: StartOnMemory,
        saved: Sequence[ShardState] = (),
    ) -> None:
        self.rank, self.replica, self.statistics = rank, replica, statistics
        self.set_rates, self.start = set_rates, start
        self.held: list[HeldShard] = []
        self._saved = {(shard.start, shard.stop): shard for shard in saved}

    def check(self, piece: slice) -> None:
        """Raise `ConfigError` for an empty piece, or one outside the weights."""
        size = len(self.replica.weights)
        if not 0 <= piece.start < piece.stop <= size:
            raise ConfigError(
                f"learner {self.rank} cannot keep weights {piece.start} to {piece.stop} of {size}; use fewer shards"
            )

    def keep(self, piece: slice) -> Shard:
        """Hold a piece of the model for all learners, starting from this learner's weights or the checkpoint's."""
        self.check(piece)
        saved = self._saved.get((piece.start, piece.stop))
        memory = host_copy(self.replica.weights[piece] if saved is None else saved.weights)
        return self._hold(HeldShard(self, piece, memory, torch.zeros(1, dtype=torch.int64), 0))

    def share(self, pieces: Sequence[slice], weights: Tensor, counts: Tensor) -> Sequence[Shard]:
        """Hold `pieces` of `weights` `[P]`, memory that all learners share; `counts` `[pieces, L]` are their steps."""
        return [
            self._hold(HeldShard(self, piece, weights[piece], counts[number], self.rank))
            for number, piece in enumerate(pieces)
        ]

    def forget_saved(self) -> None:
        """Drop the checkpoint's shards: a strategy that holds any has taken them before its first claim."""
        self._saved.clear()

    def _hold(self, shard: "HeldShard") -> "HeldShard":
        place = (shard.piece.start, shard.piece.stop)
        if place in self._saved:
            shard.restore(self._saved.pop(place))
        elif self._saved:
            raise CheckpointError(
                f"learner {self.rank}: the checkpoint holds the model in pieces {sorted(self._saved)}, none of "
                f"them {place}; resume with the strategy's shards, or piece_megabytes, as they were"
            )
        self.held.append(shard)
        return shard


class HeldShard(Shard):
    """A shard whose memory is in this process.

    `weights` `[n]` is that memory, and `counts` `[L]` the steps made by each learner that changes it; `place` is this
    learner's. Each learner has its own optimizer, so that shared memory needs no common lock.
    """

    def __init__(self, owner: Shards, piece: slice, weights: Tensor, counts: Tensor, place: int) -> None:
        self.weights = weights
        self._owner, self._piece = owner, piece
        self._counts, self._place = counts, place
        parts = _parts(owner.replica.parameters, piece, weights)
        self._parts = list(parts.values())
        self.optimizer = owner.replica.optimizer_of_piece(parts)
        self._peaks = [float(group["lr"]) for group in self.optimizer.param_groups]
        self._lock = threading.Lock()  # the learner's background steps while checkpoints copy

    @property
    def piece(self) -> slice:
        return self._piece

    @property
    def num_steps(self) -> int:
        return int(self._counts.sum())

    def read(self) -> Handle[Tensor]:
        return self._owner.start(self.weights.nbytes, 1, self.weights.clone)

    def step(self, gradient: Tensor, step_metadata: Tensor, read_at: Sequence[int], scale: float = 1.0) -> Handle[None]:
        def do() -> None:
            statistics = self._owner.statistics
            with statistics.lock:
                for when in read_at:
                    statistics.averaging.staleness[self.num_steps - when] += 1
            self._owner.set_rates(self.optimizer, self._peaks, step_metadata, scale)
            with self._lock:
                for part, own in zip(self._parts, split(gradient, self._parts), strict=True):
                    part.grad = None if is_no_gradient(own) else own
                self.optimizer.step()
                for part in self._parts:
                    part.grad = None
                self._counts[self._place] += 1

        return self._owner.start(self.weights.nbytes, STEP_PASSES, do)

    def copy(self) -> Tensor:
        """A copy of the weights."""
        with self._lock:
            return self.weights.clone()

    def state(self) -> ShardState:
        """A copy of what a checkpoint saves."""
        with self._lock:
            weights, optimizer = self.weights.clone(), copy.deepcopy(self.optimizer.state_dict())
        return ShardState(self._piece.start, self._piece.stop, weights, optimizer)

    def restore(self, state: ShardState) -> None:
        """Load the optimizer's state from a checkpoint."""
        self.optimizer.load_state_dict(state.optimizer)


def host_copy(weights: Tensor) -> Tensor:
    """A copy in host memory."""
    return weights.detach().cpu().clone()


def _parts(parameters: Sequence[nn.Parameter], piece: slice, weights: Tensor) -> dict[int, nn.Parameter]:
    """Parameters that view the memory of a piece, by number: whole ones in their shape, cut ones as vectors."""
    found: dict[int, Any] = {}
    start = 0
    for number, parameter in enumerate(parameters):
        stop = start + parameter.numel()
        first, last = max(start, piece.start), min(stop, piece.stop)
        if first < last:
            own = slice(first - piece.start, last - piece.start)
            like = parameter if last - first == parameter.numel() else torch.empty(last - first)
            (view,) = split(weights[own], [like])
            found[number] = nn.Parameter(view)
        start = stop
    return found
