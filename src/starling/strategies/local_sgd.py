"""Local SGD: learners step alone and average their weights every few steps."""

from typing import ClassVar

from pydantic import Field

from starling.configuration import Config
from starling.learner import Learner
from starling.strategies.base import periodic
from starling.strategies.parts.local_steps import LocalSteps
from starling.strategies.parts.means import Compression, Means
from starling.strategies.parts.outer import AgreedState, OptimizerState, Outer


class LocalSgdOptions(Config):
    """The options of `local-sgd`."""

    MOVED: ClassVar = {
        "warm_up": "post-local SGD is a strategy of its own: write `name: post-local-sgd`",
        "rate": "write `name: diloco`, which has an outer optimizer",
        "momentum": "write `name: diloco`, or `name: bmuf` with `nesterov: false` for the classical momentum",
        "nesterov": "write `name: diloco` or `name: bmuf`",
        "divided_by_rate": "write `name: slowmo`",
        "fragments": "write `name: streaming-diloco`",
        "overlap": "write `name: streaming-diloco`",
        "blend": "write `name: streaming-diloco`",
        "elastic": "write `name: easgd`",
        "share": "write `name: sparta`",
        "among": "write `name: noloco`",
        "pull": "write `name: noloco`",
        "feedback": "write `name: sparseloco`",
    }
    every: int = Field(default=8, ge=1)
    """H, the number of steps that each learner makes between two averages."""
    optimizer_state: OptimizerState = "local"
    """Effect of an agreement on momentum and Adam's moments: each learner keeps its own (`local`), they are averaged
    (`averaged`), or they are cleared together with the step count (`reset`)."""
    compression: Compression = "none"
    """How the difference from the last average is encoded for sending; errors are fed back."""


@periodic(
    "local-sgd",
    "step alone, and average all weights every few steps",
    LocalSgdOptions,
    adopts_changes=lambda options: options.compression == "none",
)
async def local_sgd(me: Learner, options: LocalSgdOptions) -> None:
    """Each learner steps alone, and every H steps all learners average their weights.

    Equation, for every learner l of L::

        each step:              x_l <- x_l - a g_l(x_l)
        after every H-th step:  x_l <- (1/L) sum_j x_j

    with x_l the weights of learner l; a the step size of its local optimizer, whose state stays with the learner unless
    `optimizer_state` says otherwise; g_l the gradient of its mini-batch. With H = 1 and plain SGD, this is `allreduce`.

    With `compression`, learners send theta - x_l, with theta the last average. The last period ends when the budget is
    spent.

    Waits:
        Every learner waits for the slowest one at each average.

    Use when:
        Links are slow and learners are about equally fast: a learner sends 1/H of the bytes that it sends under
        `allreduce`. With many steps between two averages, learners drift apart; `diloco` tolerates more steps.

    Args:
        me: The learner that runs this coroutine.
        options: How often learners average, and how.

    References:
        McMahan et al. 2017, "Communication-Efficient Learning of Deep Networks from Decentralized Data",
        arXiv 1602.05629.
        Stich 2019, "Local SGD Converges Fast and Communicates Little", arXiv 1805.09767.

    Example:
        >>> from starling.toy import regression
        >>> starling.simulate(regression("local-sgd", every=4), learners=4).loss()
        0.01
    """
    steps = LocalSteps(me, options.every)
    outer = Outer(me, Means(me, options.compression))
    state = AgreedState(me, options.optimizer_state)
    while await steps.alone():
        me.replace(outer.step(await outer.mean()))
        await state.agree()
