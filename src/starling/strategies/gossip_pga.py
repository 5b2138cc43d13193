"""Gossip-PGA: averaging with neighbours at every step, and with all learners every few steps."""

from pydantic import Field

from starling.learner import Learner
from starling.strategies.base import gossip
from starling.strategies.parts.mixing import Gossip, Order, RoundedOptions, check_mixing, rounding


class GossipPgaOptions(RoundedOptions):
    """The options of `gossip-pga`."""

    every: int = Field(default=16, ge=1)
    """H; in every H-th step, all learners compute their exact mean, instead of averaging with neighbours."""
    order: Order = "at-once"
    """Whether learners average while they compute their gradients (`at-once`), or after the step, as in the paper
    (`adapt-first`)."""


@gossip(
    "gossip-pga",
    "average with neighbours at each step, and with all every few steps",
    GossipPgaOptions,
    check=check_mixing,
)
async def gossip_pga(me: Learner, options: GossipPgaOptions) -> None:
    """In each step, each learner averages its weights with its neighbours, and in every H-th step with all learners.

    Equation, for all learners together::

        W <- W T_k - a g(W)           (order: at-once)
        W <- (W - a g(W)) T_k         (order: adapt-first)
        T_k = 1 1^T / L               in every H-th step of a membership

    with W `[P, L]` the weights, one column for each learner; T_k in all other steps the mixing matrix of step k, given
    by `options.pattern`; H `options.every`; a the step size of the local optimizers; g `[P, L]` the gradients, each
    computed at its own column. With H = 1 and `order: at-once`, it is `delay-by-one`.

    The means over all learners are exact, whatever the compression is. The paper uses `order: adapt-first`, and H from
    6 to 48.

    Waits:
        Neighbours wait for each other in each step. In every H-th step, all learners wait for the slowest one.

    Use when:
        Learners are equally fast, but under `dpsgd` they would drift apart on a sparse graph, such as a long ring.

    Args:
        me: The learner that runs this coroutine.
        options: Which learners are neighbours, how often all average, when, and how weights are rounded for sending.

    References:
        Chen et al. 2021, "Accelerating Gossip SGD with Periodic Global Averaging", arXiv 2105.09080.

    Example:
        >>> from starling.toy import regression
        >>> starling.simulate(regression("gossip-pga", every=4), learners=4).loss()
        0.01
    """
    rounds = Gossip(me, options, rounding(me, options))
    while me.claim():
        is_with_all = (rounds.num_rounds + 1) % options.every == 0
        start = rounds.start_mean if is_with_all else rounds.start
        if options.order == "adapt-first":
            me.step(await me.gradient(me.weights))
            await start().change_weights()
        else:
            averaging = start()
            gradient = await me.gradient(me.weights)
            await averaging.change_weights()
            me.step(gradient)
