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
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from starling.configuration import Config
from starling.errors import ConfigError
from starling.learner import Handle, Learner
from starling.strategies.staleness import Staleness, correction, rate_scale

if TYPE_CHECKING:
    from torch import Tensor

    from starling.strategies.delayed_nesterov import Loans

REPORT, GRADIENT, AGE, WEIGHTS = range(4)
"""The tags of the four kinds of messages. An age `[1]` is the number of steps in the weights; `[2]`: the number of a
loan, and the largest number of mini-batches that a worker has reported."""

EARLIER = -1
"""The rank of the workers of earlier memberships, before all others."""
DROPPED = ("worker", "asking", "age", "told", "message", "report", "tag")
"""A message that a server is handling when a membership ends belongs to that membership."""


class Rule:
    """Decides when the gradients that have arrived make a step, and which worker may pull the weights.

    In the equations of the four rules w is the server's piece of the weights, a the step size of its optimizer, and
    g_l(Phi_l) the gradient that worker l computed at Phi_l, the weights it pulled.
    """

    most_kept = 0
    """The most gradients that wait for others although their workers continue: the next membership needs them."""

    def finish(self, num_finished: Collection[float], num_waiting: int) -> bool:
        """Record that a worker has finished a mini-batch, with or without a finite gradient; the workers have now
        finished so many.

        Returns whether the `num_waiting` gradients that have arrived since the last step now make a step.
        """
        return num_waiting == 1

    def grant(self, worker: int) -> bool:
        """Whether a worker that has requested the weights gets them now."""
        return True

    def leave(self, worker: int) -> None:
        """Record that a worker computes no more gradients."""


class Asynchronous(Rule):
    """Each gradient makes a step when it arrives, and no worker waits for another.

    Equation, for the gradient of worker l::

        w <- w - a g_l(Phi_l)

    Other workers may have changed w since worker l pulled Phi_l.

    References:
        Dean et al. 2012, "Large Scale Distributed Deep Networks", NIPS (Downpour SGD).
    """


class Summed(Rule):
    """Any n gradients make one step with their sum, and no worker waits for another.

    Equation, for the next n gradients to arrive, from any workers::

        w <- w - a (g_1(Phi_1) + ... + g_n(Phi_n))

    With `combine` mean, the sum is divided by n. The last step of a run may have fewer than n gradients.

    References:
        Aji & Heafield 2019, "Making Asynchronous Stochastic Gradient Descent Work for Transformers", arXiv 1906.03496.
    """

    def __init__(self, n: int) -> None:
        self._n, self.most_kept = n, n - 1

    def finish(self, num_finished: Collection[float], num_waiting: int) -> bool:
        return num_waiting == self._n


class Hybrid(Rule):
    """The mean of all workers' gradients at the same weights makes a step, and every worker waits for it.

    Equation, for N workers::

        w <- w - a (1/N) sum_l g_l(w)

    This is `allreduce` with the step made by the server. Non-finite gradients are left out of the mean. With `combine`
    sum, the sum is not divided. No worker may be ahead of another: the staleness bound is 0.
    """

    def finish(self, num_finished: Collection[float], num_waiting: int) -> bool:
        return min(num_finished) == max(num_finished)


class Synchronous(Rule):
    """One worker at a time pulls, computes a gradient and pushes it, while the others wait for their turn.

    Equation, for the worker l whose turn it is::

        w <- w - a g_l(w)
    """

    def __init__(self) -> None:
        self._turn: int | None = None

    def finish(self, num_finished: Collection[float], num_waiting: int) -> bool:
        self._turn = None
        return num_waiting == 1

    def grant(self, worker: int) -> bool:
        self._turn = worker if self._turn is None else self._turn
        return self._turn == worker

    def leave(self, worker: int) -> None:
        self._turn = None if self._turn == worker else self._turn


class Served(Config):
    """The options of all strategies with servers that keep the model: how many there are, and where."""

    shards: int = Field(default=1, ge=1)
    """The number of servers. Each keeps one shard of the model in host memory, with the state of its optimizer."""
    servers: Literal["beside", "own"] = "beside"
    """Where servers run: `beside`, in the first workers' processes; `own`, as the last learners, which compute no
    gradients."""

    def workers(self, world: int) -> range:
        """The learners that compute."""
        return range(world - self.shards if self.servers == "own" else world)

    def server(self, shard: int, world: int) -> int:
        """The learner that is the server of a shard."""
        return world - self.shards + shard if self.servers == "own" else shard

    def pieces(self, num_weights: int) -> list[slice]:
        """The piece of the weights of each server. ConfigError if there are more servers than weights."""
        shards = self.shards
        if shards > num_weights:
            raise ConfigError(f"strategy.shards: {shards} servers cannot share the model's {num_weights} parameters")
        return [slice(num_weights * s // shards, num_weights * (s + 1) // shards) for s in range(shards)]

    def kept(self, me: Learner) -> slice | None:
        """The piece that a learner keeps as a server; None: it is no server."""
        pieces = self.pieces(len(me.weights))
        return next((piece for s, piece in enumerate(pieces) if self.server(s, me.world) == me.rank), None)


class ServerOptions(Served):
    """The options of `parameter-server`."""

    update: Literal["synchronous", "hybrid", "asynchronous", "summed"] = "asynchronous"
    """Which gradients make a step: one worker's at a time; one of each worker; each when it arrives; any `sum` of
    them."""
    sum: int | None = Field(default=None, ge=1)
    """`summed`: the number of gradients in a step."""
    combine: Literal["sum", "mean"] | None = None
    """How the gradients of a step are combined. Default: their mean under `hybrid`, their sum under `summed`."""
    staleness_bound: int | None = Field(default=None, ge=0)
    """A worker that would be more than this many gradients ahead of the slowest waits; null: no worker waits."""
    overlap: bool = False
    """Compute the next gradient, at the old weights, while the new weights are on their way."""
    scale_by_staleness: bool = False
    """Divide the learning rate of a step by the mean staleness of its gradients, if that is above 1."""
    staleness: Staleness = "none"
    """How gradients are corrected that were taken at older weights: `none`, `gap-aware`, or `delay_compensation`."""

    @model_validator(mode="after")
    def _makes_sense(self) -> ServerOptions:
        is_asynchronous = self.update in ("asynchronous", "summed")
        if self.update == "summed" and self.sum is None:
            raise ValueError("summed needs sum, the number of gradients in a step; usually the number of workers")
        if self.sum is not None and self.update != "summed":
            raise ValueError(f"sum: only for update: summed, not for {self.update}; leave it out")
        if self.combine is not None and self.update not in ("hybrid", "summed"):
            raise ValueError(f"combine: under {self.update} each step has one gradient; leave it out")
        if self.staleness_bound is not None and not is_asynchronous:
            raise ValueError(f"staleness_bound: under {self.update} workers always wait for each other; leave it out")
        if self.staleness != "none" and not is_asynchronous:
            raise ValueError(f"staleness: under {self.update} no gradient is stale; leave it out")
        if self.overlap and not is_asynchronous:
            raise ValueError(f"overlap: under {self.update} a worker must wait for the new weights; leave it out")
        if self.overlap and self.staleness_bound == 0:
            raise ValueError(
                "staleness_bound: with 0 no worker may compute while it waits for weights; overlap needs at least 1"
            )
        return self

    def rule(self) -> Rule:
        """A new `Rule`, as named by `update`."""
        if self.sum is not None:
            return Summed(self.sum)
        return {"synchronous": Synchronous, "hybrid": Hybrid, "asynchronous": Asynchronous}[self.update]()

    def combined(self, gradients: Sequence[Tensor]) -> Tensor:
        """The gradient of a step: the sum of these, in order, or their mean; none of them is overwritten."""
        total = gradients[0]
        for place, gradient in enumerate(gradients[1:]):
            total = total.add_(gradient) if place else total + gradient
        is_mean = (self.combine or ("mean" if self.update == "hybrid" else "sum")) == "mean"
        return total.div_(len(gradients)) if is_mean and len(gradients) > 1 else total


@dataclass(frozen=True)
class Report:
    """A worker's message about its progress."""

    num_finished: float
    """The mini-batches it has finished, including those with a non-finite gradient; infinite once it leaves."""
    age: float
    """The age of the weights at which the following gradient was taken; NaN: no gradient follows."""
    step_metadata: Tensor
    """What the server's optimizer needs to know about the gradient's mini-batch, `[k]`."""

    @property
    def is_last(self) -> bool:
        return math.isinf(self.num_finished)

    def encode(self) -> Tensor:
        """The report as a float64 tensor `[2 + k]`."""
        import torch

        return torch.cat([torch.tensor([self.num_finished, self.age], dtype=torch.float64), self.step_metadata])


@dataclass(frozen=True)
class Push:
    """A gradient that has arrived and is not yet part of a step."""

    worker: int
    """Its rank in this membership, or `EARLIER`."""
    report: Report
    """`age` is the number of the shard's steps in the weights at which the gradient was taken; before this membership,
    below 0 or 0."""
    gradient: Tensor


class Kept:
    """The gradients that wait for a sum, where checkpoints and the next membership find them: at most `room`.

    No step is made while a gradient waits, so its staleness stays the same, whatever steps are counted from.
    """

    def __init__(self, me: Learner, piece: slice, room: int) -> None:
        import torch

        def kept(name: str, initial: Tensor) -> Tensor:
            return me.strategy_state(f"waiting {piece.start} {name}", initial, is_common=False) if room else initial

        size, device = piece.stop - piece.start, "meta" if me.weights.is_meta else "cpu"
        self._gradients = kept("gradients", torch.zeros(room, size, dtype=me.weights.dtype, device=device))
        self._told = kept("staleness", torch.zeros(room, 1 + len(me.step_metadata), dtype=torch.float64))
        self._number = kept("number", torch.zeros(1, dtype=torch.int64))

    def pushes(self) -> list[Push]:
        """Those of earlier memberships, in the order in which they arrived. Their workers may be others by now."""
        rows = list(zip(self._told, self._gradients, strict=True))[: int(self._number)]
        return [Push(EARLIER, Report(0.0, -float(told[0]), told[1:]), gradient) for told, gradient in rows]

    def keep(self, push: Push, num_steps: int) -> Push:
        """Keep a gradient that has arrived after so many steps, if there is room: one without room makes a step now."""
        row = int(self._number)
        if row == len(self._gradients):
            return push
        self._gradients[row].copy_(push.gradient)
        self._told[row, 0] = num_steps - push.report.age
        self._told[row, 1:] = push.report.step_metadata
        self._number += 1
        return replace(push, gradient=self._gradients[row])

    def clear(self) -> None:
        """All have made a step."""
        self._number.zero_()


class Server:
    """The server of one model shard. It handles messages one at a time, in one coroutine.

    With `loans` workers push what is no gradient: the age that it tells them and they return is then the number of a
    loan, and it tells them the largest number of mini-batches, too. What workers have reported or requested belongs to
    a membership.
    """

    DROPPED = ("_announced", "_finished", "_asking", "_most", "_waiting")  # `_kept` has what is waiting for a sum

    def __init__(
        self, me: Learner, piece: slice, workers: range, options: ServerOptions, loans: Loans | None = None
    ) -> None:
        self._me, self._options = me, options
        self._rule = options.rule()
        self._correction = correction(options.staleness, me)
        self._loans = loans
        self._shard = me.keep(piece, None if loans is None else loans.optimizer)
        self._most = 0.0  # the largest number of mini-batches reported
        self._announced: dict[int, Report] = {}  # by worker; the gradient is on its way
        self._kept = Kept(me, piece, self._rule.most_kept)
        self._waiting = self._kept.pushes()
        self._finished: dict[int, float] = dict.fromkeys(workers, 0.0)  # `num_finished` of each worker's last report
        self._asking: dict[int, int] = {}  # by worker that has requested the weights, in order: the age it has

    async def serve(self) -> None:
        """Serve until all workers have left and received the final weights."""
        import torch

        me = self._me
        like = {
            REPORT: Report(0.0, 0.0, me.step_metadata).encode(),
            GRADIENT: torch.empty(self._shard.piece.stop - self._shard.piece.start, dtype=me.weights.dtype),
        }
        expected: dict[int, Handle[Tensor]] = {w: me.receive(w, like[REPORT], REPORT) for w in self._finished}
        replies: dict[int, list[Handle[None]]] = {worker: [] for worker in self._finished}
        while expected:
            worker = await me.first(expected)
            tag = await self._handle(worker, await expected.pop(worker))
            if tag is not None:
                expected[worker] = me.receive(worker, like[tag], tag)
            for asking in [each for each in self._asking if self._grants(each)]:
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
            if age is not None:
                push = Push(worker, replace(report, age=age), message)
                self._waiting.append(self._kept.keep(push, self._shard.num_steps))
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
        if report.is_last:
            self._rule.leave(worker)
            is_due = self._have_all_left  # the remaining gradients, though too few for the rule
        else:
            self._most = max(self._most, report.num_finished)
            is_due = self._rule.finish(self._finished.values(), len(self._waiting))
        if is_due and self._waiting:
            await self._step()

    @property
    def _have_all_left(self) -> bool:
        return math.isinf(min(self._finished.values()))

    async def _step(self) -> None:
        """Make a step with the waiting gradients, in the order of their workers' ranks, after those of earlier
        memberships."""
        pushes, self._waiting = sorted(self._waiting, key=lambda push: push.worker), []
        read_at = [int(push.report.age) for push in pushes]
        staleness = self._shard.num_steps - sum(read_at) / len(read_at)
        scale = rate_scale(staleness) if self._options.scale_by_staleness else 1.0
        newest = max((push.report for push in pushes), key=lambda report: report.age)
        gradient = self._options.combined(await self._corrected(pushes))
        await self._shard.step(gradient, newest.step_metadata, read_at, scale)
        self._kept.clear()

    async def _corrected(self, pushes: Sequence[Push]) -> list[Tensor]:
        """The gradients, corrected for their staleness if the options say so. The weights at which those of earlier
        memberships were taken are not remembered: they stay as they are."""
        if self._correction is None:
            return [push.gradient for push in pushes]
        now, correct = await self._shard.read(), self._correction.correct
        self._correction.before_step(now)
        return [
            push.gradient if push.worker == EARLIER else correct(push.worker, push.report.age, push.gradient, now)
            for push in pushes
        ]

    def _grants(self, worker: int) -> bool:
        """Whether a worker that has requested the weights gets them now.

        With a staleness bound s, and c_l the mini-batches that worker l has finished, this requires
        c_l - min_j c_j <= s (SSP); with `overlap` c_l includes the gradient under way. A worker that has left gets the
        final weights once all workers have left.
        """
        if math.isinf(self._finished[worker]):
            return self._have_all_left
        bound = 0 if self._options.update == "hybrid" else self._options.staleness_bound
        ahead = self._finished[worker] + self._options.overlap - min(self._finished.values())
        return (bound is None or ahead <= bound) and self._rule.grant(worker)

    async def _answer(self, worker: int, has: int) -> list[Handle[None]]:
        """Start sending the current weights to a worker that has those of the age `has`."""
        import torch

        num_steps = self._shard.num_steps
        told = [num_steps] if self._loans is None else [self._loans.lend(has, num_steps), self._most]
        age = torch.tensor(told, dtype=torch.float64)
        weights = await self._shard.read()
        if self._correction is not None:
            self._correction.gave(worker, float(age[0]), weights)
        return [self._me.send(worker, age, AGE), self._me.send(worker, weights, WEIGHTS)]
