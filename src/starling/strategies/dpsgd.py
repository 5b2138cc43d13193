"""Synchronous decentralised SGD: averaging with neighbours at every step."""

from starling.learner import Learner
from starling.strategies.mixing import Mixing, MixingOptions, Wire
from starling.topology import find_topology


async def dpsgd(me: Learner, options: MixingOptions) -> None:
    """Each step averages with the neighbours' weights and takes the gradient at one's own, both at once.

    Equation, for all learners together::

        W <- W T_k - a g(W)

    with W `[P, L]` the weights, one column a learner; T_k the mixing matrix of step k by `options.pattern`; a the step
    of the local optimizers; g the gradients, each at its own column. Neighbours wait for each other at every step.

    Source: Lian et al. 2017, "Can Decentralized Algorithms Outperform Centralized Algorithms?", arXiv 1705.09056.
    """
    topology, pieces = find_topology(options.pattern, me.world, me.seed), options.pieces(me)
    wire, k = Wire(options, me.weights, pieces), 0
    while me.claim():
        mixing = [Mixing(me, topology, k, piece, wire) for piece in pieces]
        gradient = await me.gradient(me.weights)
        for piece, under_way in zip(pieces, mixing, strict=True):
            me.apply(await under_way.delta(), piece)
        me.step(gradient)
        k += 1
