"""Synchronous decentralised SGD: averaging with neighbours at every step."""

from pydantic import Field

from starling.learner import Learner
from starling.strategies.base import Strategy
from starling.strategies.mixing import Encoder, MeanOfAll, Mixing, MixingOptions, check_mixing
from starling.topology import find_topology


class DpsgdOptions(MixingOptions):
    """The options of `dpsgd`."""

    mean_every: int | None = Field(default=None, ge=1)
    """H: in every H-th step all learners average exactly, in place of neighbours (Gossip-PGA); null: never."""


async def dpsgd(me: Learner, options: DpsgdOptions) -> None:
    """Each learner averages its weights with its neighbours' while it computes the gradient at its own weights.

    Equation, for all learners together::

        W <- W T_k - a g(W)

    with W `[P, L]` the weights, one column for each learner; T_k the mixing matrix of step k, given by
    `options.pattern`; a the step size of the local optimizers; g `[P, L]` the gradients, each taken at its own column.
    Neighbours wait for each other at every step. With `mean_every` H, T_k is the mean of all in every H-th step of a
    membership, and all wait for all (Gossip-PGA).

    Args:
        me: The learner that runs this coroutine.
        options: Which learners are neighbours, and how weights are encoded.

    References:
        Lian et al. 2017, "Can Decentralized Algorithms Outperform Centralized Algorithms?", arXiv 1705.09056.
        Chen et al. 2021, "Accelerating Gossip SGD with Periodic Global Averaging", arXiv 2105.09080 (`mean_every`).
    """
    topology, pieces = find_topology(options.pattern, me.world, me.seed), options.pieces(me)
    compression, k = Encoder(options, me.weights, pieces), 0
    while me.claim():
        is_mean = options.mean_every is not None and (k + 1) % options.mean_every == 0
        mixing = [MeanOfAll(me, piece) if is_mean else Mixing(me, topology, k, piece, compression) for piece in pieces]
        gradient = await me.gradient(me.weights)
        for piece, under_way in zip(pieces, mixing, strict=True):
            me.apply(await under_way.delta(), piece)
        me.step(gradient)
        k += 1


DPSGD = Strategy(
    "dpsgd", "average with neighbours at each step", dpsgd, options=DpsgdOptions, check=check_mixing, kind="gossip"
)
