"""What all learners that are processes have in common: a replica of the model, and a communicator."""

from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from starling.checkpoint.state import name_of_state
from starling.engines.processes.communicator import Communicator
from starling.engines.processes.threads import ProcessHandle
from starling.learner import EncodedMean, Handle, Learner, Shard
from starling.training.replica import Replica
from starling.training.shards import MakeOptimizer, Shards


class ConnectedLearner(Learner):
    """A learner that is a process. Gradients, and when the strategy runs, are its subclasses' business."""

    replica: Replica
    communicator: Communicator
    shards: Shards

    def __init__(self, seed: int) -> None:
        self._seed = seed

    @property
    def rank(self) -> int:
        return self.communicator.rank

    @property
    def world(self) -> int:
        return self.communicator.world

    @property
    def seed(self) -> int:
        return self._seed

    @property
    def weights(self) -> Tensor:
        return self.replica.weights

    @property
    def version(self) -> int:
        return self.replica.version

    @property
    def shapes(self) -> Sequence[torch.Size]:
        return [parameter.shape for parameter in self.replica.parameters]

    def apply(self, delta: Tensor, piece: slice | None = None) -> None:
        self.replica.apply(delta, piece, in_round=self.communicator.is_behind)

    def replace(self, weights: Tensor, piece: slice | None = None) -> None:
        self.replica.replace(weights, piece)

    def snapshot(self, piece: slice | None = None) -> Tensor:
        return self.replica.snapshot(piece, self.communicator.snapshot_memory(piece))

    def pieces(self, largest: int, optimizer_state: bool = False) -> Sequence[slice]:
        return self.replica.pieces(largest, optimizer_state)

    def strategy_state(
        self, name: str, initial: Tensor, is_common: bool = True, for_membership: bool = False
    ) -> Tensor:
        return self.replica.state_of_strategy(name_of_state(name, is_common, for_membership), initial)

    def keep(self, piece: slice, make_optimizer: MakeOptimizer | None = None) -> Shard:
        return self.shards.keep(piece, make_optimizer)

    def share(self, pieces: Sequence[slice]) -> Handle[Sequence[Shard]]:
        for piece in pieces:
            self.shards.check(piece)
        return ProcessHandle(lambda: self.shards.share(pieces, *self.communicator.share(len(pieces))))

    def encoded_mean(self, part: EncodedMean) -> Handle[Tensor]:
        return self.communicator.encoded_mean(part)

    def send(self, peer: int, tensor: Tensor, tag: int) -> Handle[None]:
        return self.communicator.send(peer, tensor, tag)

    def receive(self, peer: int, like: Tensor, tag: int) -> Handle[Tensor]:
        return self.communicator.receive(peer, like, tag)

    def first(self, handles: Mapping[int, Handle[Any]]) -> Handle[int]:
        return self.communicator.first(handles)

    def exchange(self, peer: int, tensor: Tensor, tag: int) -> Handle[Tensor]:
        return self.communicator.exchange(peer, tensor, tag)

    def background(self, activity: Coroutine[Any, Any, None]) -> None:
        self.communicator.start_background(activity, self.fail)

    def fail(self, error: BaseException) -> None:
        """End all waits of this learner with `error`. May be called by any thread."""
        self.communicator.fail(error)

    def round(self, period: float) -> Handle[int | None]:
        return self.communicator.round(period)

    def keep_up(self, most: float) -> Handle[None]:
        return self.communicator.keep_up(most)
