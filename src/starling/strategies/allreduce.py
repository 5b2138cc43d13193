"""Synchronous data parallelism."""

from starling.learner import Learner


async def allreduce(me: Learner) -> None:
    """All learners step together with the mean of their gradients.

    Equation, for every learner l of L::

        w <- w - a (1/L) sum_j g_j(w)

    with w the weights, the same on all learners; a the step of the local optimizer; g_j the gradient of learner j's
    mini-batch. Everybody waits for the slowest at every step. Also known as SSGD, SC-PSGD and BSP.

    On the `processes` engine the mean is torch's DistributedDataParallel, which reduces while backward runs.
    """
    while me.claim():
        me.step(await me.mean(me.gradient(me.weights)))
