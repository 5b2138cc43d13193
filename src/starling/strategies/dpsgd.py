"""Synchronous decentralised SGD: averaging with neighbours at every step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from starling.errors import ConfigError
from starling.learner import Learner, divided
from starling.strategies.base import Strategy
from starling.strategies.mixing import Gossip, MixingOptions, averages_both_ways, check_mixing
from starling.strategies.staleness import is_finite
from starling.topology import find_topology, lazy

if TYPE_CHECKING:
    from torch import Tensor

_MOST_AHEAD = 4
"""How many of its newest steps a learner can take back."""


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
    g_(k-1). In a new membership Y begins again, and `_NewestSteps` corrects the first step.

    References:
        Di Lorenzo & Scutari 2016, "NEXT: In-Network Nonconvex Optimization", arXiv 1602.00591.
        Nedic et al. 2017, "Achieving Geometric Convergence for Distributed Optimization over Time-Varying Graphs",
        arXiv 1607.03218.
    """
    y = me.strategy_state("estimate", _zeros(me), for_membership=True)
    last = me.strategy_state("gradient", _zeros(me), for_membership=True)
    newest = _NewestSteps(me)
    await newest.compare()
    while me.claim():
        of_weights, of_estimate = gossip.start(), gossip.start_beside(y)
        gradient = await me.gradient(me.weights)
        mixed, of_y = await of_weights.changes(), await of_estimate.changes()
        for piece, change in mixed:
            me.apply(change, piece)
        for piece, change in of_y:
            y[piece].add_(change)
        if not is_finite(gradient):
            me.step(gradient)
            newest.add(mixed, None)
            continue
        gradient = newest.correct(gradient)
        y.sub_(last).masked_fill_(y == 0.0, -0.0).add_(gradient)  # -0.0 keeps the mark of no gradient
        last.copy_(gradient)
        me.step(y)
        newest.add(mixed, y - last)


class _NewestSteps:
    """What the newest steps of a learner contained beside its own gradients, and how a membership begins with it.

    In step k these are X_k (T_k - I) and Y_k - g_k. The columns of each sum to 0 once all learners have made the step.
    When a membership ends, some may be steps ahead of others, and mini-batches would count twice, or not at all. So
    at the beginning of the next one, learners compare how many steps each has made. What steps contained that not all
    survivors have made is then taken back: each learner, joiners too, subtracts the mean over the survivors in its
    first step. Of each learner's steps, the newest `_MOST_AHEAD` can be taken back.
    """

    def __init__(self, me: Learner) -> None:
        import torch

        self._me = me
        zeros = me.weights.new_zeros(2, _MOST_AHEAD, len(me.weights))
        self._contents = me.strategy_state("contents", zeros, is_common=False)  # of step k at place k modulo the places
        self._counts = me.strategy_state("steps", torch.full((3,), -1), is_common=False)
        self._is_compared = me.strategy_state("compared", torch.zeros(1, dtype=torch.int64), for_membership=True)

    # its three numbers: the newest step; the newest in `_contents`, where a correction that is still to be made has a
    # place like a step; and the last one before what is still to be taken back. -1: none

    async def compare(self) -> None:
        """Find out which steps of the last membership not all survivors have made, and what they contained."""
        if self._is_compared:
            return
        me, mine = self._me, self._counts.clone()
        comparing = [me.exchange(peer, mine, tag=0) for peer in range(me.world) if peer != me.rank]
        of_all = [mine.tolist(), *[(await each).tolist() for each in comparing]]
        of_survivors = [each for each in of_all if each[0] >= 0]
        first = max(step for step, *_ in of_all) + 1
        made_by_all = min([step for step, *_ in of_survivors], default=-1)
        correction = self._sum(made_by_all)
        has_correction = any(min(kept, made_by_all) < newest for _, newest, kept in of_survivors)
        if has_correction:
            share, means = me.world / len(of_survivors), [me.mean(each) for each in correction]
            for each, mean in zip(correction, means, strict=True):
                each.copy_(await mean * share)
        self._contents.zero_()
        self._contents[:, first % _MOST_AHEAD] = correction
        self._counts.copy_(self._counts.new_tensor([first, first, first - has_correction]))
        self._is_compared.fill_(1)

    def correct(self, gradient: Tensor) -> Tensor:
        """Make the correction of the weights, if there is one, and return a gradient `[P]` that is corrected."""
        _, newest, kept = self._counts.tolist()
        if kept == newest:
            return gradient
        correction = self._sum(kept)
        self._me.apply(-correction[0])
        return gradient - correction[1]

    def add(self, mixed: list[tuple[slice, Tensor]], excess: Tensor | None) -> None:
        """Count a step in which averaging changed pieces of the weights, and which contained `excess` `[P]` beside its
        gradient; None: its gradient was not finite."""
        _, newest, kept = self._counts.tolist()
        self._counts[0] += 1
        if kept < newest and excess is None:  # the correction is still to be made
            return
        if kept < newest:
            self._contents.zero_()
        step = int(self._counts[0])
        of_weights, of_gradient = self._contents[:, step % _MOST_AHEAD]
        for piece, change in mixed:
            if piece.stop <= len(of_weights):
                of_weights[piece].copy_(change)
        of_gradient.zero_() if excess is None else of_gradient.copy_(excess)
        self._counts[1:] = step

    def _sum(self, kept: int) -> Tensor:
        """What the steps after `kept` contained, and a correction that is still to be made: `[2, P]`, of the weights
        and of the gradient."""
        _, newest, correct = self._counts.tolist()
        total = self._contents.new_zeros(2, self._contents.shape[-1])
        for step in range(max(min(kept, correct), newest - _MOST_AHEAD) + 1, newest + 1):
            total += self._contents[:, step % _MOST_AHEAD]
        return total


def _zeros(me: Learner) -> Tensor:
    return me.weights.new_zeros(len(me.weights))


def _check(options: DpsgdOptions, world: int) -> None:
    topology = check_mixing(options, world)
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
        if not averages_both_ways(topology):
            raise ConfigError(
                f"strategy.correction: d2 needs the same neighbours in each step, in both directions, which pattern "
                f"{options.pattern} does not have; choose pattern ring or complete, or correction tracking"
            )


DPSGD = Strategy(
    "dpsgd", "average with neighbours at each step", dpsgd, options=DpsgdOptions, check=_check, kind="gossip"
)
