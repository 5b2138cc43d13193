"""The steps between two agreements, and fragments of the weights that are averaged during these steps."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from starling.learner import Learner, LoopEnded

if TYPE_CHECKING:
    from torch import Tensor


class LocalSteps:
    """The steps of a learner that agrees with the others after every H-th step: x_l <- x_l - a g_l(x_l).

    All learners count the same steps from the beginning of the run. A checkpoint between two agreements includes the
    count. After a loss, all learners continue with the count of the most advanced learner. If a loss interrupted an
    agreement, the next membership first completes it.
    """

    DROPPED = ("_is_agreeing",)
    """Attribute that is dropped with a membership. It says whether the caller has agreed since this membership began.
    The state on which the caller agreed is counted."""

    def __init__(self, me: Learner, every: int) -> None:
        import torch

        self._me, self._every = me, every
        self._num = me.strategy_state("steps", torch.zeros(1, dtype=torch.int64))
        self._agreed_after = me.strategy_state("agreed after", self._num)
        self._num_together = 0
        self._is_agreeing = self._have_ended = False

    @property
    def num(self) -> int:
        """The number of steps that the learner has made alone."""
        return int(self._num) - self._num_together

    async def together(self, num_steps: int) -> None:
        """Make the first steps of the run with the mean gradient, as under `allreduce`, and then average the weights,
        which may differ if a learner was lost meanwhile."""
        import torch

        me, self._num_together = self._me, num_steps
        if num_steps == 0:
            return
        is_done = me.strategy_state("warmed up", torch.zeros(1, dtype=torch.int64))
        with suppress(LoopEnded):
            while int(self._num) < num_steps and me.claim():
                me.step(await me.mean(me.gradient(me.weights)))
                self._num.add_(1)
        self._have_ended = int(self._num) < num_steps
        if not (self._have_ended or is_done):
            me.replace(await me.mean(me.snapshot()))
            is_done.fill_(1)
            self._agreed_after.copy_(self._num)

    async def alone(self) -> bool:
        """Make the steps up to the next agreement, which are H steps, or fewer at the end of the budget. Returns False
        if no agreement is due."""
        me = self._me
        if self._is_agreeing:  # the caller has agreed
            self._agreed_after.copy_(self._num)
        self._is_agreeing = True
        if self._num > self._agreed_after and self.num % self._every == 0 and not self._have_ended:
            return True
        with suppress(LoopEnded):
            while not self._have_ended and me.claim():
                me.step(await me.gradient(me.weights))
                self._num.add_(1)
                if self.num % self._every == 0:
                    return True
        has_ended, self._have_ended = self._have_ended, True
        return not has_ended and bool(self._num > self._agreed_after)


class Travelling:
    """The fragment of the weights that is being averaged, and its weights at departure.

    Fragment n of N departs after the steps n H / N, n H / N + H, …, and arrives tau <= H / N steps later, so at most
    one fragment is under way. A learner keeps x, its weights at departure, instead of the encoded message, because a
    learner that is left alone, and encodes nothing, can also use x. In a new membership, or after a resume, the mean is
    started again from the same x. A learner that has not sent this fragment, because it has joined or continues with
    the step count of another learner, sends its present weights.
    """

    def __init__(self, me: Learner, num_fragments: int, every: int, steps_on_the_way: int) -> None:
        import torch

        self._me, self._every, self._tau = me, every, steps_on_the_way
        self.fragments = list(me.optimizer.pieces(-(-len(me.weights) // num_fragments)))
        self._x = me.strategy_state("sent", me.weights, is_common=False)
        self._sent_at = me.strategy_state("sent at", torch.zeros(1, dtype=torch.int64), is_common=False)
        self._under_way: tuple[slice, Awaitable[Tensor]] | None = None

    def x(self, fragment: slice) -> Tensor:
        """Return this learner's weights `[n]` at the time when a fragment departed."""
        return self._x[fragment]

    def depart(self, num_steps: int, mean: Callable[[slice, Tensor], Awaitable[Tensor]]) -> None:
        """Start the `mean` of the fragment that departs after `num_steps`, or that should be under way at that
        time."""
        if self._under_way is not None:
            return
        for number, fragment in enumerate(self.fragments, 1):
            first = self._every * number // len(self.fragments)
            since = (num_steps - first) % self._every
            if num_steps < first or since >= max(1, self._tau):
                continue
            if int(self._sent_at) != num_steps - since:
                self._x[fragment] = self._me.weights[fragment]
                self._sent_at.fill_(num_steps - since)
            self._under_way = fragment, mean(fragment, self._x[fragment])

    async def arrival(self, num_steps: int | None = None) -> tuple[slice, Tensor] | None:
        """Return the fragment that arrives after `num_steps`, with its mean, or None if no fragment arrives. Without
        `num_steps`, return the fragment that is under way."""
        if self._under_way is None or (num_steps is not None and num_steps - int(self._sent_at) < self._tau):
            return None
        (fragment, mean), self._under_way = self._under_way, None
        return fragment, await mean
