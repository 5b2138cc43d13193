"""Synchronous data parallelism."""

from starling.configuration import Config
from starling.learner import Learner
from starling.strategies.base import Strategy, always
from starling.strategies.compression import Compression, Means


class AllReduceOptions(Config):
    """The options of `allreduce`."""

    compression: Compression = "none"
    """How gradients are encoded for sending; errors are fed back."""


async def allreduce(me: Learner, options: AllReduceOptions) -> None:
    """All learners step together with the mean of their gradients.

    Equation, for every learner l of L::

        w <- w - a (1/L) sum_j g_j(w)

    with w the weights, the same on all learners; a the step size of the local optimizer; g_j the gradient of learner
    j's mini-batch. Each step waits for the slowest learner. Also known as SSGD, SC-PSGD and BSP.

    On the `processes` engine learners on one machine average in shared memory. Otherwise torch's
    DistributedDataParallel computes the mean while backward is still running. With `compression` learners encode their
    gradients, after backward, and the mean is that of what is decoded.

    Args:
        me: The learner that runs this coroutine.
        options: How gradients are encoded.

    References:
        Zhang et al. 2019, "Distributed Deep Learning Strategies for Automatic Speech Recognition", arXiv 1904.04956,
        which compares it with ADPSGD on speech.
    """
    means = Means(me, options.compression)
    while me.claim():
        me.step(await means.start(me.gradient(me.weights)))


ALLREDUCE = Strategy(
    "allreduce",
    "step together with the mean of all gradients",
    allreduce,
    options=AllReduceOptions,
    has_one_model=True,
    averages_gradients=always,
    kind="all-reduce",
)
