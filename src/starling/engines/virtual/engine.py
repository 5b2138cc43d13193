"""The virtual engine: all learners in one process, on a simulated clock, with real gradients.

The same seed gives the same events in the same order, and `Outcome.event_hash` proves it. When nothing is left to
happen while a learner waits, that is a deadlock, and the error says which learner waits for which.

Learners may die, pause, be cut off or join at any event: the living continue in a new membership, as processes do.
"""

import gc
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import simpy
import torch
from simpy.core import EmptySchedule

from starling.checkpoint.state import LearnerState
from starling.engines.virtual.batching import BatchedGradients
from starling.engines.virtual.cluster import Cluster
from starling.engines.virtual.computation import Computation, HostProcesses, RealGradients
from starling.engines.virtual.islands import SimulatedIslands
from starling.engines.virtual.learner import Failed, VirtualLearner
from starling.engines.virtual.membership import VirtualMembership
from starling.engines.virtual.simulation import Simulation, VirtualLoss
from starling.errors import ConfigError, PeerLost
from starling.strategies.islands import NO_ISLANDS
from starling.training.job import Job, Observer, Silence
from starling.training.membership import Membership, MembershipObserver
from starling.training.succession import MembershipStart, next_membership, plan_after
from starling.workload import Position


@dataclass(frozen=True)
class Outcome:
    """How a virtual run ended."""

    states: list[LearnerState]
    """Of the learners that are left, by rank."""
    seconds: float
    """On the simulated clock."""
    num_events: int
    event_hash: str
    """SHA-256 over every event: time, learner, kind, and the bits of every loss."""
    losses: tuple[VirtualLoss, ...] = ()
    """The learners that died, in order."""
    num_memberships: int = 1
    """1, and one more for each membership change."""


class VirtualEngine:
    """`world` learners of `job` on the simulated `cluster`.

    When learners die the others continue; without `survives_losses` the run ends with `PeerLost` as soon as a death is
    noticed. `changes` is told of each membership change. `computation` computes the gradients; by default for real, on
    `device`.
    """

    def __init__(
        self,
        job: Job,
        world: int,
        cluster: Cluster | None = None,
        observer: Observer | None = None,
        start: Sequence[LearnerState] | None = None,
        device: torch.device = torch.device("cpu"),  # noqa: B008 - devices are values
        survives_losses: bool = True,
        changes: MembershipObserver | None = None,
        computation: Computation | None = None,
    ) -> None:
        job.validate(world)
        cluster, observer, times = cluster or Cluster(), observer or Silence(), None
        self._islands = None if job.island == NO_ISLANDS else SimulatedIslands(job, world, cluster)
        if self._islands is not None:
            if start is not None:
                raise ConfigError("island: a simulation with islands cannot resume; leave out resume or island")
            job, world, cluster = self._islands.job, self._islands.world, self._islands.cluster
            observer = self._islands.observer(observer)
        computation = computation or _computation(job, cluster, device)
        if self._islands is not None:
            times = partial(self._islands.times, num_bytes=computation.new_replica().weights.nbytes)
        self._job, self._computation, self._observer = job, computation, observer
        self._survives_losses, self._changes = survives_losses, changes or MembershipObserver()
        self._simulation = Simulation(job, cluster, times)
        for rank in range(world):
            self._simulation.begin_life(rank).state = start[rank] if start else None
        position, minutes = (start[0].position, start[0].minutes) if start else (Position(), 0.0)
        first, plan = Membership(0, tuple(range(world))), MembershipStart(world, position, minutes)
        seconds = [cluster.compute.seconds * job.stragglers.slow.get(name, 1.0) for name in first.members]
        plan = plan.with_shares(job, first.members, seconds if job.batch_shares == "auto" else None)
        self._current = self._begin(first, plan, list(start) if start else [None] * world)

    def run(self) -> Outcome:
        """Run all events. Raises what a learner raised, `Deadlock`, and `PeerLost` if the learners cannot continue."""
        simulation = self._simulation
        simulation.schedule_faults()
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
        begun.learners += [VirtualLearner(begun, rank, self._observer, start) for rank, start in enumerate(starts)]
        self._simulation.present = begun
        return begun

    def _wait_for(self, event: simpy.Event) -> None:
        step = self._simulation.environment.step
        try:
            while event.callbacks is not None:  # it is not processed
                step()
        except EmptySchedule:
            raise self._current.deadlock() from None

    def _regroup(self) -> None:
        """The living continue in a new membership, from what all have done."""
        before, simulation = self._current, self._simulation
        for life, learner in zip(before.lives, before.learners, strict=True):
            if not life.is_dead:
                learner.end_membership(before.membership.number)
        self._changes.pause()
        self._wait_for(simulation.environment.timeout(simulation.cluster.watch.regroup))
        living = simulation.living()
        change = Membership(before.membership.number + 1, living, "; ".join(before.reasons))
        if not self._survives_losses:
            raise PeerLost(change.reason)
        following = next_membership(self._job, before.membership, change)
        for name in set(living) - set(following.members):
            simulation.lives[name].death = "left with its super-learner"
        lives = [simulation.lives[name] for name in following.members]
        pasts = [life.past for life in lives]
        plan = plan_after(before.plan, pasts, self._job, lambda: before.batches.done, following.members)
        starts = [plan.state(rank, life.state) for rank, life in enumerate(lives)]
        if plan.source is not None:  # the takers have its state, and all have its strategy state
            source = starts[plan.source]
            copies = [source.copy() if rank in plan.takers else source for rank in range(plan.world)]
            starts = [plan.with_source(rank, starts[rank], copies[rank]) for rank in range(plan.world)]
        self._current = self._begin(following, plan, starts)
        self._changes.begin(following, plan.position, True)


@contextmanager
def _little_garbage(has_cycles: bool) -> Generator[None, None, None]:
    """Let the garbage collector search only what is made within this context, or nothing: to search all that a process
    has imported takes longer than many small gradients, and thousands of learners, whose events leave no cycles, take a
    third of the time of a simulation of time alone."""
    freezes, was_enabled = not gc.get_freeze_count(), gc.isenabled()  # otherwise the program has made its own choice
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
