"""Averaging of weights that overlaps with computation and takes effect one step late."""

from starling.learner import Learner
from starling.strategies.base import never, registered


@registered(
    "delay-by-one", "average weights during the computation, one step late", kind="all-reduce", adopts_changes=never
)
async def delay_by_one(me: Learner) -> None:
    """All learners average their weights while each computes its gradient at the weights before averaging.

    Equation, for every learner l of L::

        w_l <- (1/L) sum_j w_j  -  a g_l(w_l)

    with w_l the weights of learner l; a the step size of its local optimizer; g_l the gradient of its mini-batch. A
    learner receives the steps of the others one step late.

    The equation is our definition: the abstracts of the papers, from which we know delay-by-one, do not define it in
    full.

    Waits:
        Every learner waits for the slowest one in each step, but the average travels while gradients are computed.

    Use when:
        Learners are about equally fast, and sending the weights takes about as long as computing a gradient. Receiving
        the steps of the others one step late costs little if the learning rate is not at its limit.

    Args:
        me: The learner that runs this coroutine.

    References:
        Cui et al. 2021, "Asynchronous Decentralized Distributed Training of Acoustic Models", arXiv 2110.11199.
        Zhang et al. 2020, "Improving Efficiency in Large-Scale Decentralized Distributed Training", arXiv 2002.01119.

    Example:
        >>> from starling.toy import regression
        >>> starling.simulate(regression("delay-by-one"), learners=4).loss()
        0.01
    """
    while me.claim():
        mixing = me.mean(me.weights)
        gradient = await me.gradient(me.weights)
        me.replace(await mixing)
        me.step(gradient)
