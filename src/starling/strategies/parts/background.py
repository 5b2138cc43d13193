"""Averaging rounds that a learner's background makes while it computes gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from starling.configuration import Config
from starling.learner import Learner
from starling.strategies.parts.mixing import (
    Differences,
    Encoder,
    Mixing,
    MixingOptions,
    Pattern,
    PublicCopies,
    Rounding,
    check_fixed_neighbours,
    check_mixing,
    one_ahead,
)
from starling.strategies.parts.staleness import Staleness
from starling.topology import find_topology

if TYPE_CHECKING:
    from torch import Tensor

DROPPED = ("k", "encoder")
"""Attributes that are dropped with a membership. A round that is under way is left out. The next membership counts
rounds from 0, and the memory of encodings starts again, as it does after a resume."""


class Choco(Config):
    """Send the changes of weights, and apply a part of each change."""

    choco: Differences
    """Encoding of the changes."""
    consensus_rate: float = Field(default=1.0, gt=0.0, le=1.0)
    """gamma, the fraction of a round's change that is applied."""


Compressed = Literal["none", "bfloat16"] | Differences | Choco
"""Encoding of weights for sending. `int8`, `int4` and `top_k` alone have a consensus rate of 1."""


class RoundOptions(Config):
    """The options of every strategy that makes rounds in the background."""

    period: float = Field(default=1.0, gt=0.0)
    """Number of gradients that a learner computes before it opens the next averaging round. A value below 1 gives
    several rounds for each gradient."""
    max_lag: float | None = Field(default=None, ge=1.0)
    """A learner that has computed this many gradients since its last completed round waits for the round under way.
    None uses twice the period, but at least 2, so that a round can always overlap with a gradient."""

    @property
    def lag(self) -> float:
        """The value of `max_lag`, or its default."""
        return max(2.0, 2.0 * self.period) if self.max_lag is None else self.max_lag


class BackgroundOptions(MixingOptions, RoundOptions):
    """The options of every strategy that averages in the background."""

    MOVED: ClassVar[Mapping[str, str]] = {
        "consensus_rate": "it belongs to an encoding: write `compression: {choco: int8, consensus_rate: 0.5}`"
    }
    pattern: Pattern = "random"
    compression: Compressed = "none"
    """How weights are encoded for sending, with error feedback. `int8`, `int4`, `top_k` and `choco` encode the changes
    of weights instead, and need fixed neighbours."""


class StaleOptions(BackgroundOptions):
    """The options of strategies whose learners step alone."""

    scale_by_staleness: bool = False
    """Whether the learning rate of a step is divided by the staleness of its gradient if the staleness is above 1."""
    staleness: Staleness = "none"
    """How gradients are corrected for the changes that averaging has made since the gradient began: `none`,
    `gap-aware`, or `delay_compensation`."""


def check_background(options: BackgroundOptions, world: int) -> None:
    """Raise ConfigError if `world` learners cannot average with this pattern and compression."""
    if options.compression in ("none", "bfloat16"):
        check_mixing(options, world)
    else:
        check_fixed_neighbours(options.pattern, world)


def encoder_of(compression: Compressed, weights: Tensor, pieces: Sequence[slice]) -> Encoder:
    """Return the encoder that an option requests for pieces of the weights. It encodes each piece once in a round."""
    if compression == "none":
        return Encoder()
    if compression == "bfloat16":
        return Rounding(weights, pieces)
    chosen = compression if isinstance(compression, Choco) else Choco(choco=compression)
    return PublicCopies(weights, pieces, chosen.choco, chosen.consensus_rate)


def unchanged(delta: Tensor, piece: slice) -> Tensor:
    """Return the change that averaging makes, without modifying it."""
    return delta


async def average_in_rounds(
    me: Learner, options: BackgroundOptions, change: Callable[[Tensor, slice], Tensor] = unchanged
) -> None:
    """Average with neighbours in each round: W <- W T_k in round k, piece by piece.

    `change` converts the change that averaging makes to a piece, sum_j T_jl (w_j - w_l), into the change that is added
    to my weights. A step that is made in the meantime is preserved. Each piece is sent before the previous piece is
    awaited. A learner that is alone makes no rounds.
    """
    if me.world == 1:
        return
    topology, pieces = find_topology(options.pattern, me.world, me.seed), options.pieces(me)
    encoder = encoder_of(options.compression, me.weights, pieces)
    while (k := await me.background.round(options.period)) is not None:
        for piece, mixing in one_ahead((piece, Mixing(me, topology, k, piece, encoder)) for piece in pieces):
            me.apply(change(await mixing.delta(), piece), piece)
