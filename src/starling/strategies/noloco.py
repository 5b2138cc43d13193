"""NoLoCo: an outer optimizer that follows the mean of a random pair, so that no mean of all is needed."""

from __future__ import annotations

from pydantic import Field

from starling.configuration import Config
from starling.learner import Learner
from starling.strategies.base import never, periodic
from starling.strategies.parts.local_steps import LocalSteps
from starling.strategies.parts.means import Means
from starling.strategies.parts.outer import Outer
from starling.topology import pairs


class NoLoCoOptions(Config):
    """The options of `noloco`."""

    every: int = Field(default=50, ge=1)
    """H, the number of steps that each learner makes between two agreements."""
    rate: float = Field(default=0.7, gt=0.0)
    """eta, the rate of the outer optimizer."""
    momentum: float = Field(default=0.5, ge=0.0, lt=1.0)
    """mu, the momentum of the outer optimizer."""
    pull: float | None = Field(default=None, ge=0.0)
    """gamma, how strongly theta is pulled towards the pair's mean of theta; null: eta, which needs half as many bytes
    as any other value."""


@periodic(
    "noloco", "step alone; an outer momentum follows the mean of a random pair", NoLoCoOptions, adopts_changes=never
)
async def noloco(me: Learner, options: NoLoCoOptions) -> None:
    """Each learner steps alone, and every H steps it agrees with one other learner, drawn at random.

    Equation, for learner l and its partner, with theta_l the weights with which learner l began the period, m_l its
    outer momentum, initially 0, and mean(.) the mean over the two learners::

        each step:              x_l <- x_l - a g_l(x_l)
        after every H-th step:  m_l <- mu m_l + eta mean(x - theta) + gamma (mean(theta) - theta_l)
                                theta_l <- theta_l + m_l
                                x_l <- theta_l

    with x_l the weights of learner l; a the step size of its local optimizer; g_l the gradient of its mini-batch. If
    the number of learners is odd, one learner is paired with itself. The learners' weights differ even after the last
    agreement.

    The code keeps v instead of m, with m = -eta v, v <- mu v + D and D = theta_l - mean(x) + (gamma / eta - 1) (theta_l
    - mean(theta)). In the paper's experiments, gamma is eta, and D does not depend on mean(theta).

    Waits:
        At each agreement, a learner waits only for its partner.

    Use when:
        A mean over all learners is slow or fails, because there are many learners or links of unequal speed. At an
        agreement, each learner sends to only one other learner.

    Args:
        me: The learner that runs this coroutine.
        options: How often learners agree, and how.

    References:
        Kolehmainen et al. 2025, "NoLoCo: No-all-reduce Low Communication Training Method for Large Models",
        arXiv 2506.10911.

    Example:
        >>> from starling.toy import regression
        >>> starling.simulate(regression("noloco", every=4), learners=4).loss()
        0.04
    """
    steps = LocalSteps(me, options.every)
    # each learner has its own theta, and the mean over its pair replaces the mean over all
    outer = Outer(me, Means(me), options.rate, options.momentum, is_common=False, keeps_theta=_pulls(options))
    topology = pairs(me.world, me.seed)
    while await steps.alone():
        number = -(-steps.num // options.every)
        (partner,) = topology.targets(number, me.rank) or (me.rank,)
        target = x = me.snapshot()  # theta less this is D
        if partner != me.rank:
            of_x = me.exchange(partner, x, tag=number)
            of_theta = me.exchange(partner, outer.theta.clone(), tag=number) if _pulls(options) else None
            target = 0.5 * (x + await of_x)
            if of_theta is not None and options.pull is not None:
                target += 0.5 * (options.pull / options.rate - 1.0) * (await of_theta - outer.theta)
        me.replace(outer.step(target))


def _pulls(options: NoLoCoOptions) -> bool:
    return options.pull is not None and options.pull != options.rate
