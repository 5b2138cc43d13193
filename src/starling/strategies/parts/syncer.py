"""The syncer of `decoupled-diloco`, which merges the changes that learners push, fragment by fragment; and a learner's
connection to it.

A learner reports a push, which follows, or asks for a fragment. The syncer answers when it has merged the fragment
since the learner received it last. If that merge lacks the learner's own push, and the pushes of as many learners wait
again, it merges them first. At the end, a learner reports that it leaves, and asks for all fragments::

    learner                                       syncer
    report, difference                       ->
    report                                   ->
                                             <-   loan and number of merges of each fragment, theta
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from starling.learner import Handle, Learner
from starling.strategies.parts.delayed_nesterov import DelayedNesterov, Loans

if TYPE_CHECKING:
    from torch import Tensor

    from starling.strategies.parts.encodings import Encoding

REPORT, DIFFERENCE, ANSWER, THETA = range(4)
"""Tags of the four kinds of messages."""
LEAVES = -1
"""Takes the place of a fragment's number in the report of a learner that leaves."""
UNKNOWN = -1
"""Takes the place of a number of merges if the learner wants the fragment at once."""


@dataclass(frozen=True)
class Report:
    """A learner's message to the syncer."""

    fragment: int = LEAVES
    """Number of the fragment that is pushed or asked for, or `LEAVES`."""
    loan: int = 0
    """Number of the copy of the fragment that the learner has."""
    num_steps: int = 0
    """Number of steps in the difference that follows; 0 if the learner asks for the fragment."""
    num_merges: int = UNKNOWN
    """Number of merges of the fragment that the learner knows of."""
    step_metadata: Any = None
    """Metadata `[k]` of the learner's newest mini-batch."""

    def encode(self) -> Tensor:
        """Return the report as a float64 tensor `[4 + k]`."""
        own = [self.fragment, self.loan, self.num_steps, self.num_merges]
        return torch.cat([torch.tensor(own, dtype=torch.float64), self.step_metadata])

    @classmethod
    def decode(cls, message: Tensor) -> Report:
        """Return the report that `encode` has encoded."""
        fragment, loan, num_steps, num_merges = map(int, message[:4].tolist())
        return cls(fragment, loan, num_steps, num_merges, message[4:])


class Merged(DelayedNesterov):
    """Nesterov's momentum for merges of pushes.

    Equation, for the pushes D_l of n_l steps since the last merge::

        B <- B + n_l D_l,  n <- n + n_l          at each push
        v <- beta v + B / n
        theta <- theta - eta (B / n + beta v)    at each merge
        B <- 0,  n <- 0

    v, B and n are initially 0.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.num_steps = 0
        """Number of steps in the next push."""
        for group in self.param_groups:
            group["weight"] = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Add a push."""
        super().step()
        for group in self.param_groups:
            group["weight"] += self.num_steps

    def step_as(self, other: Any) -> None:
        self.num_steps = other.num_steps
        super().step_as(other)

    @torch.no_grad()
    def merge(self) -> None:
        """Merge the pushes since the last merge, if there are any."""
        for group in self.param_groups:
            weight, group["weight"] = group["weight"], 0
            for theta in group["params"] if weight else ():
                state = self.state[theta]
                change = state["sum"] / weight
                momentum = state["momentum"].mul_(self._momentum).add_(change)
                theta.sub_(change.add_(momentum, alpha=self._momentum), alpha=self._rate)
                state["sum"].zero_()

    def _push(self, theta: nn.Parameter, difference: Tensor, is_nth: bool) -> None:
        state = self.state[theta]
        if not state:
            state["momentum"], state["sum"] = torch.zeros_like(theta), torch.zeros_like(theta)
        state["sum"].add_(difference, alpha=self.num_steps)


def encoded(difference: Tensor, encoding: Encoding | None) -> Tensor:
    """Return what is sent of a difference `[n]`: itself, or its encoding, which has no values in a simulation of time
    alone."""
    if encoding is None:
        return difference
    if difference.is_meta:
        return difference.new_empty(encoding.num_bytes(len(difference)), dtype=torch.uint8)
    return encoding.encode(difference)


def _merge(optimizer: Any) -> None:
    if isinstance(optimizer, Merged):  # in a simulation of time alone it is another one
        optimizer.merge()


class Syncer:
    """Keeps all fragments, and handles one message at a time. Merges count from 0 in each membership.

    A fragment is merged when `quorum` learners have pushed it since its last merge, and one of them asks for it.
    """

    DROPPED = ("_merges", "_waiting", "_num_merged", "_pushing", "_asking", "_to_receive")

    def __init__(
        self,
        me: Learner,
        fragments: Sequence[slice],
        encoding: Encoding | None,
        quorum: int,
        rate: float,
        momentum: float,
    ) -> None:
        self._me, self._fragments, self._encoding, self._quorum = me, fragments, encoding, quorum
        self._loans = [Loans(rate, momentum, 1, 0.0, Merged) for _ in fragments]
        kept = zip(fragments, self._loans, strict=True)
        self._shards = [me.shards.keep(fragment, loans.optimizer) for fragment, loans in kept]
        self._merges = [0] * len(fragments)
        self._waiting: list[set[int]] = [set() for _ in fragments]  # learners that have pushed since the last merge
        self._num_merged = [0] * len(fragments)  # the number of such learners at the last merge
        self._pushing: dict[int, Report] = {}  # by learner; the difference is on its way
        self._asking: dict[int, Report] = {}  # by learner
        self._to_receive: dict[int, int] = {}  # by learner that has left: the fragments that it has not asked for

    async def serve(self) -> None:
        """Serve until all learners have left and received the final weights."""
        me = self._me
        like = Report(step_metadata=me.optimizer.step_metadata).encode()
        expected = {learner: me.receive(learner, like, REPORT) for learner in range(me.world)}
        replies: dict[int, list[Handle[None]]] = {learner: [] for learner in expected}
        while expected:
            learner = await me.shards.first(expected)
            message = await expected.pop(learner)
            if (pushed := self._pushing.pop(learner, None)) is not None:
                await self._add(learner, pushed, message)
            else:
                await self._read(learner, Report.decode(message))
            if learner in self._pushing:
                expected[learner] = me.receive(learner, self._like(self._pushing[learner]), DIFFERENCE)
            elif self._to_receive.get(learner, 1):
                expected[learner] = me.receive(learner, like, REPORT)
            for asking in list(self._asking):
                if await self._is_new_to(asking):
                    for sending in replies[asking]:
                        await sending
                    replies[asking] = await self._answer(asking, self._asking.pop(asking))
        for sending in [each for handles in replies.values() for each in handles]:
            await sending

    def _like(self, report: Report) -> Tensor:
        like = torch.empty_like(self._me.weights[self._fragments[report.fragment]], device="cpu")
        return encoded(like, self._encoding)

    async def _read(self, learner: int, report: Report) -> None:
        """Handle a report. After the last learner has left, the remaining pushes are merged."""
        if report.fragment == LEAVES:
            self._to_receive[learner] = len(self._fragments)
            if len(self._to_receive) == self._me.world:
                for fragment in range(len(self._fragments)):
                    await self._merge(fragment)
        elif report.num_steps:
            self._pushing[learner] = report
        else:
            self._asking[learner] = report
            if learner in self._to_receive:
                self._to_receive[learner] -= 1

    async def _add(self, learner: int, report: Report, difference: Tensor) -> None:
        """Add a learner's push, unless it was added in an earlier membership."""
        loans, shard = self._loans[report.fragment], self._shards[report.fragment]
        if (age := loans.pay_back(report.loan)) is not None:
            loans.current.num_steps = report.num_steps
            if self._encoding is not None and not difference.is_meta:
                difference = self._encoding.decode(difference, shard.piece.stop - shard.piece.start)
            await shard.step(difference, report.step_metadata, [age])
            self._waiting[report.fragment].add(learner)

    async def _is_new_to(self, learner: int) -> bool:
        """Return whether a learner gets the fragment that it has asked for, which may be merged now."""
        asked = self._asking[learner]
        if learner in self._to_receive:
            return len(self._to_receive) == self._me.world
        num_needed = min(self._quorum, self._me.world - len(self._to_receive))
        waiting = self._waiting[asked.fragment]
        if self._merges[asked.fragment] > asked.num_merges:  # only for another merge as large as that one
            num_needed = max(num_needed, self._num_merged[asked.fragment])
        if learner in waiting and len(waiting) >= num_needed:
            await self._merge(asked.fragment)
        return self._merges[asked.fragment] > asked.num_merges

    async def _merge(self, fragment: int) -> None:
        await self._shards[fragment].change(_merge)
        self._merges[fragment] += 1
        self._num_merged[fragment], self._waiting[fragment] = len(self._waiting[fragment]), set()

    async def _answer(self, learner: int, asked: Report) -> list[Handle[None]]:
        """Start sending a learner the fragment that it has asked for."""
        shard = self._shards[asked.fragment]
        told = [self._loans[asked.fragment].lend(asked.loan, shard.num_steps), *self._merges]
        answer = torch.tensor(told, dtype=torch.float64)
        return [self._me.send(learner, answer, ANSWER), self._me.send(learner, await shard.read(), THETA)]


class Fragments:
    """A learner's connection to the syncer, which is learner 0.

    The state changes only together with the learner's weights, between two waits. A fragment that the learner has
    pushed is `flown` until the learner receives it; then the learner cannot know whether the push has arrived.
    """

    DROPPED = ("_merges", "_under_way")

    def __init__(self, me: Learner, fragments: Sequence[slice], encoding: Encoding | None = None) -> None:
        self._me, self.fragments, self._encoding, n = me, fragments, encoding, len(fragments)
        counts = me.strategy_state("counts", torch.zeros(2 + 3 * n, dtype=torch.int64), is_common=False)
        self._num_steps, self._departed_at = counts[:1], counts[1:2]
        self._loans, self._pushed_at, self._flown = counts[2 : 2 + n], counts[2 + n : 2 + 2 * n], counts[2 + 2 * n :]
        self._theta = me.strategy_state("theta", me.weights, is_common=False)
        self._sent = me.strategy_state("sent", me.weights, is_common=False)
        self._is_syncer = me.strategy_state("syncer", torch.zeros(1, dtype=torch.int64), is_common=False)
        self._merges = [UNKNOWN] * n
        self._under_way: int | None = None

    @property
    def have_been_received(self) -> bool:
        """Whether the learner has received fragments from a syncer, perhaps in an earlier membership."""
        return bool(self._loans.any())

    async def begin(self, quorum: int, rate: float, momentum: float) -> None:
        """Start the syncer, if this learner runs it. Push again what may not have arrived, and receive all fragments.

        If the syncer was lost, all learners first continue with the mean of their weights.
        """
        me = self._me
        was_lost = torch.tensor([me.rank == 0 and self.have_been_received and not bool(self._is_syncer)]).double()
        telling = [me.send(learner, was_lost, ANSWER) for learner in range(1, me.world) if me.rank == 0]
        if bool(was_lost if me.rank == 0 else await me.receive(0, was_lost, ANSWER)):
            await self._average()
            self._theta.copy_(me.weights)
            for counts in (self._loans, self._flown):
                counts.zero_()
            self._pushed_at.copy_(self._num_steps.expand_as(self._pushed_at))
        for each in telling:
            await each
        if me.rank == 0:
            self._is_syncer.fill_(1)
            me.background.start(Syncer(me, self.fragments, self._encoding, quorum, rate, momentum).serve())
        for number, num_steps in enumerate(self._flown.tolist()):
            if num_steps:
                await self._push(number)
            await self._receive(number, UNKNOWN)

    async def _average(self) -> None:
        """Set the weights of learner 0 to the mean of all learners' weights."""
        me = self._me
        if me.rank > 0:
            await me.send(0, me.snapshot().cpu(), THETA)
            return
        total = me.snapshot().cpu().clone()  # in a loop, a snapshot may be the loop's weights
        for other in range(1, me.world):
            total += await me.receive(other, total, THETA)
        me.replace((total / me.world).to(me.weights.device))

    async def step(self, period: int, overlap: int) -> None:
        """Count a step of the learner. Receive the fragment that has been under way for `overlap` steps, and push the
        fragment that was merged least often if the last one departed `period` steps ago."""
        self._num_steps += 1
        since = int(self._num_steps - self._departed_at)
        if since >= overlap:
            await self._arrive()
        if since >= period:
            self._under_way = min(range(len(self.fragments)), key=self._merges.__getitem__)
            self._departed_at.copy_(self._num_steps)
            await self._depart(self._under_way)
            if overlap == 0:
                await self._arrive()

    async def leave(self) -> None:
        """Push all remaining steps, and adopt the final weights once all learners have left."""
        await self._arrive()
        for number in range(len(self.fragments)):
            if self._num_steps > self._pushed_at[number]:
                await self._depart(number)
        await self._report(Report(LEAVES))
        for number in range(len(self.fragments)):
            await self._receive(number, UNKNOWN)
        self._me.replace(self._theta)  # without the errors of encodings, which no push follows

    async def _arrive(self) -> None:
        """Wait for the fragment that is under way, if any."""
        if (number := self._under_way) is not None:
            await self._receive(number, self._merges[number])
            self._under_way = None

    async def _depart(self, number: int) -> None:
        """Push the steps since the fragment's last push."""
        fragment = self.fragments[number]
        sent = self._me.weights[fragment]
        if self._encoding is not None and not sent.is_meta:
            difference = self._encoding.encode((self._theta[fragment] - sent).cpu())
            sent = self._theta[fragment] - self._encoding.decode(difference, len(sent)).to(sent.device)
        self._sent[fragment] = sent
        self._flown[number] = self._num_steps[0] - self._pushed_at[number]
        self._pushed_at[number] = self._num_steps[0]
        await self._push(number)

    async def _push(self, number: int) -> None:
        fragment = self.fragments[number]
        difference = (self._theta[fragment] - self._sent[fragment]).cpu()
        sending = self._report(Report(number, int(self._loans[number]), int(self._flown[number])))
        following = self._me.send(0, encoded(difference, self._encoding), DIFFERENCE)
        await sending
        await following

    async def _receive(self, number: int, num_merges: int) -> None:
        """Ask for a fragment, and move this learner's weights to it, with the steps that the fragment lacks."""
        me, fragment = self._me, self.fragments[number]
        answer = me.receive(0, torch.zeros(1 + len(self.fragments), dtype=torch.float64), ANSWER)
        arriving = me.receive(0, torch.empty(fragment.stop - fragment.start, dtype=me.weights.dtype), THETA)
        await self._report(Report(number, int(self._loans[number]), 0, num_merges))
        loan, *merges = map(int, (await answer).tolist())
        theta = (await arriving).to(me.weights.device)
        base = self._sent[fragment] if self._flown[number] else self._theta[fragment]
        me.replace(theta + (me.weights[fragment] - base), fragment)
        self._theta[fragment] = theta
        self._loans[number], self._flown[number], self._merges = loan, 0, merges

    def _report(self, report: Report) -> Handle[None]:
        return self._me.send(0, replace(report, step_metadata=self._me.optimizer.step_metadata).encode(), REPORT)
