"""A2CiD2: neighbours average in the background, with momentum in the averaging."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from starling.configuration import Config
from starling.errors import ConfigError
from starling.learner import Learner
from starling.strategies.base import gossip, one_learner
from starling.strategies.parts.background import StaleOptions, average_in_rounds
from starling.strategies.parts.mixing import Pattern, Rounded, averages_both_ways
from starling.strategies.parts.staleness import StaleSteps
from starling.topology import accelerated_contraction, acceleration_constants, find_topology

if TYPE_CHECKING:
    from torch import Tensor

_STEP_WITHOUT = 0.5
"""Value of alpha~ with which averaging changes x and x~ by the same amount."""


class Acceleration(Config):
    """The constants of A2CiD2."""

    rate: float = Field(gt=0.0)
    """eta, the rate at which weights and their companion mix, per averaging round."""
    step: float = Field(ge=_STEP_WITHOUT)
    """alpha~, the distance by which a pair of learners move their companions, in units of their difference; their
    weights move by 1/2."""


class A2Cid2Options(StaleOptions):
    """The options of `a2cid2`. Its pattern must have the same neighbours in each round, in both directions."""

    pattern: Pattern = "ring"
    acceleration: Literal["auto"] | Acceleration = "auto"
    """The constants: `auto` computes them from the pattern's graph, as in the paper; `rate` and `step` set them."""
    compression: Rounded = "none"
    """How weights are rounded for sending: `none` or `bfloat16`, with error feedback."""


def _check(options: A2Cid2Options, world: int) -> None:
    topology, chosen, pattern = find_topology(options.pattern, world, seed=0), options.acceleration, options.pattern
    if not averages_both_ways(topology):
        raise ConfigError(
            f"strategy.pattern: a2cid2 needs the same neighbours in each round, in both directions, which pattern "
            f"{pattern} does not have, or does not declare (`period`); choose pattern ring, or write `name: adpsgd`: "
            "where neighbours change at random, there is nothing to accelerate"
        )
    if chosen == "auto":
        return
    factor = accelerated_contraction(topology.matrix(0), chosen.rate, chosen.step)
    if not factor < 1.0:
        raise ConfigError(
            f"strategy.acceleration: with rate {chosen.rate:g} and step {chosen.step:g}, {topology.world} learners "
            f"under pattern {pattern} would move apart, by a factor of {math.sqrt(factor):.3g} in each round; choose "
            "auto, or lower either of them"
        )


@gossip(
    "a2cid2",
    "average with neighbours in the background, with momentum in the averaging",
    A2Cid2Options,
    sync_group_size=one_learner,
    check=_check,
)
async def a2cid2(me: Learner, options: A2Cid2Options) -> None:
    """Adds momentum to the averaging of `adpsgd`: learners on a sparse graph agree sooner, with the same messages.

    Equation, for learner l with weights x, a companion x~, which is initially x and is never sent, and delta the change
    that a round of averaging makes, sum_j T_jl (x_j - x)::

        in a round       x <- x + delta,          x~ <- x~ + 2 alpha~ delta
        between rounds   dx = eta (x~ - x) dt,    dx~ = eta (x - x~) dt
        in a step        x <- x - a g(Phi),       x~ <- x~ - a g(Phi)

    with T the mixing matrix, symmetric and the same in each round, given by `options.pattern`; t the number of rounds;
    a the step size of the local optimizer; Phi the value of x when the gradient began; eta and alpha~ the constants
    `options.acceleration`. For a pair delta is (x_j - x) / 2, and x~ moves by alpha~ (x_j - x) as in the paper.

    In the paper, t is time in units of a gradient, on the clocks of machines that are equally fast. If each learner
    counted its own gradients instead, averaging would change the mean of all weights whenever speeds differ. Here, t
    counts rounds, and all learners take part in the same rounds. So the sum of all x~ - x stays 0, and averaging still
    conserves the mean. The time until the next round passes at once when a round ends; in the paper, it passes while
    gradients are computed.

    Waits:
        To compute a gradient, a learner waits for no other. In a round, it waits only for the backgrounds of its
        neighbours.

    Use when:
        Learners differ in speed, and their graph is sparse, such as a ring of eight learners or more. If any two
        learners may average, learners agree as fast under `adpsgd` with a random pattern, which is simpler.

    Args:
        me: The learner that runs this coroutine.
        options: Which learners average, how often, the constants, how weights are rounded for sending, and how stale
            gradients are corrected.

    References:
        Nabli et al. 2023, "A2CiD2: Accelerating Asynchronous Communication in Decentralized Deep Learning",
        arXiv 2306.08289.

    Example:
        >>> from starling.toy import regression
        >>> starling.simulate(regression("a2cid2"), learners=8).loss()
        0.051
    """
    stale = StaleSteps(me, options.staleness, options.scale_by_staleness)
    me.background.start(average_in_rounds(me, options, AveragingMomentum(me, options).change))
    while me.claim():
        stale.step(await me.gradient(stale.snapshot()))
        await me.background.keep_up(options.lag)


class AveragingMomentum:
    """The difference y = x~ - x, which is kept instead of x~.

    A step of any optimizer leaves y unchanged. From one round to the next, x and x~ move towards each other by the
    fraction c = (1 - exp(-2 eta)) / 2 of y. So a round is::

        y <- y + (2 alpha~ - 1) delta
        x <- x + delta + c y
        y <- (1 - 2 c) y

    With alpha~ = 1/2, y is always 0. With `auto` the constants are those of the paper: see
    `topology.acceleration_constants`. If the state of the optimizer is averaged, it has no companion. y belongs to a
    membership, and is 0 at the beginning of the next one.
    """

    def __init__(self, me: Learner, options: A2Cid2Options) -> None:
        chosen = _constants(options.pattern, me.world) if options.acceleration == "auto" else options.acceleration
        self._push, self._c = 2.0 * chosen.step - 1.0, -0.5 * math.expm1(-2.0 * chosen.rate)
        self._y: Tensor | None = None
        if chosen.step > _STEP_WITHOUT:
            self._y = me.strategy_state("momentum", me.weights.new_zeros(len(me.weights)), for_membership=True)

    def change(self, delta: Tensor, piece: slice) -> Tensor:
        """The change that a round makes to a piece of the weights, from delta."""
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
