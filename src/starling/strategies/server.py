"""The server of one shard, the same under every rule: it takes gradients, makes steps and hands out weights.

A worker and a server talk in turns. The worker sends a `Report` of where it is; if the report announces a gradient, the
gradient follows. A report that tells the server nothing new asks for the weights, which the server sends, with their
age, when its rule allows. So a worker pulls, finishes a mini-batch, reports it, and pulls again; at the end it reports
that it leaves, and pulls the last weights::

    worker                                        server
    report                                   ->
                                             <-   age, weights
    report [, gradient]                      ->
    report                                   ->
                                             <-   age, weights
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from starling.configuration import Config
from starling.learner import Handle, Learner
from starling.strategies.server_rules import Asynchronous, Hybrid, Rule, Summed, Synchronous

if TYPE_CHECKING:
    from torch import Tensor

REPORT, GRADIENT, AGE, WEIGHTS = range(4)
"""The tags of messages; each tag carries one kind of message. An age is the number of steps in the weights, `[1]`."""


class ServerOptions(Config):
    """The options of `parameter-server`."""

    update: Literal["synchronous", "hybrid", "asynchronous", "summed"] = "asynchronous"
    """The rule by which gradients make a step: those of one worker at a time; of all workers; any that arrives; any
    `sum` of them."""
    sum: int | None = Field(default=None, ge=1)
    """`summed`: how many gradients make one step."""
    combine: Literal["sum", "mean"] | None = None
    """What several gradients become; by default their mean under `hybrid`, their sum under `summed`."""
    staleness_bound: int | None = Field(default=None, ge=0)
    """A worker that would be more than this many gradients ahead of the slowest waits; null: no worker waits."""
    shards: int = Field(default=1, ge=1)
    """Servers, each of which keeps a part of the model in host memory, with the optimizer's state."""
    servers: Literal["beside", "own"] = "beside"
    """Where servers run: beside the first workers, or as learners of their own, the last ones, that compute nothing."""
    overlap: bool = False
    """Compute the next gradient while new weights are on their way: it is taken at the weights before."""
    scale_by_staleness: bool = False
    """Divide the learning rate of a step by the mean staleness of its gradients, where that is above 1."""

    @model_validator(mode="after")
    def _makes_sense(self) -> ServerOptions:
        is_asynchronous = self.update in ("asynchronous", "summed")
        if self.update == "summed" and self.sum is None:
            raise ValueError(
                "summed needs sum, the number of gradients that make one step; the number of workers is usual"
            )
        if self.sum is not None and self.update != "summed":
            raise ValueError(f"sum belongs to update: summed, not to {self.update}; leave it out")
        if self.combine is not None and self.update not in ("hybrid", "summed"):
            raise ValueError(f"combine: under {self.update} each gradient makes a step of its own; leave it out")
        if self.staleness_bound is not None and not is_asynchronous:
            raise ValueError(f"staleness_bound: under {self.update} workers wait for each other anyway; leave it out")
        if self.overlap and not is_asynchronous:
            raise ValueError(f"overlap: under {self.update} a worker needs the new weights first; leave it out")
        if self.overlap and self.staleness_bound == 0:
            raise ValueError("staleness_bound: with 0 no worker may compute while weights travel; overlap needs 1")
        return self

    def workers(self, world: int) -> range:
        """The learners that compute."""
        return range(world - self.shards if self.servers == "own" else world)

    def server(self, shard: int, world: int) -> int:
        """The learner that keeps a shard."""
        return world - self.shards + shard if self.servers == "own" else shard

    def rule(self, num_workers: int) -> Rule:
        """The rule that `update` names, at its beginning."""
        if self.update == "synchronous":
            return Synchronous()
        if self.update == "hybrid":
            return Hybrid(num_workers, self.combine or "mean")
        if self.update == "summed":
            return Summed(self.sum or 1, self.combine or "sum")
        return Asynchronous()


@dataclass(frozen=True)
class Report:
    """Where a worker is."""

    num_finished: float
    """The mini-batches it has finished, with a finite gradient or without; infinite once it leaves."""
    age: float
    """The age of the weights at which the gradient that follows was taken; NaN: no gradient follows."""
    step_metadata: Tensor
    """What the server's optimizer needs to know about the gradient's mini-batch, `[k]`."""

    @property
    def has_gradient(self) -> bool:
        return not math.isnan(self.age)

    @property
    def is_last(self) -> bool:
        return math.isinf(self.num_finished)

    def encode(self) -> Tensor:
        """`[2 + k]` of float64."""
        import torch

        return torch.cat([torch.tensor([self.num_finished, self.age], dtype=torch.float64), self.step_metadata])

    @classmethod
    def decode(cls, message: Tensor) -> Report:
        """From what `encode` gave."""
        return cls(float(message[0]), float(message[1]), message[2:])


@dataclass(frozen=True)
class Push:
    """A gradient that has arrived and waits for its step."""

    worker: int
    report: Report
    gradient: Tensor


class Server:
    """The server of one shard. It decides everything in one coroutine, one message after another."""

    def __init__(self, me: Learner, piece: slice, options: ServerOptions) -> None:
        workers = options.workers(me.world)
        self._me, self._options = me, options
        self._rule = options.rule(len(workers))
        self._shard = me.keep(piece)
        self._announced: dict[int, Report] = {}  # of workers whose gradient is on its way
        self._waiting: list[Push] = []
        self._finished: dict[int, float] = dict.fromkeys(workers, 0.0)  # `num_finished` of each worker's last report
        self._asking: list[int] = []  # workers that want the weights, in the order in which they asked

    async def serve(self) -> None:
        """Serve until all workers have left and have the last weights."""
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
            tag = await self._attend(worker, await expected.pop(worker))
            if tag is not None:
                expected[worker] = me.receive(worker, like[tag], tag)
            for asking in [each for each in self._asking if self._grants(each)]:
                for sending in replies[asking]:
                    await sending
                replies[asking] = await self._answer(asking)
        for sending in [each for handles in replies.values() for each in handles]:
            await sending

    async def _attend(self, worker: int, message: Tensor) -> int | None:
        """Do what a worker's message asks for; the tag of its next message, None after its last one."""
        if worker in self._announced:
            told = self._announced.pop(worker)
            self._waiting.append(Push(worker, told, message))
            await self._note(worker, told)
            return REPORT
        told = Report.decode(message)
        if told.num_finished == self._finished[worker]:
            self._asking.append(worker)
            return None if told.is_last else REPORT
        if told.has_gradient and not told.is_last:
            self._announced[worker] = told
            return GRADIENT
        await self._note(worker, told)
        return REPORT

    async def _note(self, worker: int, told: Report) -> None:
        """A worker has finished a mini-batch, or leaves; make a step if one is due."""
        self._finished[worker] = told.num_finished
        if told.is_last:
            self._rule.leave(worker)
            is_due = self._have_all_left  # too few gradients for the rule, but no more will come
        else:
            is_due = self._rule.finish(worker, len(self._waiting))
        if is_due and self._waiting:
            await self._step()

    @property
    def _have_all_left(self) -> bool:
        return math.isinf(min(self._finished.values()))

    async def _step(self) -> None:
        """Make a step with the gradients that wait, in the order of their workers' ranks."""
        pushes, self._waiting = sorted(self._waiting, key=lambda push: push.worker), []
        read_at = [int(push.report.age) for push in pushes]
        staleness = self._shard.num_steps - sum(read_at) / len(read_at)
        scale = 1.0 / max(1.0, staleness) if self._options.scale_by_staleness else 1.0
        newest = max((push.report for push in pushes), key=lambda report: report.age)
        gradient = self._rule.combine([push.gradient for push in pushes])
        await self._shard.step(gradient, newest.step_metadata, read_at, scale)

    def _grants(self, worker: int) -> bool:
        """Whether a worker that asks for the weights gets them now.

        Under a staleness bound s, with c_l the mini-batches that worker l has finished, only while c_l - min_j c_j <= s
        (SSP; with `overlap` the gradient under way counts, too). A worker that has left gets the last weights.
        """
        if math.isinf(self._finished[worker]):
            return self._have_all_left
        bound = self._options.staleness_bound
        ahead = self._finished[worker] + self._options.overlap - min(self._finished.values())
        return (bound is None or ahead <= bound) and self._rule.grant(worker)

    async def _answer(self, worker: int) -> list[Handle[None]]:
        """Start sending the weights as they are now."""
        self._asking.remove(worker)
        import torch

        age = torch.tensor([self._shard.num_steps], dtype=torch.float64)
        weights = await self._shard.read()
        return [self._me.send(worker, age, AGE), self._me.send(worker, weights, WEIGHTS)]
