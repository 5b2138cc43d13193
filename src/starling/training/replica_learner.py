"""What is the same for every learner, wherever it lives: its weights, its optimizer, its errors."""

import math
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from starling.checkpoint.state import ShardState
from starling.errors import CheckpointError, ProtocolError
from starling.learner import Handle, Learner, Shard
from starling.strategies import SyncGroups
from starling.training.job import Averaging, Spent
from starling.training.replica import Replica
from starling.training.shards import HeldShard, check_piece, host_copy

T = TypeVar("T")


class ReplicaLearner(Learner):
    """A learner with weights and an optimizer of its own, and a team: the learners that claim together with it."""

    def __init__(self, rank: int, world: int, seed: int, sync_groups: SyncGroups, replica: Replica) -> None:
        self.replica = replica
        self.sync_groups = sync_groups
        self.counting = threading.Lock()  # between the background, which counts, and the end of an epoch
        self.shards: list[HeldShard] = []
        self.saved_shards: dict[tuple[int, int], ShardState] = {}
        """What a checkpoint holds of the model, by place."""
        self.spent = Spent()
        self.averaging = Averaging()
        self.sync_group = sync_groups.of(rank)
        self.is_worker = rank < sync_groups.num_workers
        self._rank, self._world, self._seed = rank, world, seed
        self._gradient_version = 0  # of the weights, when the gradient under way began

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world(self) -> int:
        return self._world

    @property
    def seed(self) -> int:
        return self._seed

    @property
    def weights(self) -> Tensor:
        return self.replica.weights

    @property
    def place_in_sync_group(self) -> int:
        """This learner's place in its team, from 0."""
        return self._rank - self.sync_group.start

    @property
    def version(self) -> int:
        return self.replica.version

    def step(self, gradient: Tensor, read_at: int | None = None) -> None:
        when = self._gradient_version if read_at is None else read_at
        self.averaging.staleness[self.replica.version - when] += 1
        self._step(gradient)

    def _step(self, gradient: Tensor) -> None:
        """The optimizer's part of a step."""
        self.replica.step(gradient, 1.0)

    def apply(self, delta: Tensor, piece: slice | None = None) -> None:
        self.replica.apply(delta, piece)

    def replace(self, weights: Tensor, piece: slice | None = None) -> None:
        self.replica.replace(weights, piece)

    def snapshot(self, piece: slice | None = None) -> Tensor:
        return self.replica.snapshot(piece)

    def pieces(self, largest: int, optimizer_state: bool = False) -> Sequence[slice]:
        return self.replica.pieces(largest, optimizer_state)

    def keep(self, piece: slice) -> Shard:
        check_piece(piece, self)
        saved = self.saved_shards.get((piece.start, piece.stop))
        memory = host_copy(self.weights[piece] if saved is None else saved.weights)
        return self.hold(HeldShard(self, piece, memory, torch.zeros(1, dtype=torch.int64), 0))

    def hold(self, shard: HeldShard) -> HeldShard:
        """Take a shard into this learner's state; its optimizer goes on from the checkpoint, if there is one."""
        place = (shard.piece.start, shard.piece.stop)
        if place in self.saved_shards:
            shard.restore(self.saved_shards.pop(place))
        elif self.saved_shards:
            raise CheckpointError(
                f"learner {self._rank}: the checkpoint holds the model in pieces {sorted(self.saved_shards)}, none of "
                f"them {place}; resume with the strategy's shards, or piece_megabytes, as they were"
            )
        self.shards.append(shard)
        return shard

    @abstractmethod
    def start_on_shard(self, num_bytes: int, passes: int, do: Callable[[], T]) -> Handle[T]:
        """Start doing something that goes over `num_bytes` of host memory so many times."""

    @abstractmethod
    def set_rates(self, optimizer: Optimizer, peaks: Sequence[float], step_metadata: Tensor, scale: float) -> None:
        """Set the learning rates of a shard's optimizer, which began with `peaks`, to `scale` times those of a
        `stamp`."""

    def clip(self, gradient: Tensor) -> Tensor | None:
        is_finite = math.isfinite(self.replica.clip(gradient))
        self._look_at_gradient(is_finite)
        return gradient if is_finite else None

    @abstractmethod
    def _look_at_gradient(self, is_finite: bool) -> None:
        """Count gradients that are not finite; `NonFiniteError` after many in a row."""

    @property
    @abstractmethod
    def num_gradients(self) -> int:
        """How many gradients this learner has made."""

    def check_peer(self, peer: int) -> None:
        """`ProtocolError` unless there is a learner `peer`."""
        if not 0 <= peer < self._world:
            raise ProtocolError(
                f"learner {self._rank} cannot exchange with learner {peer} among {self._world} learners"
            )

    def check_group(self, group: Sequence[int] | None) -> Sequence[int]:
        """The learners of a mean; `ProtocolError` unless they are all of this learner's team."""
        chosen = range(self._world) if group is None else group
        if list(chosen) != list(self.sync_group):
            raise ProtocolError(
                f"learner {self._rank} cannot average over learners {list(chosen)}: those that it computes in step "
                f"with are {list(self.sync_group)}"
            )
        return chosen

    def check_mean(self, vector: Tensor) -> None:
        """`ProtocolError` unless `vector` has the weights' dtype and not more numbers; gloo would abort the process."""
        own = self.weights
        if vector.dim() != 1 or vector.dtype != own.dtype or len(vector) > len(own):
            raise ProtocolError(
                f"learner {self._rank} cannot average {vector.dtype} {list(vector.shape)}: "
                f"its weights are {own.dtype} {list(own.shape)}"
            )

    def check_received(self, peer: int, tag: int, theirs: Tensor, like: Tensor) -> None:
        """`ProtocolError` unless what `peer` sent has the shape and dtype that was expected; gloo would abort."""
        if theirs.shape != like.shape or theirs.dtype != like.dtype:
            raise ProtocolError(
                f"learner {self._rank} and learner {peer} exchange tensors that differ under tag {tag}: "
                f"{like.dtype} {list(like.shape)} and {theirs.dtype} {list(theirs.shape)}"
            )

    def changed_beneath(self) -> ProtocolError:
        """The error of a strategy that changes weights while it computes at them."""
        return ProtocolError(
            f"learner {self._rank}: its weights changed while a gradient at `weights` was under way; "
            "take the gradient at `snapshot()` instead"
        )

    def given_away(self) -> ProtocolError:
        """The error of a strategy that awaits a gradient which `mean` has taken."""
        return ProtocolError(
            f"learner {self._rank} awaited a gradient that it had given to `mean`; await the mean, or the gradient "
            "before it"
        )
