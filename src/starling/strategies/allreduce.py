"""Synchronous data parallelism."""

from starling.configuration import Config
from starling.learner import Learner
from starling.strategies.base import Strategy, always, registered
from starling.strategies.parts.means import Compression, Means, is_compressed


class AllReduceOptions(Config):
    """The options of `allreduce`."""

    compression: Compression = "none"
    """How gradients are encoded for sending; errors are fed back."""


class CompressingStrategy(Strategy):
    """A strategy that tells engines whether its gradients are sent encoded."""

    def compresses_gradients(self, options: Config) -> bool:
        return is_compressed(options)


@registered(
    "allreduce",
    "step together with the mean of all gradients",
    AllReduceOptions,
    kind="all-reduce",
    has_one_model=True,
    averages_gradients=always,
    of=CompressingStrategy,
)
async def allreduce(me: Learner, options: AllReduceOptions) -> None:
    """All learners step together with the mean of their gradients.

    Equation, for every learner l of L::

        w <- w - a (1/L) sum_j g_j(w)

    with w the weights, the same on all learners; a the step size of the local optimizer; g_j the gradient of learner
    j's mini-batch. Also known as SSGD, SC-PSGD and BSP.

    On the `processes` engine, learners on one machine average in shared memory. Otherwise, torch's
    DistributedDataParallel computes the mean while the backward pass is still running. With `compression`, learners
    encode their gradients after the backward pass, and average the decoded gradients.

    Waits:
        Every learner waits for the slowest one in each step.

    Use when:
        Learners are about equally fast, and sending a gradient takes less time than computing it. The strategy is the
        baseline of every comparison, because its result does not depend on timing.

    Args:
        me: The learner that runs this coroutine.
        options: How gradients are encoded.

    References:
        Zhang et al. 2019, "Distributed Deep Learning Strategies for Automatic Speech Recognition", arXiv 1904.04956,
        which compares it with ADPSGD on speech.

    Example:
        >>> from starling.toy import regression
        >>> starling.simulate(regression("allreduce"), learners=4).loss()
        0.01
    """
    means = Means(me, options.compression)
    while me.claim():
        me.step(await means.start(me.gradient(me.weights)))
