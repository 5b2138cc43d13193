"""Synchronous data parallelism with deliberately stale gradients."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from pydantic import Field

from starling.configuration import Config
from starling.learner import Learner, LoopEnded
from starling.strategies.base import always, registered

if TYPE_CHECKING:
    from torch import Tensor


class DelayOptions(Config):
    """The options of `delayed`."""

    delay: int = Field(default=1, ge=0)
    """d, the staleness of each gradient: the number of steps made between reading the weights and applying the
    gradient."""


@registered(
    "delayed",
    "step with the mean gradient of some steps ago, for studies",
    DelayOptions,
    kind="all-reduce",
    has_one_model=True,
    averages_gradients=always,
    keeps_state=True,
)
async def delayed(me: Learner, options: DelayOptions) -> None:
    """All learners step together with the mean of the gradients they computed d steps ago.

    Equation, for every learner l of L::

        w_{k+1} <- w_k - a (1/L) sum_j g_j(w_{k-d})

    with w the weights, the same on all learners; a the step size of the local optimizer; g_j the gradient of learner
    j's mini-batch; d `options.delay`. With d = 0 this is `allreduce`.

    The first d iterations make no step. The last d gradients are applied one after another at the end, so that each
    gradient is applied once. A checkpoint contains the gradients that have not been applied yet.

    Waits:
        Every learner waits for the slowest one in each step.

    Use when:
        You want to study staleness apart from the other effects of asynchrony. This strategy is never faster than
        `allreduce`: for training, use `allreduce` or `delay-by-one`.

    Args:
        me: The learner that runs this coroutine.
        options: The delay d.

    References:
        Aji & Heafield 2019, "Making Asynchronous Stochastic Gradient Descent Work for Transformers", arXiv 1906.03496,
        which uses delayed updates to separate the effect of staleness from that of the batch size.

    Example:
        >>> from starling.toy import regression
        >>> starling.simulate(regression("delayed", delay=2), learners=4).loss()
        0.01
    """
    late = Late(me, options.delay)
    with suppress(LoopEnded):
        while me.claim():
            late.append(await me.mean(me.gradient(me.weights)))
            if late.num_waiting > options.delay:
                late.step()
    while late.num_waiting:
        late.step()


class Late:
    """The newest gradients, at most d, which wait for their step. They are the same on all learners.

    In a new membership, mini-batches that were claimed in the last membership and have made no step are computed again.
    As many gradients, the newest ones, are dropped, so that each mini-batch is applied once.
    """

    def __init__(self, me: Learner, delay: int) -> None:
        import torch

        self._me = me
        counts = torch.zeros(3, dtype=torch.int64)
        self._gradients = me.strategy_state("late", me.weights.new_zeros(delay + 1, len(me.weights)))
        self._read_after = me.strategy_state("read after", torch.zeros(delay + 1, dtype=torch.int64))  # how many steps
        self._counts = me.strategy_state("queue", counts)
        is_resumed = me.strategy_state("resumed", counts[:1], for_membership=True)
        if not is_resumed:
            self._counts[1] -= self._counts[2]
        self._counts[2] = 0
        is_resumed.fill_(1)

    # its three numbers: the steps made, the gradients that wait, and by how many mini-batches more than steps were
    # claimed in this membership; a gradient's place is its number among all, modulo the places

    @property
    def num_waiting(self) -> int:
        """The number of gradients that wait."""
        return int(self._counts[1])

    def append(self, gradient: Tensor) -> None:
        """Let a gradient `[P]` wait, which was computed at the present weights."""
        num_steps, num_waiting, _ = self._counts.tolist()
        place = (num_steps + num_waiting) % len(self._gradients)
        self._gradients[place].copy_(gradient)
        self._read_after[place] = num_steps
        self._counts[1:] += 1

    def step(self) -> None:
        """Make a step with the oldest gradient."""
        num_steps = int(self._counts[0])
        place = num_steps % len(self._gradients)
        staleness = num_steps - int(self._read_after[place])
        self._me.step(self._gradients[place], self._me.version - staleness)
        self._counts += self._counts.new_tensor([1, -1, -1])
