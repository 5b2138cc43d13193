"""Averaging with others in delta form; what the decentralised strategies share."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, TypeVar

from pydantic import Field, field_validator

from starling.configuration import Config
from starling.learner import Learner
from starling.topology import Topology, check_pattern

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


_CACHED_NUMBERS = 1 << 17
"""Numbers of which three vectors stay in a processor's cache."""


class MixingOptions(Config):
    """The options of every strategy that averages with neighbours."""

    pattern: str = "ring"
    """Who averages with whom: a name in `topology.PATTERNS`, or `module:function` for one of your own."""
    wire: Literal["float32", "bfloat16"] = "float32"
    """What travels. bfloat16 halves the bytes; the rounding error is kept and fed back."""
    optimizer_state: Literal["local", "averaged"] = "local"
    """What happens to momentum and Adam's moments: each learner keeps its own, or they are averaged as weights are."""
    piece_megabytes: float = Field(default=16.0, gt=0.0)
    """Large models travel in pieces of this size, so that the weights are locked briefly and copies are small."""

    @field_validator("pattern")
    @classmethod
    def _is_known(cls, pattern: str) -> str:
        check_pattern(pattern)
        return pattern

    def pieces(self, me: Learner) -> list[slice]:
        """What of `me` is averaged, in pieces."""
        largest = max(1, int(self.piece_megabytes * 2**20) // me.weights.element_size())
        return list(me.pieces(largest, self.optimizer_state == "averaged"))


class Wire:
    """What a learner sends of its weights: the weights as they are, or rounded to bfloat16 at half the bytes.

    The rounding error of a piece is kept and added before its next rounding, so that nothing is lost for good: over
    the rounds, what was sent sums up to what was meant (error feedback; Seide et al. 2014, "1-bit SGD").
    """

    def __init__(self, options: MixingOptions, weights: Tensor, pieces: Sequence[slice]) -> None:
        import torch

        self._dtype = torch.bfloat16 if options.wire == "bfloat16" else None
        self._errors = weights.new_zeros(pieces[-1].stop if self._dtype else 0)

    def encode(self, mine: Tensor, piece: slice) -> Tensor:
        """`mine` as it travels; `mine` becomes what the others will take it for."""
        if self._dtype is None:
            return mine
        error = self._errors[piece]
        error.add_(mine)  # what is meant: the weights and what rounding has taken from them so far
        sent = error.to(self._dtype)
        mine.copy_(sent)
        error.sub_(mine)
        return sent


class Mixing:
    """One averaging of a piece of my weights in round k, under way: sent to those who mix me, received from those whom
    I mix."""

    def __init__(self, me: Learner, topology: Topology, k: int, piece: slice, wire: Wire) -> None:
        self._mine = me.snapshot(piece)
        sent = wire.encode(self._mine, piece)
        # who says first that it is ready to receive need not say so behind its own data: both directions flow at once
        self._receiving = [
            (weight, me.receive(peer, sent, tag=k)) for peer, weight in topology.sources(k, me.rank).items()
        ]
        self._sending = [me.send(peer, sent, tag=k) for peer in topology.targets(k, me.rank)]

    async def delta(self) -> Tensor:
        """How the averaging changes my weights: sum_j T_jl (theirs_j - mine), T_jl the weight with which I mix j.

        Applied as a change, it conserves the mean of all learners whatever a gradient did to the weights meanwhile;
        writing the average itself would wipe that gradient out.
        """
        import torch

        own = self._mine
        del self._mine  # a strategy may keep this longer than what it holds
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
    """A vector in parts that stay in a processor's cache while they are worked on; on a device in one."""
    size = _CACHED_NUMBERS if vector.device.type == "cpu" else max(1, len(vector))
    return [slice(start, start + size) for start in range(0, len(vector), size)] or [slice(0)]


def one_ahead(work: Iterable[T]) -> Iterator[T]:
    """The items of `work`, each made before the one before it is given: so that a piece is on its way while the one
    before it is waited for."""
    made: deque[T] = deque()
    for item in work:
        made.append(item)
        if len(made) > 1:
            yield made.popleft()
    yield from made
