"""SlowMo: a slow momentum over averages, in units of the learning rate."""

from pydantic import Field

from starling.configuration import Config
from starling.learner import Learner
from starling.strategies.base import never, periodic
from starling.strategies.parts.local_steps import LocalSteps
from starling.strategies.parts.means import Compression, Means
from starling.strategies.parts.outer import AgreedState, OptimizerState, Outer


class SlowMoOptions(Config):
    """The options of `slowmo`."""

    every: int = Field(default=48, ge=1)
    """H, the number of steps that each learner makes between two agreements."""
    rate: float = Field(default=1.0, gt=0.0)
    """alpha, the slow learning rate."""
    momentum: float = Field(default=0.5, ge=0.0, lt=1.0)
    """beta, the slow momentum."""
    optimizer_state: OptimizerState = "local"
    """Effect of an agreement on momentum and Adam's moments: each learner keeps its own (`local`), they are averaged
    (`averaged`), or they are cleared together with the step count (`reset`)."""
    compression: Compression = "none"
    """How the difference from the last agreement is encoded for sending; errors are fed back."""


@periodic(
    "slowmo",
    "step alone; a slow momentum in units of the learning rate follows the mean",
    SlowMoOptions,
    adopts_changes=never,
)
async def slowmo(me: Learner, options: SlowMoOptions) -> None:
    """Each learner steps alone, and every H steps a slow momentum, in units of the learning rate, follows the mean.

    Equation, with theta the weights last agreed on and u the slow momentum, initially 0::

        each step:              x_l <- x_l - a g_l(x_l)
        after every H-th step:  u <- beta u + (theta - (1/L) sum_l x_l) / a
                                theta <- theta - alpha a u
                                x_l <- theta

    with x_l the weights of learner l; a the learning rate of the last step; g_l the gradient of its mini-batch.
    Dividing by a keeps the momentum's meaning while the learning rate decays.

    In the paper, SlowMo wraps any base algorithm; here, the base algorithm is local SGD.

    Waits:
        Every learner waits for the slowest one at each agreement.

    Use when:
        Links are slow, and the learning rate changes during the run. `diloco` differs in two ways: its momentum is in
        units of the weights, and it uses Nesterov's look-ahead.

    Args:
        me: The learner that runs this coroutine.
        options: How often learners agree, and how.

    References:
        Wang, Tantia, Ballas & Rabbat 2020, "SlowMo: Improving Communication-Efficient Distributed SGD with Slow
        Momentum", arXiv 1910.00643.

    Example:
        >>> from starling.toy import regression
        >>> starling.simulate(regression("slowmo", every=4), learners=4).loss()
        0.078
    """
    steps = LocalSteps(me, options.every)
    outer = Outer(me, Means(me, options.compression), options.rate, options.momentum)
    state = AgreedState(me, options.optimizer_state)
    while await steps.alone():
        me.replace(outer.step(await outer.mean(), a=me.optimizer.learning_rate()))
        await state.agree()
