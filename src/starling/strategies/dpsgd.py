"""Synchronous decentralised SGD: averaging with neighbours at every step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from starling.errors import ConfigError
from starling.learner import Learner
from starling.strategies.base import Strategy
from starling.strategies.mixing import Gossip, MixingOptions, averages_both_ways, check_mixing
from starling.strategies.rates import divided
from starling.topology import find_topology, lazy

if TYPE_CHECKING:
    from torch import Tensor


class DpsgdOptions(MixingOptions):
    """The options of `dpsgd`."""

    mean_every: int | None = Field(default=None, ge=1)
    """H: in every H-th step all learners average exactly, in place of neighbours (Gossip-PGA); null: never."""
    order: Literal["at-once", "adapt-first"] = "at-once"
    """Whether neighbours average during the gradient, or after the step with it."""
    momentum: Literal["local", "quasi-global"] = "local"
    """Which momentum a step has: that of the local optimizer alone, or also one of what the averaged model did."""
    beta: float = Field(default=0.9, ge=0.0, lt=1.0)
    """The share of the quasi-global momentum in a step."""
    mu: float = Field(default=0.1, gt=0.0, le=1.0)
    """The share of the newest change in the quasi-global momentum."""
    correction: Literal["none", "d2", "tracking"] = "none"
    """What corrects learners whose data differ: nothing, D2, or gradient tracking, which sends twice the bytes."""


async def dpsgd(me: Learner, options: DpsgdOptions) -> None:
    """Each learner averages its weights with its neighbours' in each step.

    Equation, for all learners together::

        W <- W T_k - a g(W)           (order: at-once)
        W <- (W - a g(W)) T_k         (order: adapt-first)

    with W `[P, L]` the weights, one column for each learner; T_k the mixing matrix of step k, given by
    `options.pattern`; a the step size of the local optimizers; g `[P, L]` the gradients, each taken at its own column.
    Neighbours wait for each other at every step; at once, they average during the gradient. With `mean_every` H, T_k is
    the mean of all in every H-th step of a membership, and all wait for all (Gossip-PGA).

    Args:
        me: The learner that runs this coroutine.
        options: Which learners are neighbours, how weights are encoded, and what else enters a step.

    References:
        Lian et al. 2017, "Can Decentralized Algorithms Outperform Centralized Algorithms?", arXiv 1705.09056.
        Chen et al. 2021, "Accelerating Gossip SGD with Periodic Global Averaging", arXiv 2105.09080 (`mean_every`).
    """
    topology = find_topology(options.pattern, me.world, me.seed)
    gossip = Gossip(me, options, lazy(topology) if options.correction == "d2" else topology, options.mean_every)
    if options.momentum == "quasi-global":
        await _quasi_global(me, options, gossip)
    elif options.correction == "d2":
        await _d2(me, gossip)
    elif options.correction == "tracking":
        await _tracking(me, gossip)
    elif options.order == "adapt-first":
        while me.claim():
            me.step(await me.gradient(me.weights))
            await gossip.start().change_weights()
    else:
        while me.claim():
            round_k = gossip.start()
            gradient = await me.gradient(me.weights)
            await round_k.change_weights()
            me.step(gradient)


async def _quasi_global(me: Learner, options: DpsgdOptions, gossip: Gossip) -> None:
    """QG-DSGDm: the momentum follows what step and averaging together did to the weights.

    Equation::

        X' = (X - a (beta M + g(X))) T_k
        M <- (1 - mu) M + mu (X - X') / a

    with M `[P, L]` the momenta, initially 0, and a the learning rate. On Starling's own engines a is in units of its
    peak, and M in units of 1 / peak: a M is the same. Clipping limits g alone. A gradient that is not finite counts
    as 0.

    References:
        Lin et al. 2021, "Quasi-Global Momentum: Accelerating Decentralized Deep Learning on Heterogeneous Data",
        arXiv 2102.04761.
    """
    m = me.strategy_state("momentum", _zeros(me), is_common=False)
    while me.claim():
        gradient = await me.gradient(me.weights)
        x, a = me.weights.clone(), me.learning_rate()
        me.step(gradient)
        me.apply(-a * options.beta * m)
        await gossip.start().change_weights()
        m.lerp_(divided(x - me.weights, a, at_rest=m), options.mu)


async def _d2(me: Learner, gossip: Gossip) -> None:
    """D2, also known as exact diffusion: what the last averaging changed is added to the next step.

    Equation, with S = (I + T) / 2 for a fixed symmetric T, and the first step X_1 = (X_0 - a g_0) S::

        X_(k+1) = (2 X_k - X_(k-1) - a (g_k - g_(k-1))) S

    written as X_(k+1) = (X_k - a g_k + C) S with C = X_k - (X_(k-1) - a g_(k-1)), initially 0. The columns of C sum to
    0, and X_k - a g_k is the step of the local optimizer, whatever it is.

    References:
        Tang et al. 2018, "D2: Decentralized Training over Decentralized Data", arXiv 1803.07068.
        Yuan et al. 2019, "Exact Diffusion for Distributed Optimization and Learning", arXiv 1702.05122.
    """
    c = me.strategy_state("correction", _zeros(me), for_membership=True)
    while me.claim():
        me.step(await me.gradient(me.weights))
        stepped = me.weights.clone()
        me.apply(c)
        await gossip.start().change_weights()
        c.copy_(me.weights - stepped)


async def _tracking(me: Learner, gossip: Gossip) -> None:
    """Gradient tracking: each learner steps with an estimate of the mean gradient of all.

    Equation, with Y `[P, L]` the estimates and g_(-1) = Y_(-1) = 0::

        Y_k = Y_(k-1) T_k + g_k - g_(k-1)
        X_(k+1) = X_k T_k - a Y_k

    The columns of Y_k and of g_k have the same sum. A gradient that is not finite makes no step, and g_k is then
    g_(k-1).

    References:
        Di Lorenzo & Scutari 2016, "NEXT: In-Network Nonconvex Optimization", arXiv 1602.00591.
        Nedic et al. 2017, "Achieving Geometric Convergence for Distributed Optimization over Time-Varying Graphs",
        arXiv 1607.03218.
    """
    y = me.strategy_state("estimate", _zeros(me), for_membership=True)
    last = me.strategy_state("gradient", _zeros(me), for_membership=True)
    while me.claim():
        of_weights, of_estimate = gossip.start(), gossip.start_beside(y)
        gradient = await me.gradient(me.weights)
        await of_weights.change_weights()
        await of_estimate.change(y)
        if not _is_finite(gradient):
            me.step(gradient)
            continue
        y.sub_(last).masked_fill_(y == 0.0, -0.0).add_(gradient)  # -0.0 keeps the mark of no gradient
        last.copy_(gradient)
        me.step(y)


def _zeros(me: Learner) -> Tensor:
    return me.weights.new_zeros(len(me.weights))


def _is_finite(gradient: Tensor) -> bool:
    return gradient.device.type == "meta" or bool(gradient.isfinite().all())


def _check(options: DpsgdOptions, world: int) -> None:
    check_mixing(options, world)
    if options.correction == "none":
        return
    if options.momentum == "quasi-global":
        raise ConfigError("strategy.momentum: quasi-global has its own equation; leave out either it or correction")
    if options.compression != "none":
        raise ConfigError(
            f"strategy.compression: correction {options.correction} needs exact averages; leave out either of them"
        )
    if options.correction == "tracking" and options.order == "adapt-first":
        raise ConfigError("strategy.order: tracking steps while neighbours average; leave out order")
    if options.correction == "d2":
        if options.mean_every is not None:
            raise ConfigError("strategy.mean_every: d2 needs the same neighbours in each step; leave it out")
        if not averages_both_ways(find_topology(options.pattern, world, seed=0)):
            raise ConfigError(
                f"strategy.correction: d2 needs the same neighbours in each step, in both directions, which pattern "
                f"{options.pattern} does not have; choose pattern ring or complete, or correction tracking"
            )


DPSGD = Strategy(
    "dpsgd", "average with neighbours at each step", dpsgd, options=DpsgdOptions, check=_check, kind="gossip"
)
