"""Model shards in host memory, each with its own optimizer. A shard belongs to a server, or is memory that learners
share."""

import copy
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from starling.checkpoint.state import LearnerState, ShardState
from starling.errors import CheckpointError, ConfigError
from starling.learner import Handle, Shard
from starling.training.flat import split, split_gradient
from starling.training.replica import ReplicaLearner, in_turn

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]
OF_MATRICES = ("Adafactor", "Muon")
"""Optimizers that compute with whole matrices."""
STEP_PASSES = 7
"""Number of passes over memory of the shard's size in an Adam step, which reads the gradient, and reads and writes the
weights and both moments."""

SetRates = Callable[[Optimizer, Sequence[float], Tensor, float], None]
"""Function that sets the learning rates of a shard's optimizer, given the optimizer's peak rates, the step metadata and
a scale. Without peak rates, the learning rates are constant."""


@runtime_checkable
class Forkable(Protocol):
    """A shard's optimizer that can continue on a copy of the shard while leaving out some of the steps."""

    def fork(self, parameters: list[nn.Parameter]) -> Self:
        """Return an optimizer for the copy, with a copy of the state of this optimizer."""

    def step_as(self, other: Self) -> None:
        """Make a step with the gradients of the copy, in the same way as `other`, the shard's own optimizer, has just
        made its step."""

    def catch_up(self, other: Self) -> None:
        """End the steps of the copy, and adopt the part of `other`'s state that does not depend on the steps that were
        left out."""

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state in the usual form of a `state_dict`."""


class HeldShards:
    """The model shards that one learner holds.

    After a resume, `saved` contains the shards in the learner's checkpoint. Each held shard continues from the saved
    shard of its piece.
    """

    def __init__(self, host: ReplicaLearner, set_rates: SetRates, saved: Sequence[ShardState] = ()) -> None:
        self.host, self.set_rates = host, set_rates
        self.held: list[HeldShard] = []
        self._saved = {(shard.start, shard.stop): shard for shard in saved}

    def keep(self, piece: slice, make_optimizer: MakeOptimizer | None = None) -> Shard:
        """Hold a piece of the model for all learners, initialised from the checkpoint or this learner's weights."""
        saved = self._saved.get((piece.start, piece.stop))
        memory = host_copy(self.host.replica.weights[piece] if saved is None else saved.weights)
        return self._hold(piece, memory, torch.zeros(1, dtype=torch.int64), 0, make_optimizer)

    def share(self, pieces: Sequence[slice], weights: Tensor, counts: Tensor) -> Sequence[Shard]:
        """Hold `pieces` of `weights` `[P]`, which all learners share. `counts` `[pieces, L]` counts the steps of each
        learner on each piece."""
        return [
            self._hold(piece, weights[piece], counts[number], self.host.rank) for number, piece in enumerate(pieces)
        ]

    def added_to(self, state: LearnerState, computes_elsewhere: bool) -> LearnerState:
        """Return a learner's state with the shards. `computes_elsewhere` says that the learner's own weights are not
        just a copy of the shards."""
        if not self.held:
            return state
        weights, shards, under_shards = state.weights.clone(), tuple(shard.state() for shard in self.held), None
        if computes_elsewhere:
            under_shards = torch.cat([weights[shard.start : shard.stop] for shard in shards])
        for shard in shards:
            weights[shard.start : shard.stop] = shard.weights
        return replace(state, weights=weights, shards=shards, under_shards=under_shards)

    def forget_saved(self) -> None:
        """Drop the checkpoint's shards, because no strategy holds further shards after the first claim."""
        self._saved.clear()

    @contextmanager
    def in_turn(self) -> Generator[None, None, None]:
        """A context in which only the calling activity, in its turn, uses the shards."""
        with in_turn(self.host.order, [shard.lock for shard in self.held]):
            yield

    def fork(self, portion: int) -> None:
        """Copy, at a checkpoint barrier before `portion`, the shards whose optimizers can fork. Call this method within
        `in_turn`."""
        for shard in self.held:
            shard.fork(portion)

    def with_forks(self, state: LearnerState, portion: int) -> LearnerState:
        """End the forks of that barrier, and return the state with the copies of the shards."""
        shards = tuple(shard.end_fork(portion) or saved for shard, saved in zip(self.held, state.shards, strict=True))
        for shard in shards:
            state.weights[shard.start : shard.stop] = shard.weights
        return replace(state, shards=shards)

    def _hold(
        self,
        piece: slice,
        weights: Tensor,
        counts: Tensor,
        index: int,
        make_optimizer: MakeOptimizer | None = None,
    ) -> Shard:
        """Hold a piece of the weights as a shard. Raises `ConfigError` for an empty piece or one outside the model's
        weights."""
        rank, size, place = self.host.rank, len(self.host.replica.weights), (piece.start, piece.stop)
        if not 0 <= piece.start < piece.stop <= size:
            raise ConfigError(
                f"learner {rank} cannot keep weights {piece.start} to {piece.stop} of {size}; use fewer shards"
            )
        shard = HeldShard(self, piece, weights, counts, index, make_optimizer)
        if place in self._saved:
            shard.optimizer.load_state_dict(self._saved.pop(place).optimizer)
        elif self._saved:
            raise CheckpointError(
                f"learner {rank}: the checkpoint holds the model in pieces {sorted(self._saved)}, but the "
                f"strategy needs {place}; resume with the same strategy.shards or strategy.piece_megabytes as before"
            )
        self.held.append(shard)
        return shard


class HeldShard(Shard):
    """A shard in this process's memory, perhaps shared with other processes.

    `weights` `[n]` is that memory. `counts` `[L]` counts the steps of each learner that changes the shard; the count of
    this learner is at index `place`. Each learner has its own optimizer, so shared memory needs no common lock.
    """

    def __init__(
        self,
        owner: HeldShards,
        piece: slice,
        weights: Tensor,
        counts: Tensor,
        place: int,
        make_optimizer: MakeOptimizer | None = None,
    ) -> None:
        self.weights = weights
        self._owner, self._piece = owner, piece
        self._counts, self._place = counts, place
        parts = _parts(owner.host.replica.parameters, piece, weights)
        self._parts = list(parts.values())
        if make_optimizer is None or not parts:  # a timing-only simulation has no parameters
            self.optimizer = owner.host.replica.optimizer_of_piece(parts)
            self._peaks = [float(group["lr"]) for group in self.optimizer.param_groups]
            kind, parameters = type(self.optimizer).__name__, owner.host.replica.parameters
            if kind in OF_MATRICES and any(part.numel() < parameters[n].numel() for n, part in parts.items()):
                raise ConfigError(
                    f"learner {owner.host.rank} cannot keep weights {piece.start} to {piece.stop}: {kind} needs whole "
                    "matrices, and a shard has parts of them; use one shard, or another optimizer"
                )
        else:
            self.optimizer, self._peaks = make_optimizer(self._parts), []
        self.lock = threading.Lock()
        """Lock that is held while the shard is used, because the learner's background may make a step while a
        checkpoint is copied."""
        self._forks: dict[int, _Fork] = {}

    def _in_turn(self) -> AbstractContextManager[None]:
        """Return a context in which only the calling activity of the learner, in its turn, uses the shard."""
        return in_turn(self._owner.host.order, [self.lock])

    @property
    def piece(self) -> slice:
        return self._piece

    @property
    def num_steps(self) -> int:
        return int(self._counts.sum())

    def read(self) -> Handle[Tensor]:
        return self._owner.host.start_on_memory(self.weights.nbytes, 1, self.weights.clone)

    def step(self, gradient: Tensor, step_metadata: Tensor, read_at: Sequence[int], scale: float = 1.0) -> Handle[None]:
        def do() -> None:
            statistics = self._owner.host.statistics
            with statistics.lock:
                for when in read_at:
                    statistics.averaging.staleness[self.num_steps - when] += 1
            self._owner.set_rates(self.optimizer, self._peaks, step_metadata, scale)
            with self._in_turn():
                with _gradients(self._parts, gradient):
                    self.optimizer.step()
                for portion, fork in self._forks.items():
                    if step_metadata[-1] < portion:
                        with _gradients(fork.parts, gradient):
                            fork.optimizer.step_as(self.optimizer)
                self._counts[self._place] += 1

        return self._owner.host.start_on_memory(self.weights.nbytes, STEP_PASSES, do)

    def change(self, how: Callable[[Any], None]) -> Handle[None]:
        def do() -> None:
            with self._in_turn():
                for optimizer in (self.optimizer, *(fork.optimizer for fork in self._forks.values())):
                    how(optimizer)

        return self._owner.host.start_on_memory(self.weights.nbytes, STEP_PASSES, do)

    def copy(self) -> Tensor:
        """Return a copy of the weights."""
        with self._in_turn():
            return self.weights.clone()

    def seen(self) -> Tensor:
        """Return a copy of the weights for a thread that is not one of the learner's activities. The copy takes no
        turn."""
        with self.lock:
            return self.weights.clone()

    def state(self) -> ShardState:
        """Return a copy of the shard's weights and optimizer state for a checkpoint."""
        with self._in_turn():
            weights, optimizer = self.weights.clone(), copy.deepcopy(self.optimizer.state_dict())
        return ShardState(self._piece.start, self._piece.stop, weights, optimizer)

    def fork(self, portion: int) -> None:
        """Copy the shard at a checkpoint barrier before `portion`, if its optimizer can fork. Until `end_fork`, the
        copy makes only the steps whose gradients come from mini-batches before the barrier, according to the last
        number of their step metadata."""
        if not isinstance(self.optimizer, Forkable):
            return
        weights = self.weights.clone()
        parts = list(_parts(self._owner.host.replica.parameters, self._piece, weights).values())
        self._forks[portion] = _Fork(weights, parts, self.optimizer.fork(parts))

    def end_fork(self, portion: int) -> ShardState | None:
        """Return the copy at that barrier, which makes no more steps, or None if the shard cannot fork."""
        with self._in_turn():
            if (fork := self._forks.pop(portion, None)) is None:
                return None
            fork.optimizer.catch_up(self.optimizer)
        return ShardState(self._piece.start, self._piece.stop, fork.weights, fork.optimizer.state_dict())


class _Fork(NamedTuple):
    """A copy of a shard that makes some of its steps."""

    weights: Tensor
    parts: list[nn.Parameter]
    optimizer: Any


@contextmanager
def _gradients(parts: Sequence[nn.Parameter], gradient: Tensor) -> Generator[None, None, None]:
    """A context in which each parameter of a shard has its part of a gradient `[n]`."""
    for part, own in zip(parts, split_gradient(gradient, parts), strict=True):
        part.grad = own
    yield
    for part in parts:
        part.grad = None


def host_copy(weights: Tensor) -> Tensor:
    """Return a copy of `weights` in host memory."""
    return weights.detach().cpu().clone()


def _parts(parameters: Sequence[nn.Parameter], piece: slice, weights: Tensor) -> dict[int, nn.Parameter]:
    """Return parameters that are views into the memory of a piece, by number. Whole parameters have their own shape,
    and partial parameters are vectors."""
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
