"""BMUF: blockwise model-update filtering, a method from speech recognition with rare averages."""

from pydantic import Field

from starling.configuration import Config
from starling.learner import Learner
from starling.strategies.base import never, periodic
from starling.strategies.parts.local_steps import LocalSteps
from starling.strategies.parts.means import Compression, Means
from starling.strategies.parts.outer import AgreedState, OptimizerState, Outer


class BmufOptions(Config):
    """The options of `bmuf`."""

    every: int = Field(default=50, ge=1)
    """H, the number of steps that each learner makes in a block."""
    warm_up: int = Field(default=500, ge=0)
    """Number of first steps that all learners make together, as under `allreduce`."""
    rate: float = Field(default=1.0, gt=0.0)
    """zeta, the block learning rate."""
    momentum: float | None = Field(default=None, ge=0.0, lt=1.0)
    """eta, the block momentum; null: 1 - 1/L."""
    nesterov: bool = True
    """Whether the block momentum is Nesterov's; otherwise, it is classical momentum."""
    optimizer_state: OptimizerState = "local"
    """Effect of an agreement on momentum and Adam's moments: each learner keeps its own (`local`), they are averaged
    (`averaged`), or they are cleared together with the step count (`reset`)."""
    compression: Compression = "none"
    """How the difference from the last agreement is encoded for sending; errors are fed back."""


@periodic(
    "bmuf", "step alone, and filter the mean of every block of steps with momentum", BmufOptions, adopts_changes=never
)
async def bmuf(me: Learner, options: BmufOptions) -> None:
    """Each learner steps alone through a block of H steps, and momentum filters the average change of the blocks.

    Equation, with W the filtered model and M its momentum, initially 0::

        each step:         x_l <- x_l - a g_l(x_l)
        after each block:  G = (1/L) sum_l x_l - W_g
                           M <- eta M + zeta G
                           W <- W + M
                           W_g = W                (classical momentum)
                           W_g = W + eta M        (Nesterov's)
                           x_l <- W_g

    with x_l the weights of learner l; a the step size of its local optimizer; g_l the gradient of its mini-batch; W_g
    the model with which a block begins.

    The code keeps only W_g, as theta: theta <- theta + M, or theta <- theta + zeta G + eta M with Nesterov's momentum.
    Checkpoints and the final model contain W_g, which the paper's equations broadcast, and not W.

    Waits:
        Every learner waits for the slowest one in each step of the warm-up, and later at the end of each block.

    Use when:
        An acoustic model is trained on 4 to 64 learners with slow links: the paper reports near-linear speed-ups.

    Args:
        me: The learner that runs this coroutine.
        options: The length of blocks, and how their changes are filtered.

    References:
        Chen & Huo 2016, "Scalable Training of Deep Learning Machines by Incremental Block Training with Intra-Block
        Parallel Optimization and Blockwise Model-Update Filtering", ICASSP.

    Example:
        >>> from starling.toy import regression
        >>> starling.simulate(regression("bmuf", every=4, warm_up=4), learners=4).loss()
        0.013
    """
    steps = LocalSteps(me, options.every)
    state = AgreedState(me, options.optimizer_state)
    await steps.together(options.warm_up)
    momentum = 1.0 - 1.0 / me.world if options.momentum is None else options.momentum
    outer = Outer(me, Means(me, options.compression), options.rate, momentum, options.nesterov)
    while await steps.alone():
        me.replace(outer.step(await outer.mean()))
        await state.agree()
