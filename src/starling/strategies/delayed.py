"""Synchronous data parallelism with deliberately stale gradients."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from pydantic import Field

from starling.configuration import Config
from starling.learner import Learner, LoopEnded
from starling.strategies.base import Strategy

if TYPE_CHECKING:
    from torch import Tensor


class DelayOptions(Config):
    """The options of `delayed`."""

    delay: int = Field(default=1, ge=0)
    """d, the staleness of each gradient: the steps made between reading the weights and applying the gradient."""


async def delayed(me: Learner, options: DelayOptions) -> None:
    """All learners step together with the mean of the gradients they computed d steps ago.

    Equation, for every learner l of L::

        w_{k+1} <- w_k - a (1/L) sum_j g_j(w_{k-d})

    with w the weights, the same on all learners; a the step size of the local optimizer; g_j the gradient of learner
    j's mini-batch; d `options.delay`. With d = 0 this is `allreduce`. It is never faster than `allreduce`: its purpose
    is to study staleness apart from the other effects of asynchrony.

    The first d iterations make no step. The last d gradients are applied one after another at the end, so that each
    gradient is applied once.

    Args:
        me: The learner that runs this coroutine.
        options: The delay d.

    References:
        Aji & Heafield 2019, "Making Asynchronous Stochastic Gradient Descent Work for Transformers", arXiv 1906.03496,
        which uses delayed updates to separate the effect of staleness from that of the batch size.
    """
    late: deque[tuple[Tensor, int]] = deque()
    with suppress(LoopEnded):
        while me.claim():
            read_at = me.version
            late.append(((await me.mean(me.gradient(me.weights))).clone(), read_at))
            if len(late) > options.delay:
                me.step(*late.popleft())
    for gradient, read_at in late:
        me.step(gradient, read_at)


DELAYED = Strategy(
    "delayed",
    "step with the mean gradient of some steps ago, for studies",
    delayed,
    options=DelayOptions,
    has_one_model=True,
    averages_gradients=lambda options: True,
    kind="all-reduce",
)
