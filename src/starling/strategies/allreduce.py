"""Synchronous data parallelism."""

from starling.learner import Learner
from starling.strategies.base import Strategy


async def allreduce(me: Learner) -> None:
    """All learners step together with the mean of their gradients.

    Equation, for every learner l of L::

        w <- w - a (1/L) sum_j g_j(w)

    with w the weights, the same on all learners; a the step size of the local optimizer; g_j the gradient of learner
    j's mini-batch. Each step waits for the slowest learner. Also known as SSGD, SC-PSGD and BSP.

    On the `processes` engine learners on one machine average in shared memory. Otherwise torch's
    DistributedDataParallel computes the mean while backward is still running.

    Args:
        me: The learner that runs this coroutine.

    References:
        Zhang et al. 2019, "Distributed Deep Learning Strategies for Automatic Speech Recognition", arXiv 1904.04956,
        which compares it with ADPSGD on speech.
    """
    while me.claim():
        me.step(await me.mean(me.gradient(me.weights)))


ALLREDUCE = Strategy(
    "allreduce",
    "step together with the mean of all gradients",
    allreduce,
    has_one_model=True,
    averages_gradients=lambda options: True,
)
