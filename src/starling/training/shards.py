"""Pieces of the model in host memory, each with an optimizer of its own: a server's, or memory that learners share."""

import copy
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from starling.checkpoint.state import ShardState
from starling.errors import ConfigError
from starling.learner import Handle, Shard
from starling.training.flat import is_no_gradient, split

if TYPE_CHECKING:
    from starling.training.replica_learner import ReplicaLearner

STEP_PASSES = 7
"""How often a step goes over a shard: it reads the gradient, and reads and writes weights and Adam's two moments."""


class HeldShard(Shard):
    """A shard whose memory this learner has at hand.

    `weights` `[n]` is that memory, and `counts` `[L]` the steps that each of those who change it has made; `place` is
    this learner's among them. Each holds an optimizer of its own, so that shared memory has no lock for all.
    """

    def __init__(self, learner: "ReplicaLearner", piece: slice, weights: Tensor, counts: Tensor, place: int) -> None:
        self.weights = weights
        self._learner, self._piece = learner, piece
        self._counts, self._place = counts, place
        replica = learner.replica
        parts = _parts(replica.parameters, piece, weights)
        self._parts = list(parts.values())
        self.optimizer = replica.optimizer_of_piece(parts)
        self._peaks = [float(group["lr"]) for group in self.optimizer.param_groups]
        self._lock = threading.Lock()  # between this learner's background, which steps, and its checkpoints

    @property
    def piece(self) -> slice:
        return self._piece

    @property
    def num_steps(self) -> int:
        return int(self._counts.sum())

    def read(self) -> Handle[Tensor]:
        return self._learner.start_on_shard(self.weights.nbytes, 1, self.weights.clone)

    def step(self, gradient: Tensor, step_metadata: Tensor, read_at: Sequence[int], scale: float = 1.0) -> Handle[None]:
        def do() -> None:
            with self._learner.counting:
                for when in read_at:
                    self._learner.averaging.staleness[self.num_steps - when] += 1
            self._learner.set_rates(self.optimizer, self._peaks, step_metadata, scale)
            with self._lock:
                for part, own in zip(self._parts, split(gradient, self._parts), strict=True):
                    part.grad = None if is_no_gradient(own) else own
                self.optimizer.step()
                for part in self._parts:
                    part.grad = None
                self._counts[self._place] += 1

        return self._learner.start_on_shard(self.weights.nbytes, STEP_PASSES, do)

    def copy(self) -> Tensor:
        """The weights as they are now."""
        with self._lock:
            return self.weights.clone()

    def state(self) -> ShardState:
        """What a checkpoint keeps of it, as a copy."""
        with self._lock:
            weights, optimizer = self.weights.clone(), copy.deepcopy(self.optimizer.state_dict())
        return ShardState(self._piece.start, self._piece.stop, weights, optimizer)

    def restore(self, state: ShardState) -> None:
        """Let the optimizer go on from a checkpoint."""
        self.optimizer.load_state_dict(state.optimizer)


def check_piece(piece: slice, learner: "ReplicaLearner") -> None:
    """`ConfigError` for a piece that is none."""
    if not 0 <= piece.start < piece.stop <= len(learner.weights):
        raise ConfigError(
            f"learner {learner.rank} cannot keep weights {piece.start} to {piece.stop} of {len(learner.weights)}; "
            "use fewer shards"
        )


def host_copy(weights: Tensor) -> Tensor:
    """New host memory with the same values."""
    return weights.detach().cpu().clone()


def _parts(parameters: Sequence[nn.Parameter], piece: slice, weights: Tensor) -> dict[int, nn.Parameter]:
    """Parameters that view a piece's memory, by their number: whole ones in their shape, cut ones as vectors."""
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
