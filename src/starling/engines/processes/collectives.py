"""Means over a sync group, computed through a process group or in shared memory, and the sharing of learner states.
Vectors are added in rank order."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from starling.checkpoint.files import apart
from starling.checkpoint.state import LearnerState
from starling.consensus import rank_ordered_mean
from starling.engines.processes.backend import communicating
from starling.engines.processes.links import MemoryLinks, Note
from starling.engines.processes.threads import Worker
from starling.learner import EncodedMean


class OrderedMean:
    """Computes means over a gloo group. Vectors are added in rank order, so that all engines give bit-identical means.

    Each learner sums one chunk of the vectors: an all-to-all serves as the reduce-scatter, and an all-gather follows.
    Each of the L learners sends 2 (L - 1) / L times the bytes of the vector, as in a ring all-reduce. Means are
    computed in a separate `thread`.
    """

    def __init__(self, group: ProcessGroup | None, world: int, thread: Worker) -> None:
        self._group, self._world, self._thread = group, world, thread

    def start(self, vector: Tensor, into: Tensor | None = None) -> Callable[[], Tensor]:
        """Begin the mean of the present values of `vector` `[P]`, and return a function that waits for the mean. The
        result `[P]` is always in new host memory; `into` is ignored."""
        chunk = -(-vector.numel() // self._world)
        mine = torch.zeros(chunk * self._world, dtype=vector.dtype, device="cpu")
        mine[: vector.numel()].copy_(vector)
        size = vector.numel()
        return self._thread.submit(lambda: self._exchange(mine, rank_ordered_mean)[:size]).result

    def start_encoded(self, part: EncodedMean) -> Callable[[], Tensor]:
        """Begin a mean whose vectors are sent encoded, in an all-to-all and an all-gather of bytes."""
        return self._thread.submit(
            lambda: part.result(self._exchange(torch.cat(part.messages()), part.combine).chunk(self._world))
        ).result

    def _exchange(self, mine: Tensor, combine: Callable[[Sequence[Tensor]], Tensor]) -> Tensor:
        """Replace each learner's chunk of `mine` by the result of `combine` on all learners' vectors."""
        if self._world > 1:
            theirs = torch.empty_like(mine)
            with communicating():
                dist.all_to_all_single(theirs, mine, group=self._group)
            combined = combine(theirs.chunk(self._world))
            with communicating():
                dist.all_gather(list(mine.chunk(self._world)), combined, group=self._group)
        return mine


SMALL_BYTES = 1 << 18
"""Size up to which every learner sums the whole vector, because a second synchronisation would take longer."""


class SharedMean:
    """Computes means over learners that are all linked. Vectors are added in rank order, so that a mean is
    bit-identical on all engines.

    Each learner copies its vector to its place in shared memory. Every learner sums small vectors completely. If
    vectors are large, each learner sums one chunk in its own place, and all learners then copy all chunks. A place is
    reused two means later. By then all learners have begun the mean in between, and no longer read the place.
    """

    def __init__(self, links: MemoryLinks, sync_group: range, lane: int) -> None:
        self._links, self._sync_group, self._lane = links, sync_group, lane
        self._own, self._others = links.rank - sync_group.start, [each for each in sync_group if each != links.rank]
        self._places = {(each, number): links.place(each, lane, number) for each in sync_group for number in range(2)}
        self._num_begun = 0
        self._under_way: Callable[[], Tensor] | None = None

    def start(self, vector: Tensor, into: Tensor | None = None) -> Callable[[], Tensor]:
        """Finish the previous mean, begin the mean of the present values of `vector` `[P]`, and return a function that
        waits for the new mean. The result is written to `into` `[P]` if given, otherwise to new memory."""

        def mean(number: int, vectors: list[Tensor]) -> Tensor:
            if vectors[0].nbytes <= SMALL_BYTES:
                summed = rank_ordered_mean(vectors)
                return summed if into is None else into.copy_(summed)
            chunks = self._combined(number, vectors, rank_ordered_mean)
            return torch.cat(chunks, out=torch.empty_like(vectors[0]) if into is None else into)

        return self._start(vector, mean)

    def start_encoded(self, part: EncodedMean) -> Callable[[], Tensor]:
        """Finish the previous mean, and begin a mean whose vectors are sent encoded.

        A learner's place holds its message for each other learner, and finally its chunk of the encoded mean.
        """
        return self._start(
            torch.cat(part.messages()),
            lambda number, vectors: part.result(self._combined(number, vectors, part.combine)),
        )

    def _start(self, vector: Tensor, mean: Callable[[int, list[Tensor]], Tensor]) -> Callable[[], Tensor]:
        """Begin a mean. The function `mean` is called with the number of the mean and with all learners' vectors in
        their places."""
        if self._under_way is not None:
            self._under_way()
        number, self._num_begun = self._num_begun, self._num_begun + 1
        places = [self._places[each, number % 2] for each in self._sync_group]
        vectors = [place[: vector.nbytes].view(vector.dtype) for place in places]
        vectors[self._own].copy_(vector)
        self._tell_all(2 * number)

        @cache
        def result() -> Tensor:
            self._await_all(2 * number)
            return mean(number, vectors)

        self._under_way = result
        return result

    def _combined(
        self, number: int, vectors: list[Tensor], combine: Callable[[Sequence[Tensor]], Tensor]
    ) -> list[Tensor]:
        """Return the results of `combine` on each learner's chunk of all vectors. Each result is in the place of the
        learner that computed it."""
        chunks = [vector.chunk(len(vectors)) for vector in vectors]
        if self._own < len(chunks[self._own]):
            chunks[self._own][self._own].copy_(combine([each[self._own] for each in chunks]))
        self._tell_all(2 * number + 1)
        self._await_all(2 * number + 1)
        return [each[place] for place, each in enumerate(chunks) if place < len(each)]

    def _tell_all(self, tag: int) -> None:
        """Tell the other learners of the sync group that this learner has reached the point `tag`."""
        for peer in self._others:
            self._links.tell(peer, Note(1 + self._lane, 0, tag, 0))

    def _await_all(self, tag: int) -> None:
        """Wait until the other learners of the sync group have reached the point `tag`."""
        for peer in self._others:
            self._links.hear(peer, 1 + self._lane, tag, self._links.timeout_seconds)


def share_state(state: LearnerState, source: int) -> LearnerState:
    """Return the state of learner `source`, without its model shards. `state` is the caller's own state.

    All learners of the default process group must call it.
    """
    tensors: dict[str, Tensor] = {}
    said: Any = None
    if state.rank == source:
        scalars, tensors = replace(state, shards=(), under_shards=None, shard_of_island=None).encode()
        tensors = apart(tensors)
        said = scalars, {name: (str(each.dtype).partition(".")[2], list(each.shape)) for name, each in tensors.items()}
    scalars, shapes = json.loads(_broadcast_bytes(json.dumps(said).encode(), source))
    received = {name: _broadcast(tensors.get(name), dtype, shape, source) for name, (dtype, shape) in shapes.items()}
    return LearnerState.decode(scalars, received)


def _broadcast_bytes(content: bytes, source: int) -> bytes:
    length = _broadcast(torch.tensor([len(content)]), "int64", [1], source)
    own = torch.frombuffer(bytearray(content), dtype=torch.uint8) if dist.get_rank() == source else None
    return _broadcast(own, "uint8", [int(length)], source).numpy().tobytes()


def _broadcast(own: Tensor | None, dtype: str, shape: list[int], source: int) -> Tensor:
    sent = torch.empty(shape, dtype=getattr(torch, dtype)) if own is None else own
    if sent.numel():
        with communicating():
            dist.broadcast(sent.reshape(-1).view(torch.uint8), src=source)
    return sent
