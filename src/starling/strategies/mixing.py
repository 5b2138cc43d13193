"""Averaging with other learners in delta form, shared by the decentralised strategies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field

from starling.configuration import Config
from starling.errors import ConfigError
from starling.learner import Learner
from starling.strategies.compression import Encoded, find_encoding
from starling.topology import Topology, check_pattern, find_topology

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
Pattern = Annotated[str, AfterValidator(check_pattern)]
_CACHED_NUMBERS = 1 << 17
"""Three vectors of this many numbers fit in a processor's cache."""


class MixingOptions(Config):
    """The options of every strategy that averages with neighbours."""

    pattern: Pattern = "ring"
    """Which learners average: a name in `topology.PATTERNS`, a pattern of an installed package, or `module:name`."""
    compression: Encoded = "none"
    """How weights are encoded for sending, or with int8, int4 and top_k what has changed in them; errors are fed
    back."""
    consensus_rate: float = Field(default=1.0, gt=0.0, le=1.0)
    """gamma, the share of a round's change that is made under int8, int4 and top_k."""
    optimizer_state: Literal["local", "averaged"] = "local"
    """What happens to momentum and Adam's moments: each learner keeps its own, or they are averaged like weights."""
    piece_megabytes: float = Field(default=16.0, gt=0.0)
    """Weights are averaged in pieces of at most this size, so that locks on them are short and copies are small."""

    def pieces(self, me: Learner) -> list[slice]:
        """The pieces of the weights, and of the optimizer's state if it is averaged."""
        largest = max(1, int(self.piece_megabytes * 2**20) // me.weights.element_size())
        return list(me.pieces(largest, self.optimizer_state == "averaged"))


def has_fixed_neighbours(topology: Topology) -> bool:
    """Whether the neighbours are the same in each round."""
    return topology.period == 1 or topology.world <= 2


def averages_both_ways(topology: Topology) -> bool:
    """Whether the neighbours are the same in each round, and mix each other with equal weights."""
    mixing = topology.matrix(0)
    return has_fixed_neighbours(topology) and bool(abs(mixing - mixing.T).max() <= 1e-9)


def check_mixing(options: MixingOptions, world: int) -> Topology:
    """The pattern of so many learners. Raises ConfigError if it does not suit their number, or its neighbours the
    compression."""
    topology = find_topology(options.pattern, world, seed=0)
    if options.compression in ("none", "bfloat16"):
        if options.consensus_rate != 1.0:
            raise ConfigError("strategy.consensus_rate: only for compression int8, int4 or top_k; leave it out")
    elif not has_fixed_neighbours(topology):
        raise ConfigError(
            f"strategy.compression: learners would have to know what has changed in each other's weights, but under "
            f"pattern {options.pattern} neighbours change from round to round; choose pattern ring or complete, or "
            "compression bfloat16"
        )
    return topology


class Encoder:
    """Encodes weights for sending, with memory of what the encoding took away.

    Equation of bfloat16, for each piece w of the weights and its accumulated error e, initially 0::

        send  q = round(w + e)
        e <- w + e - q

    Rounding errors do not accumulate: the sums of the sent and of the exact weights differ only by e.

    Equation of int8, int4 and top_k (CHOCO), for learner l, with x its weights, y its public copy, which its neighbours
    know, C the encoding, and gamma the consensus rate::

        send  q_l = C(x_l - y_l)
        y_l <- y_l + q_l,  d_l <- d_l + sum_j T_jl (q_j - q_l)
        x_l <- x_l + gamma d_l

    so that d_l is the mixture of the public copies minus learner l's own. It is kept as a difference because a mixture
    is rounded: learners with equal copies would add that rounding to their weights in each round. In the first round
    of a membership q is x, as float32: public copies begin equal to the weights. `keep` returns the tensors that hold
    e, y and d, from a name and their initial value: those of a checkpoint, if a strategy saves them. `pieces` are all
    that this learner encodes, once in each round.

    References:
        Seide et al. 2014, "1-bit stochastic gradient descent", Interspeech.
        Koloskova et al. 2019, "Decentralized Stochastic Optimization and Gossip Algorithms with Compressed
        Communication", arXiv 1902.00340 (CHOCO).
    """

    def __init__(
        self,
        options: MixingOptions,
        weights: Tensor,
        pieces: Sequence[slice],
        keep: Callable[[str, Tensor], Tensor] = lambda name, initial: initial,
    ) -> None:
        import torch

        self._rounds = options.compression == "bfloat16"
        self._encoding = None if self._rounds else find_encoding(options.compression)
        self._gamma = options.consensus_rate
        self._num_pieces = len(pieces)
        if options.compression != "none":
            zeros = weights.new_zeros(pieces[-1].stop if pieces else 0)
            self._errors = keep("errors" if self._rounds else "public", zeros)  # of CHOCO: y
            if not self._rounds:
                self._differences = keep("differences", zeros.clone())  # d
                self._begun = keep("pieces begun", torch.zeros(1, dtype=torch.int64))  # pieces, which take turns

    def encode(self, mine: Tensor, piece: slice) -> Tensor:
        """Encode `mine`, and change it to what the receivers will decode."""
        import torch

        if self._rounds:
            error = self._errors[piece]
            error.add_(mine)  # w + e
            sent = error.to(torch.bfloat16)
            mine.copy_(sent)
            error.sub_(mine)
            return sent
        if self._encoding is None:
            return mine
        public = self._errors[piece]
        if int(self._begun) < self._num_pieces:
            self._begun.add_(1)
            public.copy_(mine)
            return mine
        mine.sub_(public)
        if mine.is_meta:
            return mine.new_empty(self._encoding.num_bytes(len(mine)), dtype=torch.uint8)
        sent = self._encoding.encode(mine)
        mine.copy_(self._encoding.decode(sent, len(mine)))
        public.add_(mine)
        return sent

    def change(self, own: Tensor, theirs: Sequence[tuple[float, Tensor]], piece: slice) -> Tensor:
        """The change to my weights, from what I sent, decoded, and what others sent, each with its weight."""
        if own.is_meta:
            return own
        if self._encoding is None:
            return sum_of_differences(own, theirs)
        decoded = []
        for weight, sent in theirs:
            is_whole = sent.dtype == own.dtype
            decoded.append((weight, sent if is_whole else self._encoding.decode(sent, len(own))))
        return self._differences[piece].add_(sum_of_differences(own, decoded)) * self._gamma


class Mixing:
    """Averages one piece of my weights in round k, or `mine` in its place: sends it to my targets and receives those of
    my sources."""

    def __init__(
        self,
        me: Learner,
        topology: Topology,
        k: int,
        piece: slice,
        compression: Encoder,
        mine: Tensor | None = None,
    ) -> None:
        self._compression, self._piece = compression, piece
        self._mine = me.snapshot(piece) if mine is None else mine
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
        own = self._mine
        del self._mine  # free the copy as early as possible: a strategy may keep this object
        theirs = [(weight, await handle) for weight, handle in self._receiving]
        self._receiving.clear()
        for sending in self._sending:
            await sending
        return self._compression.change(own, theirs, self._piece)


class MeanOfAll:
    """Averages one piece of my weights with all learners, or `mine` in its place, exactly."""

    def __init__(self, me: Learner, piece: slice, mine: Tensor | None = None) -> None:
        self._mine = me.snapshot(piece) if mine is None else mine
        self._mean = me.mean(self._mine)

    async def delta(self) -> Tensor:
        """The change to my weights."""
        return await self._mean - self._mine


class Gossip:
    """The averaging rounds of a learner that takes one in each step, as its neighbours do.

    Every `mean_every`-th round is a mean of all. The number of rounds, and what the compression remembers, is part of a
    learner's checkpoint; they begin again in each membership.
    """

    def __init__(self, me: Learner, options: MixingOptions, topology: Topology, mean_every: int | None = None) -> None:
        import torch

        def keep(name: str, initial: Tensor) -> Tensor:
            return me.strategy_state(name, initial, for_membership=True)

        self._me, self._topology, self._mean_every = me, topology, mean_every
        self._pieces = options.pieces(me)
        self._compression = Encoder(options, me.weights, self._pieces, keep)
        self._k = keep("rounds", torch.zeros(1, dtype=torch.int64))

    def start(self) -> Averaging:
        """Start the next round of the weights as they are now."""
        self._k.add_(1)
        return Averaging(self._me, [(piece, self._of_piece(piece)) for piece in self._pieces])

    def start_beside(self, vector: Tensor) -> Averaging:
        """Start averaging a vector `[P]`, beside the round of the weights that has just begun."""
        pieces = [piece for piece in self._pieces if piece.stop <= len(vector)]
        return Averaging(self._me, [(piece, self._of_piece(piece, vector[piece].clone())) for piece in pieces])

    def _of_piece(self, piece: slice, mine: Tensor | None = None) -> Mixing | MeanOfAll:
        if self._mean_every is not None and int(self._k) % self._mean_every == 0:
            return MeanOfAll(self._me, piece, mine)
        return Mixing(self._me, self._topology, int(self._k) - 1, piece, self._compression, mine)


class Averaging:
    """A round under way, in pieces."""

    def __init__(self, me: Learner, pieces: Sequence[tuple[slice, Mixing | MeanOfAll]]) -> None:
        self._me, self._pieces = me, pieces

    async def change_weights(self) -> None:
        """Wait for each piece, and add its change to my weights."""
        for piece, mixing in self._pieces:
            self._me.apply(await mixing.delta(), piece)

    async def changes(self) -> list[tuple[slice, Tensor]]:
        """Wait for all pieces; the change of each, which the caller adds."""
        return [(piece, await mixing.delta()) for piece, mixing in self._pieces]


def sum_of_differences(own: Tensor, theirs: Sequence[tuple[float, Tensor]]) -> Tensor:
    """sum_j T_jl (theirs_j - own)."""
    import torch

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
    return (item for item, _ in pairwise(chain[Any](work, [None])))
