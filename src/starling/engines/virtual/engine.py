"""The virtual engine, which runs all learners in one process, on a simulated clock, with real gradients.

The same seed gives the same events in the same order; compare `Outcome.event_hash` to check this. If no event is left
while a learner waits, the run is in a deadlock, and the error says for which learner each learner waits.

Learners may die, pause, be cut off or join at any event. The survivors continue in a new membership, as on the
`processes` engine.
"""

import gc
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import simpy
import torch
from simpy.core import EmptySchedule

from starling.checkpoint.state import LearnerState
from starling.engines.virtual.batching import BatchedGradients
from starling.engines.virtual.cluster import Cluster, ComputeTimes, Links
from starling.engines.virtual.computation import Computation, HostProcesses, RealGradients
from starling.engines.virtual.learner import Failed, VirtualLearner
from starling.engines.virtual.membership import VirtualMembership
from starling.engines.virtual.simulation import Simulation, VirtualLoss
from starling.errors import ConfigError, PeerLost
from starling.strategies.islands import NO_ISLANDS
from starling.training.job import ClaimReport, EpochReport, Job, Observer, StepReport
from starling.training.membership import Membership, MembershipObserver
from starling.training.speeds import Delays, Stragglers
from starling.training.succession import MembershipStart, next_membership, plan_after
from starling.training.tensor_plan import traffic_of
from starling.workload import Position

GATHERS_AND_SCATTERS = 3
"""Number of all-gathers and reduce-scatters of the whole model in one forward and backward pass."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a virtual run."""

    states: list[LearnerState]
    """The states of the remaining learners, by rank."""
    seconds: float
    """Simulated time."""
    num_events: int
    event_hash: str
    """SHA-256 over every event: time, learner, kind, and the bits of every loss."""
    losses: tuple[VirtualLoss, ...] = ()
    """The learners that died, in order."""
    num_memberships: int = 1
    """Number of memberships: 1, and one more for each membership change."""


class VirtualEngine:
    """Runs `world` learners of `job` on the simulated `cluster`.

    With `survives_losses`, the other learners continue when learners die. Without it, the run ends with `PeerLost` as
    soon as a death is noticed. `changes` is called at each membership change. `computation` computes the gradients; if
    it is a device, real gradients are computed on that device.
    """

    def __init__(
        self,
        job: Job,
        world: int,
        cluster: Cluster | None = None,
        observer: Observer | None = None,
        start: Sequence[LearnerState] | None = None,
        survives_losses: bool = True,
        changes: MembershipObserver | None = None,
        computation: Computation | torch.device = torch.device("cpu"),  # noqa: B008 - devices are values
    ) -> None:
        job.validate(world)
        cluster, observer, times, ranks_per_learner = cluster or Cluster(), observer or Observer(), None, 1
        self._islands = None if job.island == NO_ISLANDS else SimulatedIslands(job, world, cluster, observer)
        if self._islands is not None:
            if start is not None:
                raise ConfigError("island: a simulation with islands cannot resume; leave out resume or island")
            job, world, cluster, observer = self._islands.job, self._islands.world, self._islands.cluster, self._islands
            ranks_per_learner = self._islands.ranks_per_learner
        if isinstance(computation, torch.device):
            computation = _computation(job, cluster, computation)
        if self._islands is not None:
            times = partial(self._islands.times, num_bytes=computation.new_replica().weights.nbytes)
        self._job, self._computation, self._observer = job, computation, observer
        self._survives_losses, self._changes = survives_losses, changes or MembershipObserver()
        self._simulation = Simulation(job, cluster, times, ranks_per_learner)
        for rank in range(world):
            self._simulation.begin_life(rank).state = start[rank] if start else None
        position, minutes = (start[0].position, start[0].minutes) if start else (Position(), 0.0)
        first, plan = Membership(0, tuple(range(world))), MembershipStart(world, position, minutes)
        seconds = [cluster.compute.seconds * job.stragglers.slow.get(name, 1.0) for name in first.members]
        plan = plan.with_shares(job, first.members, seconds if job.batch_shares == "auto" else None)
        self._current = self._begin(first, plan, list(start) if start else [None] * world)

    @property
    def now(self) -> float:
        """The simulated time in seconds."""
        return self._simulation.now

    def run(self) -> Outcome:
        """Run all events. Raises `Deadlock`, the exceptions that learners raise, and `PeerLost` if the learners cannot
        continue."""
        simulation = self._simulation
        try:
            with _little_garbage(has_cycles=self._computation.holds_weights):
                while True:
                    self._current.begin()
                    self._wait_for(self._current.over)
                    if not self._current.reasons:
                        break
                    self._regroup()
            seconds = simulation.now
            states = self._current.finish()
            if self._islands is not None:
                states = [self._islands.state(state) for state in states]
        except Failed as failed:
            raise failed.error from None
        finally:
            simulation.loader.close()
            self._computation.close()
        return Outcome(
            states,
            seconds,
            simulation.num_events,
            simulation.event_hash.hexdigest(),
            tuple(simulation.losses),
            self._current.membership.number + 1,
        )

    def _begin(
        self, membership: Membership, plan: MembershipStart, starts: Sequence[LearnerState | None]
    ) -> VirtualMembership:
        begun = VirtualMembership(self._simulation, self._computation, membership, plan)
        begun.learners += [self._learner(begun, rank, start) for rank, start in enumerate(starts)]
        self._simulation.present = begun
        return begun

    def _learner(self, membership: VirtualMembership, rank: int, start: LearnerState | None) -> VirtualLearner:
        return VirtualLearner(membership, rank, self._observer, start)

    def _wait_for(self, event: simpy.Event) -> None:
        step = self._simulation.environment.step
        try:
            while event.callbacks is not None:  # the event has not been processed
                step()
        except EmptySchedule:
            raise self._current.deadlock() from None

    def _regroup(self) -> None:
        """Continue with the survivors in a new membership, from everything that learners have done."""
        before, simulation = self._current, self._simulation
        for life, learner in zip(before.lives, before.learners, strict=True):
            if not life.is_dead:
                learner.end_membership(before.membership.number)
        self._changes.pause()
        self._wait_for(simulation.environment.timeout(simulation.cluster.watch.regroup))
        following, plan = self._after(before)
        lives = [simulation.lives[name] for name in following.members]
        starts = [plan.state(rank, life.state) for rank, life in enumerate(lives)]
        if plan.source is not None:  # the takers copy its state, and all learners copy its strategy state
            source = starts[plan.source]
            copies = [source.copy() if rank in plan.takers else source for rank in range(plan.world)]
            starts = [plan.with_source(rank, starts[rank], copies[rank]) for rank in range(plan.world)]
        self._current = self._begin(following, plan, starts)
        self._changes.begin(following, plan.position, True)

    def _after(self, before: VirtualMembership) -> tuple[Membership, MembershipStart]:
        """The next membership and its plan."""
        simulation = self._simulation
        living = simulation.living()
        change = Membership(before.membership.number + 1, living, "; ".join(before.reasons))
        if not self._survives_losses:
            raise PeerLost(change.reason)
        following = next_membership(self._job, before.membership, change)
        for name in set(living) - set(following.members):
            simulation.lives[name].death = "left with its super-learner"
        pasts = [simulation.lives[name].past for name in following.members]
        plan = plan_after(before.plan, pasts, self._job, lambda: before.batches.done, following.members)
        return following, plan


@contextmanager
def _little_garbage(has_cycles: bool) -> Generator[None, None, None]:
    """Let the garbage collector search only the objects that are created within this context or, unless `has_cycles`,
    none. A search of everything that a process has imported takes longer than many small gradients. With thousands of
    learners, whose events leave no cycles, such searches take a third of the time of a timing-only simulation."""
    freezes, was_enabled = not gc.get_freeze_count(), gc.isenabled()  # frozen objects: the program has its own policy
    if freezes:
        gc.freeze()
    if not has_cycles:
        gc.disable()
    try:
        yield
    finally:
        if freezes:
            gc.unfreeze()
        if was_enabled:
            gc.enable()


def _computation(job: Job, cluster: Cluster, device: torch.device) -> Computation:
    if cluster.compute.processes > 1:
        return HostProcesses(job, device, cluster.compute.processes)
    return BatchedGradients(job, device) if cluster.compute.batched else RealGradients(job, device)


class SimulatedIslands(Observer):
    """The run that the virtual engine simulates in place of a job with islands: `job`, with `world` learners on
    `cluster`.

    To the other learners, an island of n ranks is one learner: its gradient is the mean of n mini-batches, and the n
    parts of its model are sent side by side. Therefore it is simulated as one learner with a whole model and a batch
    share of n, and reported as n learners. With tensor parallelism, the island computes one mini-batch at a time.

    The gradient of an island takes as long as the gradient of its slowest rank, plus the time in which the model is
    gathered twice, for forward and for backward, and the gradient is scattered: three times (n - 1) messages of 1/n of
    the model. With tensor parallelism, the additional time is that of the cut layers' messages, as in the first
    mini-batch, and of gathering the other parameters. No overlap with computation is assumed, although a GPU allows
    overlap.

    Each rank of an island is reported to `observer` with an equal share of the bytes. Each mini-batch is reported for
    the rank that computed it, or for the first of several ranks. The ranks' tickets follow each other, and the first is
    number 0.
    """

    def __init__(self, job: Job, world: int, cluster: Cluster, observer: Observer) -> None:
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
        self._size, self._given, self._ranks, self._observer = size, job, world, observer
        self.ranks_per_learner = size // job.island.tensor
        self._links, self._compute = Links(cluster), compute
        self._traffic = traffic_of(job.workload) if job.island.tensor > 1 else None
        self.job = replace(job, island=NO_ISLANDS, stragglers=Stragglers())
        self.world = world // size
        self.cluster = _side_by_side(cluster, size)

    def times(self, name: int, num_bytes: int) -> ComputeTimes:
        """Return the gradient times of island `name`, whose whole weights have `num_bytes`. The times include the
        communication within the island."""
        job, ranks = self._given, range(name * self._size, (name + 1) * self._size)
        gathers, reductions = [num_bytes] * GATHERS_AND_SCATTERS, []
        if self._traffic is not None:
            gathers, reductions = [self._traffic.whole_bytes, *self._traffic.gathers], list(self._traffic.reductions)
        # an all-reduce consists of a scatter and a gather
        seconds = sum(self._links.reduce_seconds(ranks, each) for each in gathers) / 2
        seconds += sum(self._links.reduce_seconds(ranks, each) for each in reductions)
        num_sent = (self._size - 1) * (sum(gathers) + 2 * sum(reductions))  # the bytes that all ranks send
        times = [ComputeTimes(self._compute, job.seed, rank) for rank in ranks]
        delays = [Delays(job.stragglers, job.seed, rank) for rank in ranks]
        return _IslandTimes(times, delays, seconds, num_sent)

    def state(self, state: LearnerState) -> LearnerState:
        """Convert an island's state to the state in a run that counts each rank of the island as a learner."""
        return replace(state, world=self._ranks)

    @property
    def saves(self) -> bool:
        return self._observer.saves

    def on_claim(self, report: ClaimReport) -> None:
        self._observer.on_claim(replace(report, rank=self._rank(report)))

    def on_step(self, report: StepReport) -> None:
        self._observer.on_step(replace(report, rank=self._rank(report)))

    def _rank(self, report: ClaimReport | StepReport) -> int:
        return report.rank * self._size + report.ticket.step % self.ranks_per_learner

    def on_epoch(self, report: EpochReport, state: LearnerState) -> None:
        averaging = replace(report.averaging, bytes_sent=report.averaging.bytes_sent // self._size)
        for member in range(self._size):
            rank = report.rank * self._size + member
            num_steps = report.num_steps if member < self.ranks_per_learner else 0
            self._observer.on_epoch(replace(report, rank=rank, num_steps=num_steps, averaging=averaging), state)

    def on_barrier(self, state: LearnerState) -> None:
        self._observer.on_barrier(state)


def _side_by_side(cluster: Cluster, size: int) -> Cluster:
    """Return the cluster in which islands take the place of ranks. The messages of an island are sent side by side."""
    nodes, link = cluster.nodes, cluster.link
    uplink = "unlimited" if cluster.uplink is None else cluster.uplink * max(1, size // nodes.size)
    inside = {"size": max(1, nodes.size // size), "bandwidth": nodes.bandwidth * size, "uplink": uplink}
    wider = {"nodes": nodes.model_copy(update=inside)}
    return cluster.model_copy(update=wider | {"link": link.model_copy(update={"bandwidth": link.bandwidth * size})})


class _IslandTimes(ComputeTimes):
    """The gradient times of an island. Each is the time of the slowest rank plus the time of the communication within
    the island."""

    def __init__(self, times: Sequence[ComputeTimes], delays: Sequence[Delays], seconds: float, num_bytes: int) -> None:
        self._times, self._delays = times, delays
        self.communication_seconds, self.communication_bytes = seconds, num_bytes

    def draw(self) -> float:
        drawn = [times.draw() for times in self._times]
        slowest = max(each + delays.after(each) for each, delays in zip(drawn, self._delays, strict=True))
        return slowest + self.communication_seconds
