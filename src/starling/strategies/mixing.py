"""Averaging with other learners in delta form, shared by the decentralised strategies."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, TypeVar

from pydantic import Field, field_validator

from starling.configuration import Config
from starling.learner import Learner
from starling.topology import Topology, check_pattern, find_topology

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
_CACHED_NUMBERS = 1 << 17
"""Three vectors of this many numbers fit in a processor's cache."""


class MixingOptions(Config):
    """The options of every strategy that averages with neighbours."""

    pattern: str = "ring"
    """Which learners average: a name in `topology.PATTERNS`, a pattern of an installed package, or `module:name`."""
    compression: Literal["none", "bfloat16"] = "none"
    """How weights are encoded for sending. bfloat16 halves the bytes; its rounding error is fed back."""
    optimizer_state: Literal["local", "averaged"] = "local"
    """What happens to momentum and Adam's moments: each learner keeps its own, or they are averaged like weights."""
    piece_megabytes: float = Field(default=16.0, gt=0.0)
    """Weights are averaged in pieces of at most this size, so that locks on them are short and copies are small."""

    @field_validator("pattern")
    @classmethod
    def _is_known(cls, pattern: str) -> str:
        check_pattern(pattern)
        return pattern

    def pieces(self, me: Learner) -> list[slice]:
        """The pieces of the weights, and of the optimizer's state if it is averaged."""
        largest = max(1, int(self.piece_megabytes * 2**20) // me.weights.element_size())
        return list(me.pieces(largest, self.optimizer_state == "averaged"))


def check_mixing(options: MixingOptions, world: int) -> None:
    """Raise ConfigError if the pattern does not suit this number of learners."""
    find_topology(options.pattern, world, seed=0)


class Compression:
    """Encodes weights for sending: unchanged, or rounded to bfloat16 (half the bytes) with error feedback.

    Equation, for each piece w of the weights and its accumulated error e, initially 0::

        send  q = round(w + e)
        e <- w + e - q

    Rounding errors do not accumulate: the sums of the sent and of the exact weights differ only by e.

    References:
        Seide et al. 2014, "1-bit stochastic gradient descent", Interspeech.
    """

    def __init__(self, options: MixingOptions, weights: Tensor, pieces: Sequence[slice]) -> None:
        import torch

        self._dtype = torch.bfloat16 if options.compression == "bfloat16" else None
        self._errors = weights.new_zeros(pieces[-1].stop if self._dtype else 0)

    def encode(self, mine: Tensor, piece: slice) -> Tensor:
        """Encode `mine`, and change it to what the receivers will decode."""
        if self._dtype is None:
            return mine
        error = self._errors[piece]
        error.add_(mine)  # w + e
        sent = error.to(self._dtype)
        mine.copy_(sent)
        error.sub_(mine)
        return sent


class Mixing:
    """Averages one piece of my weights in round k: sends it to my targets and receives those of my sources."""

    def __init__(self, me: Learner, topology: Topology, k: int, piece: slice, compression: Compression) -> None:
        self._mine = me.snapshot(piece)
        sent = compression.encode(self._mine, piece)
        # post receives before sends, so that data flows in both directions at once
        self._receiving = [
            (weight, me.receive(peer, sent, tag=k)) for peer, weight in topology.sources(k, me.rank).items()
        ]
        self._sending = [me.send(peer, sent, tag=k) for peer in topology.targets(k, me.rank)]

    async def delta(self) -> Tensor:
        """The change to my weights: sum_j T_jl (theirs_j - mine), with T_jl the weight with which I mix learner j.

        Adding this change conserves the mean of all learners even if a gradient step changed the weights meanwhile;
        writing the average itself would erase that step.
        """
        import torch

        own = self._mine
        del self._mine  # free the copy as early as possible: a strategy may keep this object
        theirs = [(weight, await handle) for weight, handle in self._receiving]
        self._receiving.clear()
        for sending in self._sending:
            await sending
        total = torch.empty_like(own) if theirs else torch.zeros_like(own)
        parts = _parts(own)
        change = torch.empty_like(total[parts[0]])
        for part in parts:
            mine, sum_of_part = own[part], total[part]
            for place, (weight, vector) in enumerate(theirs):
                their_part = vector[part].to(mine.dtype)
                if place == 0:
                    torch.sub(their_part, mine, out=sum_of_part).mul_(weight)
                else:
                    sum_of_part.add_(torch.sub(their_part, mine, out=change[: len(mine)]), alpha=weight)
        return total


def _parts(vector: Tensor) -> list[slice]:
    """Slices of a vector that fit in a processor's cache; on an accelerator, one slice."""
    size = _CACHED_NUMBERS if vector.device.type == "cpu" else max(1, len(vector))
    return [slice(start, start + size) for start in range(0, len(vector), size)] or [slice(0)]


def one_ahead(work: Iterable[T]) -> Iterator[T]:
    """Yield the items of `work`, each after the next one has been created, so that the next piece is already under way
    while one is awaited."""
    made: deque[T] = deque()
    for item in work:
        made.append(item)
        if len(made) > 1:
            yield made.popleft()
    yield from made
