"""EASGD: learners and a common centre move towards each other."""

from typing import ClassVar

from pydantic import Field

from starling.configuration import Config
from starling.errors import ConfigError
from starling.learner import Learner
from starling.strategies.base import never, periodic
from starling.strategies.parts.local_steps import LocalSteps, Travelling
from starling.strategies.parts.means import Encoded, Means, TopK
from starling.strategies.parts.outer import Outer


class EasgdOptions(Config):
    """The options of `easgd`."""

    MOVED: ClassVar = {"elastic": "learners always keep weights of their own under easgd"}
    every: int = Field(default=10, ge=1)
    """H, the number of steps that each learner makes between two agreements."""
    rate: float = Field(default=0.9, gt=0.0)
    """eta = L r; at an agreement, a learner moves towards the centre by the fraction eta / L of their difference."""
    compression: Encoded = "none"
    """How the difference from the centre is encoded for sending: none, bfloat16 or integers; errors are fed back."""


def _check(options: EasgdOptions, world: int) -> None:
    if isinstance(options.compression, TopK):
        raise ConfigError(
            "strategy.compression: learners that keep weights of their own differ from the centre for good, and what "
            "top_k leaves of these differences would be added up without end; choose bfloat16, int8 or int4"
        )


@periodic(
    "easgd",
    "step alone, and approach a common centre every few steps",
    EasgdOptions,
    check=_check,
    adopts_changes=never,
)
async def easgd(me: Learner, options: EasgdOptions) -> None:
    """Each learner steps alone, and every H steps it moves towards a centre, and the centre towards all learners.

    Equation, for the first step of each period except the first period, with theta the centre and r = eta / L::

        other steps:  x_l <- x_l - a g_l(x_l)
        this step:    x_l <- x_l - a g_l(x_l) + r (theta - x_l)
                      theta <- theta + r sum_l (x_l - theta)

    where the right-hand sides use x_l and theta from before the step, with x_l the weights of learner l; a the step
    size of its local optimizer; g_l the gradient of its mini-batch. Learners keep their own weights, and explore. At
    the end, the centre makes one more such step, and all learners adopt it.

    All learners keep the same centre: its step uses the mean of all x_l, which travels while the gradient is computed.

    Waits:
        A learner waits for the slowest one once in a period, but only after it has computed its own gradient.

    Use when:
        The average of the learners' weights is a worse model than any of theirs, as with long periods and a loss with
        many minima. `aeasgd` is the asynchronous form, with a server.

    Args:
        me: The learner that runs this coroutine.
        options: How often learners and centre move towards each other, and by how much.

    References:
        Zhang, Choromanska & LeCun 2015, "Deep Learning with Elastic Averaging SGD", arXiv 1412.6651.

    Example:
        >>> from starling.toy import regression
        >>> starling.simulate(regression("easgd", every=4), learners=4).loss()
        0.015
    """
    steps = LocalSteps(me, every=1)  # `travelling` counts to H
    if me.world == 1:  # a learner alone has no centre to be drawn to
        while await steps.alone():
            pass
        return
    travelling = Travelling(me, 1, options.every, steps_on_the_way=1)
    outer = Outer(me, Means(me, options.compression), options.rate, keeps_theta=True)

    async def draw_together(num_steps: int | None = None) -> None:
        if (arrival := await travelling.arrival(num_steps)) is not None:
            whole, mean = arrival
            difference = outer.theta - travelling.x(whole)  # before theta moves
            outer.step(mean, whole)
            me.apply(options.rate / me.world * difference)

    travelling.depart(steps.num, outer.mean)
    while await steps.alone():
        await draw_together(steps.num)
        travelling.depart(steps.num, outer.mean)
    await draw_together()
    if steps.num:
        me.replace(outer.step(await outer.mean()))
