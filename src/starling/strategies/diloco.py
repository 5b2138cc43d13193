"""DiLoCo: an outer Nesterov optimizer over rare averages."""

from pydantic import Field

from starling.configuration import Config
from starling.learner import Learner
from starling.strategies.base import never, periodic
from starling.strategies.parts.local_steps import LocalSteps
from starling.strategies.parts.means import Compression, Means
from starling.strategies.parts.outer import AgreedState, OptimizerState, Outer


class DiLoCoOptions(Config):
    """The options of `diloco`."""

    every: int = Field(default=100, ge=1)
    """H, the number of steps that each learner makes between two agreements; the paper uses 500."""
    rate: float = Field(default=0.7, gt=0.0)
    """eta, the rate of the outer optimizer."""
    momentum: float = Field(default=0.9, ge=0.0, lt=1.0)
    """beta, the momentum of the outer optimizer."""
    optimizer_state: OptimizerState = "local"
    """Effect of an agreement on momentum and Adam's moments: each learner keeps its own (`local`), they are averaged
    (`averaged`), or they are cleared together with the step count (`reset`)."""
    compression: Compression = "none"
    """How the difference from the last agreement is encoded for sending; errors are fed back."""


@periodic("diloco", "step alone; an outer Nesterov optimizer follows the mean", DiLoCoOptions, adopts_changes=never)
async def diloco(me: Learner, options: DiLoCoOptions) -> None:
    """Each learner steps alone, and every H steps an outer optimizer with Nesterov's momentum follows the mean.

    Equation, with theta the weights last agreed on and v the outer momentum, initially 0::

        each step:              x_l <- x_l - a g_l(x_l)
        after every H-th step:  D = theta - (1/L) sum_l x_l
                                v <- beta v + D
                                theta <- theta - eta (D + beta v)
                                x_l <- theta

    with x_l the weights of learner l of L; a the step size of its local optimizer, AdamW in the paper, whose state
    stays with each learner; g_l the gradient of its mini-batch; D, the outer gradient. With beta = 0 and eta = 1, this
    is Local SGD. With `compression`, learners send theta - x_l encoded. The last period ends when the budget is spent.

    Waits:
        Every learner waits for the slowest one at each agreement.

    Use when:
        Learners are equally fast, and the links between them are slow: a learner sends hundreds of times fewer bytes
        than under `allreduce`. On even slower links, `streaming-diloco` hides the sending. If learners differ in speed,
        they do not wait for each other under `async-diloco`.

    Args:
        me: The learner that runs this coroutine.
        options: How often learners agree, and how.

    References:
        Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv 2311.08105.

    Example:
        >>> from starling.toy import regression
        >>> starling.simulate(regression("diloco", every=4), learners=4).loss()
        0.037
    """
    steps = LocalSteps(me, options.every)
    outer = Outer(me, Means(me, options.compression), options.rate, options.momentum, nesterov=True)
    state = AgreedState(me, options.optimizer_state)
    while await steps.alone():
        me.replace(outer.step(await outer.mean()))
        await state.agree()
