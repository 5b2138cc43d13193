"""Islands on the simulated clock.

Towards the others an island is one learner: its gradient is the mean of n mini-batches, and the n parts of its model
travel side by side. So it is simulated as one learner with a whole model and n mini-batches at a time, and reported as
n learners. With tensor parallelism it has one mini-batch at a time.

Its gradient takes as long as that of its slowest rank, and then the time in which the model is gathered twice, for
forward and for backward, and the gradient is scattered: three times (n - 1) messages of 1/n of the model. With tensor
parallelism it is the time of what the layers that are cut send, as in the first mini-batch, and in which the other
parameters are gathered. That this overlaps with computing, as it can on a GPU, is not assumed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from starling.checkpoint.state import LearnerState
from starling.engines.virtual.cluster import Cluster, ComputeTimes, Links
from starling.errors import ConfigError
from starling.strategies.islands import NO_ISLANDS
from starling.training.job import ClaimReport, EpochReport, Job, Observer, Silence, StepReport
from starling.training.stragglers import Delays, Stragglers
from starling.training.tensor_plan import traffic_of
from starling.training.tickets import TicketSequence
from starling.workload import Examples, Position, Ticket, Unit, Weighting, Workload

GATHERS_AND_SCATTERS = 3
"""All-gathers and reduce-scatters of the whole model in one pass."""


class SimulatedIslands:
    """What the virtual engine runs in the place of a job with islands: `job`, with `world` learners on `cluster`."""

    def __init__(self, job: Job, world: int, cluster: Cluster) -> None:
        compute, size = cluster.compute, job.island.size
        if job.faults:
            raise ConfigError("island: faults are not simulated with islands; leave out one of them")
        if compute.batched or compute.processes > 1:
            raise ConfigError("island: gradients of islands are computed one by one; leave out batched or processes")
        if cluster.nodes.size % size and size % cluster.nodes.size:
            raise ConfigError(
                f"cluster.nodes.size: islands of {size} neither fill nodes of {cluster.nodes.size} nor consist of "
                "them; choose a multiple or a divisor"
            )
        self._size, self._given, self._ranks = size, job, world
        self._batches = size // job.island.tensor
        self._links, self._compute = Links(cluster), compute
        self._traffic = traffic_of(job.workload) if job.island.tensor > 1 else None
        self.workload = Joined(job.workload, self._batches, job.weighting)
        schedule, budget = job.schedule, job.schedule.budget
        self.job = replace(
            job,
            workload=self.workload,
            island=NO_ISLANDS,
            budget=self._fewer_steps(job.budget),
            schedule=schedule.model_copy(update={"budget": budget and self._fewer_steps(budget)}),
            stragglers=Stragglers(),
            num_workers=0,
            checkpoint_every=job.checkpoint_every and -(-job.checkpoint_every // self._batches),
        )
        self.world = world // size
        self.cluster = _side_by_side(cluster, size)

    def times(self, name: int, num_bytes: int) -> ComputeTimes:
        """The gradient times of island `name`, whose whole weights have `num_bytes`; they include the communication
        within the island."""
        job, ranks = self._given, range(name * self._size, (name + 1) * self._size)
        gathers, reductions = [num_bytes] * GATHERS_AND_SCATTERS, []
        if self._traffic is not None:
            gathers, reductions = [self._traffic.whole_bytes, *self._traffic.gathers], list(self._traffic.reductions)
        # an all-reduce is a scatter and a gather
        seconds = sum(self._links.reduce_seconds(ranks, each) for each in gathers) / 2
        seconds += sum(self._links.reduce_seconds(ranks, each) for each in reductions)
        num_sent = (self._size - 1) * (sum(gathers) + 2 * sum(reductions))  # by all ranks
        times = [ComputeTimes(self._compute, job.seed, rank) for rank in ranks]
        delays = [Delays(job.stragglers, job.seed, rank) for rank in ranks]
        return _IslandTimes(times, delays, seconds, num_sent)

    def observer(self, observer: Observer) -> Observer:
        """Reports the ranks of the islands to `observer`."""
        return _EachRank(observer, self.workload, self._size, self._batches)

    def state(self, state: LearnerState) -> LearnerState:
        """An island's state, at a position in the given job's tickets."""
        return replace(state, world=self._ranks, position=self.workload.position(state.position))

    def _fewer_steps(self, budget: Any) -> Any:
        return budget.model_copy(update={"steps": None if budget.steps is None else -(-budget.steps // self._batches)})


def _side_by_side(cluster: Cluster, size: int) -> Cluster:
    """The cluster of islands in the place of ranks: the messages of an island travel side by side."""
    nodes, link = cluster.nodes, cluster.link
    uplink = "unlimited" if cluster.uplink is None else cluster.uplink * max(1, size // nodes.size)
    inside = {"size": max(1, nodes.size // size), "bandwidth": nodes.bandwidth * size, "uplink": uplink}
    wider = {"nodes": nodes.model_copy(update=inside)}
    return cluster.model_copy(update=wider | {"link": link.model_copy(update={"bandwidth": link.bandwidth * size})})


class _IslandTimes(ComputeTimes):
    """The slowest rank's time, and that of the communication within the island."""

    def __init__(self, times: Sequence[ComputeTimes], delays: Sequence[Delays], seconds: float, num_bytes: int) -> None:
        self._times, self._delays = times, delays
        self.communication_seconds, self.communication_bytes = seconds, num_bytes

    def draw(self) -> float:
        drawn = [times.draw() for times in self._times]
        slowest = max(each + delays.after(each) for each, delays in zip(drawn, self._delays, strict=True))
        return slowest + self.communication_seconds


@dataclass(frozen=True)
class _Part:
    """A micro-batch of one rank, and its weight in the island's mini-batch."""

    examples: Examples
    weight: float

    @property
    def num_examples(self) -> int:
        return self.examples.num_examples

    @property
    def num_frames(self) -> int:
        return self.examples.num_frames

    @property
    def seconds(self) -> float:
        return self.examples.seconds

    def to(self, device: torch.device) -> Self:
        return replace(self, examples=self.examples.to(device))


class Joined(Workload[_Part]):
    """Another workload's mini-batches, n of them at a time, one for each rank of an island. Their mean gradient has the
    weights that `weighting` gives mini-batches."""

    def __init__(self, of: Workload[Any], size: int, weighting: Weighting) -> None:
        self.of, self._size, self._weighting = of, size, weighting
        self.num_parts = of.num_parts
        self.sequence = TicketSequence(of, Ticket(0, 0, 0))
        self.loaded: dict[int, list[Sequence[Examples]]] = {}
        """The mini-batches of each rank, by the number of the island's ticket, until they are reported."""

    def tickets(self, ticket: Ticket) -> Iterator[Ticket]:
        """The ranks' tickets."""
        for member in range(self._size):
            part = (ticket.part * self._size + member) % self.num_parts
            yield replace(self.sequence[ticket.step * self._size + member], part=part)

    def position(self, position: Position) -> Position:
        """A position in the other workload's tickets."""
        outstanding = [each for ticket in position.outstanding for each in self.tickets(ticket)]
        return Position(self.sequence[position.next_ticket.step * self._size], tuple(outstanding))

    def make_model(self) -> nn.Module:
        return self.of.make_model()

    def num_batches(self, epoch: int) -> int:
        before, own = sum(map(self.of.num_batches, range(epoch))), self.of.num_batches(epoch)
        if own < self._size:
            raise ConfigError(
                f"island: epoch {epoch + 1} has {own} mini-batches for an island of {self._size}, which cannot be "
                "simulated; choose smaller mini-batches or islands"
            )
        return -(-(before + own) // self._size) - -(-before // self._size)

    def load(self, ticket: Ticket) -> Sequence[_Part]:
        found, parts = [], []
        for each in self.tickets(ticket):
            batch = self.of.load(each)
            size = 1.0 if self._weighting == "batches" else self.of.planned_size(each, self._weighting)
            weights = [self.of.weight(examples) for examples in batch]
            if batch and not any(weights):
                weights[0] = 1.0
            parts += [_Part(one, size * own / sum(weights)) for one, own in zip(batch, weights, strict=True)]
            found.append(batch)
        if parts:
            self.loaded[ticket.step] = found
        return parts

    def loss(self, model: nn.Module, examples: _Part) -> Tensor:
        return self.of.loss(model, examples.examples)

    def weight(self, examples: _Part) -> float:
        return examples.weight

    def planned_size(self, ticket: Ticket, unit: Unit) -> float:
        return sum(self.of.planned_size(each, unit) for each in self.tickets(ticket))


class _EachRank(Silence):
    """Reports each rank of an island, with an equal share of the bytes; and each mini-batch of the rank that computed
    it, or of the first of them."""

    def __init__(self, observer: Observer, workload: Joined, size: int, num_batches: int) -> None:
        self._observer, self._workload, self._size, self._batches = observer, workload, size, num_batches

    @property
    def saves(self) -> bool:
        return self._observer.saves

    def on_claim(self, report: ClaimReport) -> None:
        workload = self._workload
        batches = workload.loaded.get(report.ticket.step, ())  # none without data
        for member, (ticket, batch) in enumerate(zip(workload.tickets(report.ticket), batches, strict=False)):
            self._observer.on_claim(ClaimReport.of(report.rank * self._size + member, ticket, batch))

    def on_step(self, report: StepReport) -> None:
        workload = self._workload
        tickets, batches = list(workload.tickets(report.ticket)), workload.loaded.pop(report.ticket.step)
        for member, (ticket, batch) in enumerate(zip(tickets, batches, strict=True)):
            self._observer.on_step(
                replace(
                    report,
                    rank=report.rank * self._size + member,
                    ticket=ticket,
                    num_batches=workload.of.num_batches(ticket.epoch),
                    num_examples=sum(examples.num_examples for examples in batch),
                    num_frames=sum(examples.num_frames for examples in batch),
                    audio_seconds=sum(examples.seconds for examples in batch),
                )
            )

    def on_epoch(self, report: EpochReport, state: LearnerState) -> None:
        averaging = replace(report.averaging, bytes_sent=report.averaging.bytes_sent // self._size)
        for member in range(self._size):
            rank, num_steps = report.rank * self._size + member, report.num_steps if member < self._batches else 0
            self._observer.on_epoch(replace(report, rank=rank, num_steps=num_steps, averaging=averaging), state)

    def on_barrier(self, state: LearnerState) -> None:
        self._observer.on_barrier(state)
