"""Averaging with neighbours in delta form. Each learner adds a change to its weights, even if the weights have changed
in the meantime. With CHOCO, learners send the changes of their weights, and know each other's public copies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast

from pydantic import AfterValidator, BeforeValidator, Field

from starling.configuration import Config
from starling.errors import ConfigError
from starling.learner import Learner
from starling.strategies.parts.means import TopK, find_encoding
from starling.topology import Topology, check_pattern, find_topology

if TYPE_CHECKING:
    from torch import Tensor

    from starling.strategies.parts.encodings import Encoding


T = TypeVar("T")
Keep = Callable[[str, "Tensor"], "Tensor"]
"""Function that returns, given a name and an initial value, the tensor in which an encoder keeps its memory."""
Pattern = Annotated[str, AfterValidator(check_pattern)]
_CACHED_NUMBERS = 1 << 17
"""Number of values of which three vectors fit in a processor's cache."""


class MixingOptions(Config):
    """The options of every strategy that averages with neighbours."""

    pattern: Pattern = "ring"
    """Which learners average: a name in `topology.PATTERNS`, a pattern of an installed package, or `module:name`."""
    optimizer_state: Literal["local", "averaged"] = "local"
    """What happens to momentum and Adam's moments: each learner keeps its own, or they are averaged like weights."""
    piece_megabytes: float = Field(default=16.0, gt=0.0)
    """Largest size of the pieces in which weights are averaged; it keeps locks on them short and copies small."""

    def pieces(self, me: Learner) -> list[slice]:
        """Return the pieces of the weights, and of the optimizer's state if it is averaged."""
        largest = max(1, int(self.piece_megabytes * 2**20) // me.weights.element_size())
        return list(me.optimizer.pieces(largest, self.optimizer_state == "averaged"))


def kept_by(me: Learner) -> Keep:
    """Return a function that keeps an encoder's memory in the learner's checkpoints. The memory starts again in each
    membership."""
    return lambda name, initial: me.strategy_state(name, initial, for_membership=True)


def forgotten(name: str, initial: Tensor) -> Tensor:
    """Return memory that also starts again after a resume. It is for rounds that checkpoints do not include."""
    return initial


def check_mixing(options: MixingOptions, world: int) -> None:
    """Raise ConfigError if `world` learners cannot average with this pattern."""
    find_topology(options.pattern, world, seed=0)


def has_fixed_neighbours(topology: Topology) -> bool:
    """Return whether the neighbours are the same in each round."""
    return topology.period == 1 or topology.world <= 2


def averages_both_ways(topology: Topology) -> bool:
    """Return whether the neighbours are the same in each round, and mix each other with equal weights."""
    mixing = topology.matrix(0)
    return has_fixed_neighbours(topology) and bool(abs(mixing - mixing.T).max() <= 1e-9)


class Encoder:
    """Converts weights to messages, and messages to a change of the weights.

    This class sends weights unchanged, and the change of learner l's weights w_l is::

        sum_j T_jl (w_j - w_l)

    with T the mixing matrix. `Rounding` and `PublicCopies` send less.
    """

    def encode(self, mine: Tensor, piece: slice) -> Tensor:
        """Return the message for a piece of my weights. `mine` is set to the values that its receivers decode."""
        return mine

    def change(self, own: Tensor, theirs: Sequence[tuple[float, Tensor]], piece: slice) -> Tensor:
        """Return the change of my weights, given my own decoded message and the messages of the others, each with its
        T_jl."""
        return sum_of_differences(own, theirs)


class Mixing:
    """Averages one piece of my weights, or `mine` in its place, in round k. It sends the piece to my targets and
    receives the pieces of my sources."""

    def __init__(
        self, me: Learner, topology: Topology, k: int, piece: slice, encoder: Encoder, mine: Tensor | None = None
    ) -> None:
        self._encoder, self._piece = encoder, piece
        self._mine = me.snapshot(piece) if mine is None else mine
        sent = encoder.encode(self._mine, piece)
        # post receives before sends, so that data flows in both directions at once
        self._receiving = [
            (weight, me.receive(peer, sent, tag=k)) for peer, weight in topology.sources(k, me.rank).items()
        ]
        self._sending = [me.send(peer, sent, tag=k) for peer in topology.targets(k, me.rank)]

    async def delta(self) -> Tensor:
        """Return the change to my weights, sum_j T_jl (theirs_j - mine), with T_jl the weight with which I mix learner
        j.

        Adding this change conserves the mean of all learners even if a gradient step has changed the weights in the
        meantime. Writing the average itself would erase that step.
        """
        own = self._mine
        del self._mine  # free the copy as early as possible: a strategy may keep this object
        theirs = [(weight, await handle) for weight, handle in self._receiving]
        self._receiving.clear()
        for sending in self._sending:
            await sending
        return own if own.is_meta else self._encoder.change(own, theirs, self._piece)


def sum_of_differences(own: Tensor, theirs: Sequence[tuple[float, Tensor]]) -> Tensor:
    """Return sum_j T_jl (theirs_j - own)."""
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
    """Return slices of a vector that fit in a processor's cache, or one slice on an accelerator."""
    size = _CACHED_NUMBERS if vector.device.type == "cpu" else max(1, len(vector))
    return [slice(start, start + size) for start in range(0, len(vector), size)] or [slice(0)]


def one_ahead(work: Iterable[T]) -> Iterator[T]:
    """Yield the items of `work`, each after the next item has been created, so that the next piece is already under way
    while a piece is awaited."""
    return (item for item, _ in pairwise(chain[Any](work, [None])))


def _is_no_choco(value: Any) -> Any:
    if value in ("int8", "int4") or isinstance(value, dict):
        raise ValueError(
            "int8, int4 and top_k encode what has changed in weights, which is CHOCO: write `name: choco`, or "
            "`compression: bfloat16`"
        )
    return value


Rounded = Annotated[Literal["none", "bfloat16"], BeforeValidator(_is_no_choco)]
"""How weights are rounded for sending, with error feedback."""


class RoundedOptions(MixingOptions):
    """The options of strategies that average whole weights with neighbours."""

    compression: Rounded = "none"
    """How weights are rounded for sending: `none` or `bfloat16`, with error feedback."""


class Rounding(Encoder):
    """Sends weights as bfloat16, which halves their bytes.

    Equation, for each piece w of the weights and its accumulated error e, initially 0::

        send  q = round(w + e)
        e <- w + e - q

    The sums of the sent and of the exact weights differ only by e, so errors do not accumulate. e belongs to a
    membership: after a change it is 0 again.

    References:
        Seide et al. 2014, "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training
        of Speech DNNs", Interspeech (error feedback).
    """

    def __init__(self, weights: Tensor, pieces: Sequence[slice], keep: Keep = forgotten) -> None:
        self._errors = keep("errors", weights.new_zeros(pieces[-1].stop if pieces else 0))

    def encode(self, mine: Tensor, piece: slice) -> Tensor:
        import torch

        error = self._errors[piece]
        error.add_(mine)  # w + e
        sent = error.to(torch.bfloat16)
        mine.copy_(sent)
        error.sub_(mine)
        return sent


def rounding(me: Learner, options: RoundedOptions) -> Encoder:
    """Return the encoder that these options request. Its checkpoints are consistent with its rounds."""
    return Encoder() if options.compression == "none" else Rounding(me.weights, options.pieces(me), kept_by(me))


Order = Literal["at-once", "adapt-first"]
"""Whether neighbours average while the gradient is computed, or after the step with it."""


class Gossip:
    """The averaging rounds of a learner, W <- W T_k in round k.

    The number of rounds is part of a learner's checkpoint, and starts again from 0 in each membership.
    """

    def __init__(
        self, me: Learner, options: MixingOptions, encoder: Encoder | None = None, topology: Topology | None = None
    ) -> None:
        import torch

        self._me, self._pieces, self._encoder = me, options.pieces(me), encoder or Encoder()
        self._topology = topology or find_topology(options.pattern, me.world, me.seed)
        self._k = kept_by(me)("rounds", torch.zeros(1, dtype=torch.int64))

    @property
    def num_rounds(self) -> int:
        """The number of rounds that have begun in this membership."""
        return int(self._k)

    def start(self) -> Averaging:
        """Start the next round with the present weights."""
        self._k.add_(1)
        return Averaging(self._me, [(piece, self._of_piece(piece)) for piece in self._pieces])

    def start_mean(self) -> Averaging:
        """Start the next round of the weights as an exact mean over all learners instead of over neighbours."""
        self._k.add_(1)
        return Averaging(self._me, [(piece, _MeanOfAll(self._me, piece)) for piece in self._pieces])

    def start_beside(self, vector: Tensor) -> Averaging:
        """Start averaging a vector `[P]` in addition to the round of the weights that has just begun."""
        pieces = [piece for piece in self._pieces if piece.stop <= len(vector)]
        return Averaging(self._me, [(piece, self._of_piece(piece, vector[piece].clone())) for piece in pieces])

    def _of_piece(self, piece: slice, mine: Tensor | None = None) -> Mixing:
        return Mixing(self._me, self._topology, int(self._k) - 1, piece, self._encoder, mine)


class Averaging:
    """An averaging round under way, in pieces."""

    def __init__(self, me: Learner, pieces: Sequence[tuple[slice, Mixing | _MeanOfAll]]) -> None:
        self._me, self._pieces = me, pieces

    async def change_weights(self) -> None:
        """Wait for each piece, and add its change to my weights."""
        for piece, mixing in self._pieces:
            self._me.apply(await mixing.delta(), piece)

    async def changes(self) -> list[tuple[slice, Tensor]]:
        """Wait for all pieces, and return the change of each piece. The caller adds these changes."""
        return [(piece, await mixing.delta()) for piece, mixing in self._pieces]


class _MeanOfAll:
    """Averages one piece of my weights with all learners, exactly."""

    def __init__(self, me: Learner, piece: slice) -> None:
        self._mine = me.snapshot(piece)
        self._mean = me.mean(self._mine)

    async def delta(self) -> Tensor:
        """Return the change to my weights."""
        return await self._mean - self._mine


Differences = Literal["int8", "int4"] | TopK
"""Encoding of the changes of weights."""


class PublicCopies(Encoder):
    """Sends the changes of weights since their public copy, which all neighbours know.

    Equation, for learner l, with x its weights, y its public copy, C the encoding, T the mixing matrix, the same in
    each round, and gamma the consensus rate::

        send  q_l = C(x_l - y_l)
        y_l <- y_l + q_l
        d_l <- d_l + sum_j T_jl (q_j - q_l)
        x_l <- x_l + gamma d_l

    so that d_l is the mixture of the public copies minus learner l's own copy. The difference is kept because a mixture
    is rounded: learners with equal copies would add the rounding error to their weights in each round.

    y and d belong to a membership. In its first round q is x as float32, so that public copies begin equal to the
    weights. In the paper they begin at 0.

    References:
        Koloskova et al. 2019, "Decentralized Stochastic Optimization and Gossip Algorithms with Compressed
        Communication", arXiv 1902.00340.
    """

    def __init__(
        self, weights: Tensor, pieces: Sequence[slice], compression: Differences, gamma: float, keep: Keep = forgotten
    ) -> None:
        import torch

        self._encoding = cast("Encoding", find_encoding(compression))
        self._gamma, self._num_pieces = gamma, len(pieces)
        zeros = weights.new_zeros(pieces[-1].stop if pieces else 0)
        self._public = keep("public", zeros)
        self._differences = keep("differences", zeros.clone())
        self._begun = keep("pieces begun", torch.zeros(1, dtype=torch.int64))  # number of pieces, which take turns

    def encode(self, mine: Tensor, piece: slice) -> Tensor:
        import torch

        public = self._public[piece]
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
        whole = [(weight, self._decoded(sent, own)) for weight, sent in theirs]
        return self._differences[piece].add_(sum_of_differences(own, whole)) * self._gamma

    def _decoded(self, sent: Tensor, own: Tensor) -> Tensor:
        return sent if sent.dtype == own.dtype else self._encoding.decode(sent, len(own))


def check_fixed_neighbours(pattern: str, world: int) -> None:
    """Raise ConfigError if learners would not know the changes of each other's weights."""
    if not has_fixed_neighbours(find_topology(pattern, world, seed=0)):
        raise ConfigError(
            "strategy.compression: learners would have to know what has changed in each other's weights, but under "
            f"pattern {pattern} neighbours change from round to round, or its `period` is not given as 1; choose "
            "pattern ring or complete, or compression bfloat16 (not under choco)"
        )
