"""The virtual engine: all learners in one process, on a simulated clock, with real gradients.

The same seed gives the same events in the same order, and `Outcome.event_hash` proves it. When nothing is left to
happen while a learner waits, that is a deadlock, and the error says which learner waits for which.

Learners may die, pause, be cut off or join at any event: the living continue in a new membership, as processes do.
"""

import gc
import hashlib
import struct
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import simpy
import torch
from simpy.core import EmptySchedule

from starling.checkpoint.state import LearnerState
from starling.engines.virtual.batching import BatchedGradients
from starling.engines.virtual.cluster import Cluster
from starling.engines.virtual.computation import Computation, RealGradients
from starling.engines.virtual.faults import VirtualFaults, VirtualLoss
from starling.engines.virtual.host_processes import HostProcesses
from starling.engines.virtual.islands import SimulatedIslands
from starling.engines.virtual.lives import Lives
from starling.engines.virtual.membership import Failed, Simulation, VirtualMembership
from starling.errors import ConfigError, PeerLost
from starling.strategies.islands import NO_ISLANDS
from starling.training.job import Job, Observer, Silence
from starling.training.loading import Loader
from starling.training.membership import IgnoreMembership, Membership, MembershipObserver
from starling.training.succession import MembershipStart, next_membership, plan_after
from starling.workload import Position

__all__ = ["Outcome", "VirtualEngine", "VirtualLoss"]


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
        self._job = job
        self._cluster = cluster
        self._environment = simpy.Environment()
        self._lives = Lives(job, self._cluster, self._environment, times)
        self._faults = VirtualFaults(self._environment, self._cluster.watch, self._lives, job.faults)
        self._observer = observer
        self._survives_losses = survives_losses
        self._changes = changes or IgnoreMembership()
        self._num_events = 0
        self._hash = hashlib.sha256()
        self._simulation = Simulation(
            job=job,
            cluster=self._cluster,
            environment=self._environment,
            computation=computation,
            loader=Loader(job.workload, job.num_workers),
            faults=self._faults,
            record=self._record,
        )
        for rank in range(world):
            self._lives.begin(rank).state = start[rank] if start else None
        position, minutes = (start[0].position, start[0].minutes) if start else (Position(), 0.0)
        first, plan = Membership(0, tuple(range(world))), MembershipStart(world, position, minutes)
        seconds = [cluster.compute.seconds * job.stragglers.slow.get(name, 1.0) for name in first.members]
        plan = plan.with_shares(job, first.members, seconds if job.batch_shares == "auto" else None)
        self._current = self._begin(first, plan, list(start) if start else [None] * world)

    def run(self) -> Outcome:
        """Run all events. Raises what a learner raised, `Deadlock`, and `PeerLost` if the learners cannot continue."""
        self._faults.begin()
        try:
            with _only_new_garbage():
                while True:
                    self._current.begin()
                    self._wait_for(self._current.over)
                    if not self._current.reasons:
                        break
                    self._regroup()
            seconds = float(self._environment.now)
            states = self._current.finish()
            if self._islands is not None:
                states = [self._islands.state(state) for state in states]
        except Failed as failed:
            raise failed.error from None
        finally:
            self._simulation.loader.close()
            self._simulation.computation.close()
        return Outcome(
            states,
            seconds,
            self._num_events,
            self._hash.hexdigest(),
            tuple(self._faults.losses),
            self._current.membership.number + 1,
        )

    def _record(self, name: int, kind: str, detail: bytes) -> None:
        """Add an event of a learner to the hash, and inject the faults that are placed at it."""
        self._num_events += 1
        self._hash.update(struct.pack("<dq", self._environment.now, name) + kind.encode() + b"\0" + detail)
        if self._faults.are_placed_at_events:
            self._faults.after_event(self._num_events)

    def _begin(
        self, membership: Membership, plan: MembershipStart, starts: Sequence[LearnerState | None]
    ) -> VirtualMembership:
        lives = [self._lives.by_name[name] for name in membership.members]
        begun = VirtualMembership(self._simulation, membership, plan, lives, starts, self._observer)
        self._faults.present = begun
        return begun

    def _wait_for(self, event: simpy.Event) -> None:
        step = self._environment.step
        try:
            while event.callbacks is not None:  # it is not processed
                step()
        except EmptySchedule:
            raise self._current.deadlock() from None

    def _regroup(self) -> None:
        """The living continue in a new membership, from what all have done."""
        before = self._current
        for learner in before.learners:
            if not learner.life.is_dead:
                learner.course.leave(before.membership.number)
        self._changes.pause()
        self._wait_for(self._environment.timeout(self._cluster.watch.regroup))
        living = self._lives.living()
        change = Membership(before.membership.number + 1, living, "; ".join(before.reasons))
        if not self._survives_losses:
            raise PeerLost(change.reason)
        following = next_membership(self._job, before.membership, change)
        for name in set(living) - set(following.members):
            self._lives.by_name[name].death = "left with its super-learner"
        pasts = [self._lives.by_name[name].past for name in following.members]
        plan = plan_after(before.plan, pasts, self._job, lambda: before.batches.done, following.members)
        self._current = self._begin(following, plan, self._starts(following, plan))
        self._changes.begin(following, plan.position, True)

    def _starts(self, membership: Membership, plan: MembershipStart) -> list[LearnerState]:
        """The states with which the members begin; the takers have that of another member, whose strategy state all
        have."""
        lives = [self._lives.by_name[name] for name in membership.members]
        found = [plan.state(rank, life.state) for rank, life in enumerate(lives)]
        if plan.source is not None:
            source = found[plan.source]
            for rank in plan.takers:
                theirs = source.copy()
                found[rank] = replace(
                    found[rank], weights=theirs.weights, buffers=theirs.buffers, optimizer=theirs.optimizer
                )
            found = [state.with_strategy_of(source) for state in found]
        return found


@contextmanager
def _only_new_garbage() -> Generator[None, None, None]:
    """Let the garbage collector search only what is made within this context: to search all that a process has imported
    takes longer than many small gradients."""
    if gc.get_freeze_count():  # the program has made its own choice
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _computation(job: Job, cluster: Cluster, device: torch.device) -> Computation:
    if cluster.compute.processes > 1:
        return HostProcesses(job, device, cluster.compute.processes)
    return BatchedGradients(job, device) if cluster.compute.batched else RealGradients(job, device)
