"""Means over a process group, summed in rank order."""

from concurrent.futures import Future

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from starling.consensus import rank_ordered_mean
from starling.engines.processes.backend import communicating
from starling.engines.processes.threads import Worker
from starling.learner import EncodedMean


class OrderedMean:
    """Means over a gloo group, summed in rank order, so that they have the same bits on every engine.

    Each learner sums its own chunk: a reduce-scatter by all-to-all, then an all-gather. Each learner sends as many
    bytes as in a ring all-reduce, 2 (L - 1) / L times the vector. Means run in a thread of their own.
    """

    def __init__(self, group: ProcessGroup | None, world: int) -> None:
        self._group = group
        self._world = world
        self._thread = Worker("starling-mean")

    def start(self, vector: Tensor) -> "Future[Tensor]":
        """Begin the mean of `vector` `[P]` as it is now; the result `[P]` is in new host memory."""
        chunk = -(-vector.numel() // self._world)
        mine = torch.zeros(chunk * self._world, dtype=vector.dtype, device="cpu")
        mine[: vector.numel()].copy_(vector)
        return self._thread.submit(lambda: self._mean(mine, vector.numel()))

    def start_encoded(self, part: EncodedMean) -> "Future[Tensor]":
        """Begin a mean whose vectors travel encoded: an all-to-all and an all-gather of bytes."""
        return self._thread.submit(lambda: self._mean_encoded(part))

    def abandon(self) -> None:
        """Stop without waiting for the mean under way."""
        self._thread.abandon()

    def close(self) -> None:
        """Finish the mean under way, and end the thread."""
        self._thread.close()

    def _mean_encoded(self, part: EncodedMean) -> Tensor:
        mine = torch.cat(part.messages())
        theirs = torch.empty_like(mine)
        with communicating():
            dist.all_to_all_single(theirs, mine, group=self._group)
        combined = part.combine(theirs.chunk(self._world))
        with communicating():
            dist.all_gather(list(mine.chunk(self._world)), combined, group=self._group)
        return part.result(mine.chunk(self._world))

    def _mean(self, mine: Tensor, size: int) -> Tensor:
        if self._world > 1:
            theirs = torch.empty_like(mine)
            with communicating():
                dist.all_to_all_single(theirs, mine, group=self._group)
            summed = rank_ordered_mean(theirs.chunk(self._world))
            with communicating():
                dist.all_gather(list(mine.chunk(self._world)), summed, group=self._group)
        return mine[:size]
