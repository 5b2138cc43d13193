"""D2, also known as exact diffusion: averaging with neighbours that corrects for unequal data."""

from starling.errors import ConfigError
from starling.learner import Learner
from starling.strategies.base import gossip
from starling.strategies.parts.mixing import Gossip, MixingOptions, averages_both_ways
from starling.topology import find_topology, lazy


class D2Options(MixingOptions):
    """The options of `d2`. Its pattern must have the same neighbours in each step, in both directions."""


def _check(options: D2Options, world: int) -> None:
    if not averages_both_ways(find_topology(options.pattern, world, seed=0)):
        raise ConfigError(
            f"strategy.pattern: d2 needs the same neighbours in each step, in both directions, which pattern "
            f"{options.pattern} does not have, or does not declare (`period`); choose pattern ring or complete, "
            "or write `name: gradient-tracking`"
        )


@gossip("d2", "average with neighbours after each step, corrected for unequal data", D2Options, check=_check)
async def d2(me: Learner, options: D2Options) -> None:
    """A learner adds to each step the change that the last averaging with its neighbours made (D2, exact diffusion).

    Equation, for all learners together, with S = (I + T) / 2 and the first step X_1 = (X_0 - a g_0) S::

        X_(k+1) = (2 X_k - X_(k-1) - a (g_k - g_(k-1))) S

    with X_k `[P, L]` the weights at step k, one column for each learner; T the mixing matrix, symmetric and the same in
    each step, given by `options.pattern`; a the step size of the local optimizers; g_k `[P, L]` the gradients, each
    computed at its own column of X_k. The code uses the form::

        X_(k+1) = (X_k - a g_k + C) S,  C = X_k - (X_(k-1) - a g_(k-1)),  initially 0

    The columns of C add up to the zero vector, and X_k - a g_k are the weights after the step of the local optimizer,
    whichever optimizer it is.

    S has no negative eigenvalue, as in exact diffusion; D2 allows T itself if its eigenvalues are above -1/3. In a new
    membership, C is 0 again.

    Waits:
        In each step, neighbours wait for each other after they have computed their gradients.

    Use when:
        Learners have different data: unlike `dpsgd`, it reaches the exact optimum with a constant learning rate.
        Neighbours must be the same in each step; `gradient-tracking` works with any pattern, but sends twice as many
        bytes.

    Args:
        me: The learner that runs this coroutine.
        options: Which learners are neighbours.

    References:
        Tang et al. 2018, "D2: Decentralized Training over Decentralized Data", arXiv 1803.07068.
        Yuan et al. 2019, "Exact Diffusion for Distributed Optimization and Learning - Part I: Algorithm Development",
        arXiv 1702.05122.

    Example:
        >>> from starling.toy import regression
        >>> starling.simulate(regression("d2"), learners=4).loss()
        0.01
    """
    rounds = Gossip(me, options, topology=lazy(find_topology(options.pattern, me.world, me.seed)))
    c = me.strategy_state("correction", me.weights.new_zeros(len(me.weights)), for_membership=True)
    while me.claim():
        me.step(await me.gradient(me.weights))
        stepped = me.weights.clone()
        me.apply(c)
        await rounds.start().change_weights()
        c.copy_(me.weights - stepped)
