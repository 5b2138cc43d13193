"""SPARTA: a random share of the weights is averaged at each step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from starling.configuration import Config
from starling.learner import Learner
from starling.strategies.base import periodic
from starling.strategies.parts.local_steps import LocalSteps

if TYPE_CHECKING:
    from torch import Tensor


class SpartaOptions(Config):
    """The options of `sparta`."""

    every: int = Field(default=1, ge=1)
    """H, the number of steps that each learner makes between two averages."""
    share: float = Field(default=0.005, gt=0.0, le=1.0)
    """Share of the weights that is averaged, chosen at random each time."""


@periodic("sparta", "step alone, and average a random share of the weights at each step", SpartaOptions)
async def sparta(me: Learner, options: SpartaOptions) -> None:
    """Each learner steps alone, and every H steps all learners average a small random share of the weights.

    Equation, for every learner l of L, with S_k the weights chosen for step k, the same on all learners::

        each step:              x_l <- x_l - a g_l(x_l)
        after every H-th step:  x_l[S_k] <- (1/L) sum_j x_j[S_k]

    with x_l the weights of learner l; a the step size of its local optimizer; g_l the gradient of its mini-batch. S_k
    has one random weight of each of n equal parts of the weights. At the end, all weights are averaged.

    EXO's code has H = 1. It draws each weight with a fixed probability, so the number of chosen weights varies.

    Waits:
        Every learner waits for the slowest one at each average.

    Use when:
        Links are slow, but learners wait little for each other: with a share of 0.005, a learner sends 1/200 of the
        bytes that it sends under `allreduce`, in the same number of messages. Under `ako`, learners send parts of their
        accumulated steps instead, and do not wait for each other.

    Args:
        me: The learner that runs this coroutine.
        options: How often learners average, and how much.

    References:
        EXO Labs 2025, "SPARTA: Sparse Parameter Averaging for Reduced-Communication Training", code of exo gym.

    Example:
        >>> from starling.toy import regression
        >>> starling.simulate(regression("sparta", share=0.2), learners=4).loss()
        0.01
    """
    steps = LocalSteps(me, options.every)
    while await steps.alone():
        if steps.num % options.every == 0:
            chosen = _chosen(me, options.share, steps.num)
            mean = await me.mean(me.weights[chosen])
            me.replace(me.snapshot() if mean.is_meta else me.snapshot().index_copy_(0, chosen, mean))
    if steps.num:
        me.replace(await me.mean(me.snapshot()))


def _chosen(me: Learner, share: float, step: int) -> Tensor:
    """The positions `[n]` of the chosen weights, one from each of n equal parts of the weights; the same on all
    learners."""
    import torch

    size = len(me.weights)
    bounds = torch.arange((n := max(1, round(share * size))) + 1) * size // n
    generator = torch.Generator().manual_seed((me.seed * 1_000_003 + step) % 2**63)
    chances = torch.rand(n, generator=generator, dtype=torch.float64)
    return (bounds[:-1] + (chances * bounds.diff()).long()).to(me.weights.device)
