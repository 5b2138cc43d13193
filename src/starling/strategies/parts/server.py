"""The server of one model shard, the same under every rule: it receives gradients, makes steps and sends weights.

A worker sends a `Report` of its progress; if the report announces a gradient, the gradient follows. A report with an
unchanged number of finished mini-batches requests the weights; the server sends them, with their age, when its rule
allows. So a worker pulls, reports a finished mini-batch, and pulls again. At the end it reports that it leaves, and
pulls the final weights::

    worker                                        server
    report                                   ->
                                             <-   age, weights
    report [, gradient]                      ->
    report                                   ->
                                             <-   age, weights
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from starling.learner import Handle, Learner
from starling.strategies.parts.rules import Served, ServerOptions

if TYPE_CHECKING:
    from torch import Tensor

    from starling.strategies.parts.delayed_nesterov import Loans

REPORT, GRADIENT, AGE, WEIGHTS = range(4)
"""Tags of the four kinds of messages. An age `[1]` is the number of steps in the weights; an age `[2]` is the number of
a loan, and the largest number of mini-batches that a worker has reported."""

EARLIER = -1
"""Rank that stands for workers of earlier memberships. It precedes all other ranks."""
DROPPED = ("worker", "asking", "age", "told", "message", "report", "tag")
"""Attributes that are dropped with a membership, because the message that a server is handling belongs to it."""


@dataclass(frozen=True)
class Report:
    """A worker's message about its progress."""

    num_finished: float
    """Number of mini-batches that the worker has finished, including those with a non-finite gradient; infinite once it
    leaves."""
    age: float
    """Age of the weights at which the following gradient was taken; NaN if no gradient follows."""
    step_metadata: Tensor
    """Metadata `[k]` of the gradient's mini-batch, which the server's optimizer needs."""

    @property
    def is_last(self) -> bool:
        return math.isinf(self.num_finished)

    def encode(self) -> Tensor:
        """Return the report as a float64 tensor `[2 + k]`."""
        import torch

        return torch.cat([torch.tensor([self.num_finished, self.age], dtype=torch.float64), self.step_metadata])


@dataclass(frozen=True)
class Push:
    """A gradient that has arrived and is not yet part of a step."""

    worker: int
    """Rank of the worker in this membership, or `EARLIER`."""
    report: Report
    """Report of the worker. Its `age` is the number of the shard's steps in the weights at which the gradient was
    taken; for weights from before this membership, it is at most 0."""
    gradient: Tensor


class Taken:
    """The newest mini-batches whose gradients are in a shard, or wait for a step, in this membership and earlier ones.

    If a worker is lost after its gradient has arrived, but before it knows this, its mini-batch is computed again.
    """

    _ROOM = 1024  # more than the mini-batches that all workers have under way

    def __init__(self, me: Learner, piece: slice) -> None:
        import torch

        self._shards = me.shards
        initial = torch.full((self._ROOM,), -1, dtype=torch.int64)
        self._numbers = me.strategy_state(f"taken {piece.start}", initial, is_common=False)

    def has(self, worker: int, report: Report) -> bool:
        """Return whether the gradient that this report announces was taken before."""
        number = self._shards.mini_batch(worker, report.step_metadata)
        return number is not None and int(self._numbers[number % self._ROOM]) == number

    def add(self, worker: int, report: Report) -> None:
        """Record that the gradient is taken."""
        if (number := self._shards.mini_batch(worker, report.step_metadata)) is not None:
            self._numbers[number % self._ROOM] = number


class Waiting:
    """The gradients that wait for a step. Gradients of a sum, of which there are at most `room`, are kept in state that
    checkpoints and the next membership include.

    No step is made while a gradient waits, so its staleness stays the same, whatever the origin from which steps are
    counted.
    """

    DROPPED = ("pushes",)
    """Attribute that is dropped with a membership. Gradients of a sum are then read again from the kept state."""

    def __init__(self, me: Learner, piece: slice, room: int) -> None:
        import torch

        def kept(name: str, initial: Tensor) -> Tensor:
            return me.strategy_state(f"waiting {piece.start} {name}", initial, is_common=False) if room else initial

        size, device = piece.stop - piece.start, "meta" if me.weights.is_meta else "cpu"
        self._gradients = kept("gradients", torch.zeros(room, size, dtype=me.weights.dtype, device=device))
        self._told = kept("staleness", torch.zeros(room, 1 + len(me.optimizer.step_metadata), dtype=torch.float64))
        self._number = kept("number", torch.zeros(1, dtype=torch.int64))
        rows = list(zip(self._told, self._gradients, strict=True))[: int(self._number)]
        self.pushes = [Push(EARLIER, Report(0.0, -float(told[0]), told[1:]), gradient) for told, gradient in rows]
        """Pushes in the order in which they arrived, those of earlier memberships first; their workers' ranks may have
        changed."""

    @property
    def is_kept(self) -> bool:
        """Whether gradients that wait survive a membership change."""
        return bool(len(self._gradients))

    def add(self, push: Push, num_steps: int) -> None:
        """Add a gradient that has arrived after `num_steps` steps. A gradient for which there is no room makes a step
        now."""
        if (row := int(self._number)) < len(self._gradients):
            self._gradients[row].copy_(push.gradient)
            self._told[row, 0] = num_steps - push.report.age
            self._told[row, 1:] = push.report.step_metadata
            self._number += 1
            push = replace(push, gradient=self._gradients[row])
        self.pushes.append(push)

    def clear(self) -> None:
        """Drop all gradients, which have made a step."""
        self.pushes = []
        self._number.zero_()


class Server:
    """The server of one model shard. It handles messages one at a time, in one coroutine.

    With `loans`, workers push differences instead of gradients. The age that the server sends, and that workers return,
    is then the number of a loan, and the server also sends the largest number of mini-batches. Reports and requests of
    workers belong to a membership.
    """

    DROPPED = ("_announced", "_finished", "_asking", "_computing", "_most")

    def __init__(
        self, me: Learner, piece: slice, workers: range, rule: ServerOptions, loans: Loans | None = None
    ) -> None:
        self._me, self._rule, self._loans = me, rule, loans
        self._correction = rule.correction(me)
        self._shard = me.shards.keep(piece, None if loans is None else loans.optimizer)
        self._most = 0.0  # the largest number of mini-batches reported
        self._announced: dict[int, Report] = {}  # by worker; the gradient is on its way
        self._waiting = Waiting(me, piece, rule.most_waiting)
        self._taken = Taken(me, piece) if loans is None else None
        self._finished: dict[int, float] = dict.fromkeys(workers, 0.0)  # `num_finished` of each worker's last report
        self._asking: dict[int, int] = {}  # by worker that has requested the weights, in order: the age it has
        self._computing: set[int] = set()  # workers that have got weights, and have not finished a mini-batch since

    async def serve(self) -> None:
        """Serve until all workers have left and received the final weights."""
        import torch

        me = self._me
        like = {
            REPORT: Report(0.0, 0.0, me.optimizer.step_metadata).encode(),
            GRADIENT: torch.empty(self._shard.piece.stop - self._shard.piece.start, dtype=me.weights.dtype),
        }
        expected: dict[int, Handle[Tensor]] = {w: me.receive(w, like[REPORT], REPORT) for w in self._finished}
        replies: dict[int, list[Handle[None]]] = {worker: [] for worker in self._finished}
        while expected:
            worker = await me.shards.first(expected)
            tag = await self._handle(worker, await expected.pop(worker))
            if tag is not None:
                expected[worker] = me.receive(worker, like[tag], tag)
            for asking in list(self._asking):
                if self._grants(asking):
                    self._computing.add(asking)
                    for sending in replies[asking]:
                        await sending
                    replies[asking] = await self._answer(asking, self._asking.pop(asking))
        for sending in [each for handles in replies.values() for each in handles]:
            await sending

    async def _handle(self, worker: int, message: Tensor) -> int | None:
        """Handle a worker's message. Returns the tag of its next message, or None after its last."""
        if worker in self._announced:
            report = self._announced.pop(worker)
            age = report.age if self._loans is None else self._loans.pay_back(int(report.age))
            if age is not None and not (self._taken and self._taken.has(worker, report)):
                self._waiting.add(Push(worker, replace(report, age=age), message), self._shard.num_steps)
                if self._taken and self._waiting.is_kept:
                    self._taken.add(worker, report)
            await self._record(worker, report)
            return REPORT
        report = Report(float(message[0]), float(message[1]), message[2:])
        if report.num_finished == self._finished[worker]:
            self._asking[worker] = int(report.age)
            return None if report.is_last else REPORT
        if not (math.isnan(report.age) or report.is_last):
            self._announced[worker] = report
            return GRADIENT
        await self._record(worker, report)
        return REPORT

    async def _record(self, worker: int, report: Report) -> None:
        """Record that a worker has finished a mini-batch, or leaves; make a step if one is due."""
        self._finished[worker] = report.num_finished
        self._computing.discard(worker)
        if report.is_last:
            is_due = self._have_all_left  # the remaining gradients, though too few for the rule
        else:
            self._most = max(self._most, report.num_finished)
            is_due = self._rule.is_due(len(self._waiting.pushes), self._finished.values())
        if is_due and self._waiting.pushes:
            await self._step()

    @property
    def _have_all_left(self) -> bool:
        return math.isinf(min(self._finished.values()))

    async def _step(self) -> None:
        """Make a step with the waiting gradients, in the order of their workers' ranks, after those of earlier
        memberships."""
        pushes = sorted(self._waiting.pushes, key=lambda push: push.worker)
        read_at = [int(push.report.age) for push in pushes]
        staleness = self._shard.num_steps - sum(read_at) / len(read_at)
        newest = max((push.report for push in pushes), key=lambda report: report.age)
        gradient = self._rule.combined(await self._corrected(pushes))
        await self._shard.step(gradient, newest.step_metadata, read_at, self._rule.rate_scale(staleness))
        if self._taken and not self._waiting.is_kept:
            for push in pushes:
                self._taken.add(push.worker, push.report)
        self._waiting.clear()

    async def _corrected(self, pushes: Sequence[Push]) -> list[Tensor]:
        """Return the gradients, corrected for their staleness if the options request it. The weights at which gradients
        of earlier memberships were computed are not kept, so these gradients stay unchanged."""
        if self._correction is None:
            return [push.gradient for push in pushes]
        now, correct = await self._shard.read(), self._correction.correct
        self._correction.before_step(now)
        return [
            push.gradient if push.worker == EARLIER else correct(push.worker, push.report.age, push.gradient, now)
            for push in pushes
        ]

    def _grants(self, worker: int) -> bool:
        """Return whether a worker that has requested the weights gets them now.

        With a staleness bound s, and c_l the mini-batches that worker l has finished, this requires
        c_l - min_j c_j <= s (SSP); with `overlap` c_l includes the gradient under way. A worker that has left gets the
        final weights once all workers have left.
        """
        if math.isinf(self._finished[worker]):
            return self._have_all_left
        ahead = self._finished[worker] + self._rule.overlaps - min(self._finished.values())
        return self._rule.grants(ahead, len(self._computing))

    async def _answer(self, worker: int, has: int) -> list[Handle[None]]:
        """Start sending the current weights to a worker that has weights of the age `has`."""
        import torch

        num_steps = self._shard.num_steps
        told = [num_steps] if self._loans is None else [self._loans.lend(has, num_steps), self._most]
        age = torch.tensor(told, dtype=torch.float64)
        weights = await self._shard.read()
        if self._correction is not None:
            self._correction.gave(worker, float(age[0]), weights)
        return [self._me.send(worker, age, AGE), self._me.send(worker, weights, WEIGHTS)]


async def serve(
    me: Learner,
    options: Served,
    rule: ServerOptions,
    loans: Loans | None = None,
    loan_of: Callable[[slice], int] = lambda piece: 0,
) -> slice:
    """Run the server of a shard, if this learner is one: in the background of a worker, otherwise until the end.

    Returns the piece of the weights that begins as this learner's own, because its server has not lent it before. If
    another server, which was lost, has lent it, `loan_of` returns the number of this learner's copy, and otherwise 0.
    """
    piece, workers = options.kept(me), options.workers(me.world)
    if piece is None:
        return slice(0)
    server = Server(me, piece, workers, rule, loans)
    has_lent = loans is not None and loans.has_lent
    if loans is not None and not has_lent and (number := loan_of(piece)):
        loans.follow(number)
    if me.rank in workers:
        me.background.start(server.serve())
    else:
        await server.serve()
    return slice(0) if has_lent else piece
