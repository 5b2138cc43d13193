"""Post-local SGD: learners first step together, then alone with an average every few steps."""

from typing import ClassVar

from pydantic import Field

from starling.learner import Learner
from starling.strategies.base import periodic
from starling.strategies.local_sgd import LocalSgdOptions
from starling.strategies.parts.local_steps import LocalSteps
from starling.strategies.parts.means import Means
from starling.strategies.parts.outer import AgreedState, Outer


class PostLocalSgdOptions(LocalSgdOptions):
    """The options of `post-local-sgd`."""

    MOVED: ClassVar = {name: text for name, text in LocalSgdOptions.MOVED.items() if name != "warm_up"}
    warm_up: int = Field(default=500, ge=0)
    """K, the number of first steps that all learners make together."""


@periodic(
    "post-local-sgd",
    "step together at first, then alone with an average every few steps",
    PostLocalSgdOptions,
    adopts_changes=lambda options: options.compression == "none",
)
async def post_local_sgd(me: Learner, options: PostLocalSgdOptions) -> None:
    """All learners step together at first, and later alone, with an average of their weights every H steps.

    Equation, for every learner l of L::

        the first K steps:      x <- x - a (1/L) sum_j g_j(x)
        each later step:        x_l <- x_l - a g_l(x_l)
        after every H-th:       x_l <- (1/L) sum_j x_j

    with x_l the weights of learner l, which are the same on all learners during the first K steps; a the step size of
    the local optimizer; g_l the gradient of its mini-batch. Weights change most at first, when learners would drift
    apart most.

    In the paper, the first K steps end at the first decay of the learning rate. The gradients of these steps are never
    compressed.

    Waits:
        Every learner waits for the slowest one in each of the first K steps, and later at each average.

    Use when:
        `local-sgd` reaches a worse model than `allreduce`, and you can afford the communication of the first K steps.

    Args:
        me: The learner that runs this coroutine.
        options: When learners step alone, how often they average, and how.

    References:
        Lin, Stich, Patel & Jaggi 2020, "Don't Use Large Mini-Batches, Use Local SGD", arXiv 1808.07217.

    Example:
        >>> from starling.toy import regression
        >>> starling.simulate(regression("post-local-sgd", warm_up=8, every=4), learners=4).loss()
        0.01
    """
    steps = LocalSteps(me, options.every)
    state = AgreedState(me, options.optimizer_state)
    await steps.together(options.warm_up)
    outer = Outer(me, Means(me, options.compression))
    while await steps.alone():
        me.replace(outer.step(await outer.mean()))
        await state.agree()
