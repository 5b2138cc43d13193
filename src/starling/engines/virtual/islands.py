"""Islands on the simulated clock.

Towards the others an island is one learner: its gradient is the mean of n mini-batches, and the n parts of its model
travel side by side. So it is simulated as one learner with a whole model and a batch share of n, and reported as n
learners. With tensor parallelism it has one mini-batch at a time.

Its gradient takes as long as that of its slowest rank, and then the time in which the model is gathered twice, for
forward and for backward, and the gradient is scattered: three times (n - 1) messages of 1/n of the model. With tensor
parallelism it is the time of what the layers that are cut send, as in the first mini-batch, and in which the other
parameters are gathered. That this overlaps with computing, as it can on a GPU, is not assumed.
"""

from collections.abc import Sequence
from dataclasses import replace

from starling.checkpoint.state import LearnerState
from starling.engines.virtual.cluster import Cluster, ComputeTimes, Links
from starling.errors import ConfigError
from starling.strategies.islands import NO_ISLANDS
from starling.training.job import ClaimReport, EpochReport, Job, Observer, Silence, StepReport
from starling.training.stragglers import Delays, Stragglers
from starling.training.tensor_plan import traffic_of

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
        self.ranks_per_learner = size // job.island.learners_per_batch
        self._links, self._compute = Links(cluster), compute
        self._traffic = traffic_of(job.workload) if job.island.tensor > 1 else None
        self.job = replace(job, island=NO_ISLANDS, stragglers=Stragglers())
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
        return _EachRank(observer, self._size, self.ranks_per_learner)

    def state(self, state: LearnerState) -> LearnerState:
        """An island's state, among as many learners as there are ranks."""
        return replace(state, world=self._ranks)


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


class _EachRank(Silence):
    """Reports each rank of an island, with an equal share of the bytes; and each mini-batch of the rank that computed
    it, or of the first of them. The ranks' tickets follow each other, and the first is number 0."""

    def __init__(self, observer: Observer, size: int, num_batches: int) -> None:
        self._observer, self._size, self._batches = observer, size, num_batches

    @property
    def saves(self) -> bool:
        return self._observer.saves

    def on_claim(self, report: ClaimReport) -> None:
        self._observer.on_claim(replace(report, rank=self._rank(report)))

    def on_step(self, report: StepReport) -> None:
        self._observer.on_step(replace(report, rank=self._rank(report)))

    def _rank(self, report: ClaimReport | StepReport) -> int:
        return report.rank * self._size + report.ticket.step % self._batches

    def on_epoch(self, report: EpochReport, state: LearnerState) -> None:
        averaging = replace(report.averaging, bytes_sent=report.averaging.bytes_sent // self._size)
        for member in range(self._size):
            rank, num_steps = report.rank * self._size + member, report.num_steps if member < self._batches else 0
            self._observer.on_epoch(replace(report, rank=rank, num_steps=num_steps, averaging=averaging), state)

    def on_barrier(self, state: LearnerState) -> None:
        self._observer.on_barrier(state)
