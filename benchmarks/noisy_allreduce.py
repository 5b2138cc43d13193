"""`allreduce` with noise on the weights, as large as the distances between learners that average locally.

Under `adpsgd`, each learner computes its gradient at weights of its own, near the mean of all. Zhang et al. 2021
("Loss Landscape Dependent Self-Adjusting Learning Rates in Decentralized Stochastic Gradient Descent", arXiv
2112.01433) hold that this noise permits large batches. The strategy of this file has the noise, but no local
averaging: learners step together, and compute gradients at weights with noise.

A recipe names it as `benchmarks.noisy_allreduce:NOISY_ALLREDUCE`.
"""

import math

import torch
from pydantic import Field

from starling import Config, Learner, Strategy
from starling.strategies.base import always


class NoisyOptions(Config):
    """The options of `noisy-allreduce`."""

    distance: float = Field(default=0.75, ge=0.0)
    """c, the mean squared length of the noise, in units of a² times the squared distance of a learner's gradient from
    the mean gradient. The default is what `adpsgd` has with 16 learners in a ring of random order
    (docs/results/topology.md)."""


async def noisy_allreduce(me: Learner, options: NoisyOptions) -> None:
    """All learners step together; each computes its gradient at weights with noise of its own.

    Equation, for every learner l of L, with z_l a direction drawn uniformly in each step::

        g_l <- g_l(w + e_l),    e_l = a sqrt(c) |d_l| z_l
        d_l <- g_l - (1/L) sum_j g_j
        w   <- w - a (1/L) sum_j g_j

    so that the mean of |e_l|² is c a² times the variance of a gradient.
    """
    random = torch.Generator().manual_seed(me.seed * 1_000_003 + me.rank)
    length = 0.0
    while me.claim():
        direction = torch.randn(len(me.weights), generator=random, dtype=me.weights.dtype)
        noise = direction.mul_(length / float(direction.norm()))
        gradient = await me.gradient(me.weights + noise)
        mean = await me.mean(gradient)
        rate = float(torch.as_tensor(me.optimizer.learning_rate()).max())
        length = rate * math.sqrt(options.distance) * float((gradient - mean).norm())
        me.step(mean)


NOISY_ALLREDUCE = Strategy(
    "noisy-allreduce",
    "step together, with gradients at noisy weights",
    noisy_allreduce,
    options=NoisyOptions,
    averages_gradients=always,
)
