"""Gradient tracking: learners average with neighbours, and step with an estimate of the mean gradient of all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starling.learner import Learner
from starling.strategies.base import gossip
from starling.strategies.parts.mixing import Gossip, MixingOptions, check_mixing
from starling.strategies.parts.staleness import is_finite

if TYPE_CHECKING:
    from torch import Tensor

_MOST_AHEAD = 4
"""Number of its newest steps that a learner can undo."""


class GradientTrackingOptions(MixingOptions):
    """The options of `gradient-tracking`."""


@gossip(
    "gradient-tracking",
    "average with neighbours at each step, and step with an estimate of the mean gradient",
    GradientTrackingOptions,
    check=check_mixing,
)
async def gradient_tracking(me: Learner, options: GradientTrackingOptions) -> None:
    """Each learner steps with an estimate of the mean gradient, which neighbours average together with their weights.

    Equation, for all learners together, with g_(-1) = Y_(-1) = 0::

        Y_k = Y_(k-1) T_k + g_k - g_(k-1)
        X_(k+1) = X_k T_k - a Y_k

    with X_k `[P, L]` the weights at step k, one column for each learner; Y_k `[P, L]` the estimates; T_k the mixing
    matrix, given by `options.pattern`; a the step size of the local optimizers; g_k `[P, L]` the gradients, each
    computed at its own column of X_k. The columns of Y_k and of g_k have the same sum.

    Learners send both vectors in one round of messages, so T_k mixes Y_(k-1); in DIGing, T_(k-1) does. A gradient that
    is not finite makes no step, and g_k is then g_(k-1). In a new membership, Y begins again, and `_NewestSteps`
    corrects the first step.

    Waits:
        Neighbours wait for each other in each step. They average while they compute their gradients.

    Use when:
        Learners have different data. The strategy works with any pattern, and reaches the exact optimum with a constant
        learning rate. Learners send twice as many bytes as under `dpsgd`, and need a smaller learning rate than under
        `d2`.

    Args:
        me: The learner that runs this coroutine.
        options: Which learners are neighbours.

    References:
        Di Lorenzo & Scutari 2016, "NEXT: In-Network Nonconvex Optimization", arXiv 1602.00591.
        Nedic et al. 2017, "Achieving Geometric Convergence for Distributed Optimization over Time-Varying Graphs",
        arXiv 1607.03218 (DIGing).

    Example:
        >>> from starling.toy import regression
        >>> starling.simulate(regression("gradient-tracking", pattern="exponential"), learners=4).loss()
        0.01
    """
    rounds = Gossip(me, options)
    y = me.strategy_state("estimate", me.weights.new_zeros(len(me.weights)), for_membership=True)
    last = me.strategy_state("gradient", me.weights.new_zeros(len(me.weights)), for_membership=True)
    newest = _NewestSteps(me)
    await newest.compare()
    while me.claim():
        of_weights, of_estimate = rounds.start(), rounds.start_beside(y)
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
    """The content of a learner's newest steps besides its own gradients, and the correction with which a membership
    begins.

    In step k, this content is X_k (T_k - I) and Y_k - g_k. The columns of each of these matrices sum to 0 once all
    learners have made the step. When a membership ends, some learners may be steps ahead of others, and mini-batches
    would count twice, or not at all. So at the beginning of the next membership, learners compare how many steps each
    of them has made. The content of steps that not all survivors have made is then undone: in its first step, each
    learner, including joiners, subtracts the mean of this content over the survivors. The newest `_MOST_AHEAD` steps of
    each learner can be undone.
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
        """Find the steps of the last membership that not all survivors have made, and their content."""
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
        """Correct the weights, if a correction is due, and return the corrected gradient `[P]`."""
        _, newest, kept = self._counts.tolist()
        if kept == newest:
            return gradient
        correction = self._sum(kept)
        self._me.apply(-correction[0])
        return gradient - correction[1]

    def add(self, mixed: list[tuple[slice, Tensor]], excess: Tensor | None) -> None:
        """Count a step in which averaging changed pieces of the weights, and which contained `excess` `[P]` besides its
        gradient. `excess` is None if the gradient was not finite."""
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
        """The content of the steps after `kept`, and any correction that is still to be made: `[2, P]`, of the weights
        and of the gradient."""
        _, newest, correct = self._counts.tolist()
        total = self._contents.new_zeros(2, self._contents.shape[-1])
        for step in range(max(min(kept, correct), newest - _MOST_AHEAD) + 1, newest + 1):
            total += self._contents[:, step % _MOST_AHEAD]
        return total
