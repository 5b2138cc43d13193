"""Synchronous data parallelism with gradients that are late on purpose."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from pydantic import Field

from starling.configuration import Config
from starling.learner import Learner, LoopEnded

if TYPE_CHECKING:
    from torch import Tensor


class DelayOptions(Config):
    """The options of `delayed`."""

    delay: int = Field(default=1, ge=0)
    """Steps between the weights that a gradient was taken at and those that it changes: its staleness."""


async def delayed(me: Learner, options: DelayOptions) -> None:
    """All learners step together with the mean of the gradients that they computed d steps ago.

    Equation, for every learner l of L::

        w_{k+1} <- w_k - a (1/L) sum_j g_j(w_{k-d})

    with w the weights, the same on all learners; a the step of the local optimizer; g_j the gradient of learner j's
    mini-batch; d `options.delay`. The first d rounds make no step, and the gradients left at the end are applied one
    after the other: each counts once. It wins no time over `allreduce`, which it is with d = 0: it is for studies of
    staleness alone, apart from everything else that asynchrony brings.

    Source: the delayed updates by which Aji & Heafield 2019, "Making Asynchronous Stochastic Gradient Descent Work for
    Transformers", arXiv 1906.03496, tell the effect of staleness from that of the batch size.
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
