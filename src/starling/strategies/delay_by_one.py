"""Averaging weights behind the computation, one step late."""

from starling.learner import Learner


async def delay_by_one(me: Learner) -> None:
    """The weights' average travels while the gradient is computed at the weights before averaging.

    Equation, for every learner l of L::

        w_l <- (1/L) sum_j w_j  -  a g_l(w_l)

    with w_l the weights of learner l; a the step of its local optimizer; g_l the gradient of its mini-batch. What the
    other learners did arrives one step late. Everybody waits for everybody, but behind the computation.

    Source: the abstracts of arXiv 2110.11199 and 2002.01119 name the delay-by-one strategy of the IBM acoustic models;
    they do not define it in full, and the equation above is the definition used here.
    """
    while me.claim():
        mixing = me.mean(me.weights)
        gradient = await me.gradient(me.weights)
        me.replace(await mixing)
        me.step(gradient)
