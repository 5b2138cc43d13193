"""Averaging with a momentum of its own (A2CiD2), which makes learners on a sparse graph agree sooner."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from starling.configuration import Config
from starling.errors import ConfigError
from starling.strategies.mixing import averages_both_ways
from starling.topology import accelerated_contraction, acceleration_constants, find_topology

if TYPE_CHECKING:
    from torch import Tensor

    from starling.learner import Learner

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


def check_acceleration(acceleration: Accelerated, compression: object, pattern: str, world: int) -> None:
    """Raise ConfigError unless averaging with this pattern and compression can be accelerated so."""
    if acceleration == "none":
        return
    if compression not in ("none", "bfloat16"):
        raise ConfigError(
            "strategy.compression: acceleration needs whole averages, and int8, int4 and top_k make a part of each in "
            "a round; choose bfloat16, or leave out either of them"
        )
    topology = find_topology(pattern, world, seed=0)
    if not averages_both_ways(topology):
        raise ConfigError(
            f"strategy.acceleration: it needs the same neighbours in each round, in both directions, which pattern "
            f"{pattern} does not have; choose pattern ring, or leave it out: where neighbours change at random, there "
            "is nothing to accelerate"
        )
    if not isinstance(acceleration, Acceleration):
        return
    factor = accelerated_contraction(topology.matrix(0), acceleration.rate, acceleration.step)
    if not factor < 1.0:
        raise ConfigError(
            f"strategy.acceleration: with rate {acceleration.rate:g} and step {acceleration.step:g}, {topology.world} "
            f"learners under pattern {pattern} would move apart, by a factor of {math.sqrt(factor):.3g} in each round; "
            "choose auto, or lower either of them"
        )
