"""Asynchronous decentralised SGD: neighbours average in the background, and no gradient waits for another learner."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from starling.configuration import Config
from starling.errors import ConfigError
from starling.learner import Learner
from starling.strategies.base import Strategy, one_learner
from starling.strategies.mixing import (
    Encoder,
    Mixing,
    MixingOptions,
    Pattern,
    averages_both_ways,
    check_mixing,
    one_ahead,
)
from starling.strategies.staleness import Staleness, StaleSteps
from starling.topology import find_topology
from starling.topology.analysis import accelerated_contraction, acceleration_constants

if TYPE_CHECKING:
    from torch import Tensor

DROPPED = ("k", "compression")
"""A round that is under way when a membership ends is left out. The next one counts rounds from 0, and what encodings
remember begins again with it, as it does after a resume."""
STEP_WITHOUT = 0.5
"""alpha~ with which averaging changes x and x~ alike."""


class Acceleration(Config):
    """The constants of A2CiD2."""

    rate: float = Field(gt=0.0)
    """eta, how fast weights and their companion mix, per averaging round."""
    step: float = Field(ge=STEP_WITHOUT)
    """alpha~, how far a pair moves its companions in units of its difference; the pair itself meets at 1/2."""


Accelerated = Literal["none", "auto"] | Acceleration
"""How averaging is accelerated."""


class BackgroundOptions(MixingOptions):
    """The options of the strategies that average in the background."""

    pattern: Pattern = "random"
    period: float = Field(default=1.0, gt=0.0)
    """Gradients that a learner computes before it opens the next averaging round; below 1: several rounds per
    gradient."""
    max_lag: float | None = Field(default=None, ge=1.0)
    """A learner that has computed this many gradients since its last completed round waits for the round under way.
    None: twice the period, but at least 2, so that a round can always overlap with a gradient."""

    @property
    def lag(self) -> float:
        """`max_lag`, or its default."""
        return max(2.0, 2.0 * self.period) if self.max_lag is None else self.max_lag


class AsynchronousOptions(BackgroundOptions):
    """The options of `adpsgd`."""

    scale_by_staleness: bool = False
    """Divide the learning rate of a step by the staleness of its gradient, if that is above 1."""
    staleness: Staleness = "none"
    """How gradients are corrected for what averaging has changed since they were begun: `none`, `gap-aware`, or
    `delay_compensation`."""
    acceleration: Accelerated = "none"
    """How averaging is accelerated by a momentum of its own (A2CiD2), on a fixed graph: `none`, `auto`, with constants
    from the graph, or `rate` and `step`."""


async def adpsgd(me: Learner, options: AsynchronousOptions) -> None:
    """Each learner computes gradients and steps independently, while its background averages with its neighbours.

    Equation, with k counting averaging rounds::

        background:  W <- W T_k
        learner l:   w_l <- w_l - a g_l(Phi_l)

    with W `[P, L]` the weights, one column for each learner; T_k the mixing matrix of round k, given by
    `options.pattern`: for example `ring` (fixed), `random` (a ring in a new random order each round) or `pairs` (a
    random perfect matching); a the step size of the local optimizer; Phi_l the value of w_l when the gradient began. A
    round waits only for the backgrounds of neighbours; a gradient waits for no other learner.

    In the papers the background averages as fast as it can. Here `options.period` limits how often it averages, and
    `options.max_lag` how far averaging may fall behind, because convergence proofs assume a bound. A learner that has
    computed `lag` gradients since its last completed round waits, before the next gradient, for the round under way.

    With `options.staleness` or `options.scale_by_staleness`, a rule of `strategies/staleness.py` changes g_l or a, by
    how far or how often averaging has moved w_l from Phi_l. With `options.acceleration`, averaging has a momentum
    of its own, whose equation is that of `AveragingMomentum`.

    Args:
        me: The learner that runs this coroutine.
        options: Which learners average, how often, how weights are encoded, how stale gradients are corrected, and how
            averaging is accelerated.

    References:
        Lian et al. 2018, "Asynchronous Decentralized Parallel Stochastic Gradient Descent", arXiv 1710.06952 (`pairs`).
        Zhang et al. 2019, "Distributed Deep Learning Strategies for Automatic Speech Recognition", arXiv 1904.04956
        (`ring`).
        Zhang et al. 2020, "Improving Efficiency in Large-Scale Decentralized Distributed Training", arXiv 2002.01119
        (`random`).
        Nabli et al. 2023, "A2CiD2: Accelerating Asynchronous Communication in Decentralized Deep Learning",
        arXiv 2306.08289 (`acceleration`).
    """
    stale = StaleSteps(me, options.staleness, options.scale_by_staleness)
    momentum = AveragingMomentum(me, options.acceleration, options.pattern)
    me.background(_average(me, options, momentum))
    while me.claim():
        stale.step(await me.gradient(stale.snapshot()))
        await me.keep_up(options.lag)


async def _average(me: Learner, options: AsynchronousOptions, momentum: AveragingMomentum) -> None:
    topology, pieces = find_topology(options.pattern, me.world, me.seed), options.pieces(me)
    compression = Encoder(options, me.weights, pieces)
    while (k := await me.round(options.period)) is not None:
        for piece, mixing in one_ahead((piece, Mixing(me, topology, k, piece, compression)) for piece in pieces):
            me.apply(momentum.change(await mixing.delta(), piece), piece)


class AveragingMomentum:
    """What A2CiD2 adds to a learner's averaging rounds.

    Equation, for learner l with weights x, a companion x~ that no message carries, initially x, and delta what a round
    changes, sum_j T_jl (x_j - x)::

        in a round       x <- x + delta,          x~ <- x~ + 2 alpha~ delta
        between rounds   dx = eta (x~ - x) dt,    dx~ = eta (x - x~) dt
        in a step        x <- x - a g,            x~ <- x~ - a g

    For a pair delta is (x_j - x) / 2, and x~ moves by alpha~ (x_j - x) as in the paper. From one round to the next,
    with t the number of rounds, both move by c = (1 - exp(-2 eta)) / 2 of their difference. Only that difference
    y = x~ - x is kept. A step of any optimizer leaves it as it is, so a round is::

        y <- y + (2 alpha~ - 1) delta
        x <- x + delta + c y
        y <- (1 - 2 c) y

    With alpha~ = 1/2, y is always 0. With `auto` the constants are those of the paper, from the graph of the pattern:
    see `topology.acceleration_constants`.

    In the paper t is time in units of a gradient, on the clocks of machines that are equally fast. Counted by each
    learner's own gradients, it would change the mean of all weights wherever speeds differ. All learners take part in
    the same rounds, so here the sum of all y stays 0, and averaging still conserves the mean. Time until the next round
    passes at once when a round ends; in the paper it passes while gradients are computed.

    The state of the optimizer, if it is averaged, has no companion. y belongs to a membership, after which it is 0.

    References:
        Nabli et al. 2023, "A2CiD2: Accelerating Asynchronous Communication in Decentralized Deep Learning",
        arXiv 2306.08289.
    """

    def __init__(self, me: Learner, acceleration: Accelerated, pattern: str) -> None:
        chosen = _constants(pattern, me.world) if acceleration == "auto" else acceleration
        self._y: Tensor | None = None
        if isinstance(chosen, Acceleration) and chosen.step > STEP_WITHOUT:
            self._y = me.strategy_state("momentum", me.weights.new_zeros(len(me.weights)), for_membership=True)
            self._push = 2.0 * chosen.step - 1.0
            self._c = -0.5 * math.expm1(-2.0 * chosen.rate)

    def change(self, delta: Tensor, piece: slice) -> Tensor:
        """What a round changes in a piece of the weights, from delta."""
        if self._y is None or piece.stop > len(self._y):
            return delta
        y = self._y[piece]
        y.add_(delta, alpha=self._push)
        change = delta.add(y, alpha=self._c)
        y.mul_(1.0 - 2.0 * self._c)
        return change


@lru_cache
def _constants(pattern: str, world: int) -> Acceleration:
    rate, step = acceleration_constants(find_topology(pattern, world, seed=0).matrix(0))
    return Acceleration(rate=rate, step=step)


def _check(options: AsynchronousOptions, world: int) -> None:
    topology, acceleration, pattern = check_mixing(options, world), options.acceleration, options.pattern
    if acceleration == "none":
        return
    if options.compression not in ("none", "bfloat16"):
        raise ConfigError(
            "strategy.compression: acceleration needs whole averages, and int8, int4 and top_k make a part of each in "
            "a round; choose bfloat16, or leave out either of them"
        )
    if not averages_both_ways(topology):
        raise ConfigError(
            f"strategy.acceleration: it needs the same neighbours in each round, in both directions, which pattern "
            f"{pattern} does not have; choose pattern ring, or leave it out: where neighbours change at random, there "
            "is nothing to accelerate"
        )
    if acceleration == "auto":
        return
    factor = accelerated_contraction(topology.matrix(0), acceleration.rate, acceleration.step)
    if not factor < 1.0:
        raise ConfigError(
            f"strategy.acceleration: with rate {acceleration.rate:g} and step {acceleration.step:g}, {topology.world} "
            f"learners under pattern {pattern} would move apart, by a factor of {math.sqrt(factor):.3g} in each round; "
            "choose auto, or lower either of them"
        )


ADPSGD = Strategy(
    "adpsgd",
    "average with neighbours in the background",
    adpsgd,
    one_learner,
    AsynchronousOptions,
    check=_check,
    kind="gossip",
)
