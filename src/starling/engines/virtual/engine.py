"""The virtual engine: all learners in one process, on a simulated clock, with real gradients.

The same seed gives the same events in the same order, and `Outcome.event_hash` proves it. When nothing is left to
happen while a learner waits, that is a deadlock, and the error says who waits for whom.

Learners may die, stand still, be cut off or come at any event: the living go on in a new view, as processes do.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

import simpy
import torch
from simpy.core import EmptySchedule

from starling.checkpoint.state import LearnerState
from starling.engines.virtual.cluster import Cluster, ComputeTimes
from starling.engines.virtual.faults import VirtualFaults, VirtualLoss
from starling.engines.virtual.learner import Life, VirtualLearner
from starling.engines.virtual.membership import Failed, VirtualMembership
from starling.errors import PeerLost
from starling.training.faults import FaultsOf
from starling.training.flat import FlatModel
from starling.training.job import Job, Observer, Silence
from starling.training.loading import Loader
from starling.training.membership import IgnoreMembership, Membership, MembershipObserver
from starling.training.stragglers import Delays
from starling.training.succession import Plan, next_membership, plan_after
from starling.workload import Position

__all__ = ["Outcome", "VirtualEngine", "VirtualLearner", "VirtualLoss"]


@dataclass(frozen=True)
class Outcome:
    """How a virtual run ended."""

    states: list[LearnerState]
    """Of the learners that are left, by rank."""
    seconds: float
    """On the simulated clock."""
    num_events: int
    event_hash: str
    """SHA-256 over every event: when, who, what, and the bits of every loss."""
    losses: tuple[VirtualLoss, ...] = ()
    """Who died on the way, in their order."""
    num_views: int = 1
    """How often the learners began together: once, and again after each change of who is there."""


class VirtualEngine:
    """`world` learners of `job` on the simulated `cluster`.

    When learners die the others go on; where a death is not borne (`bears_losses` False) the run ends with `PeerLost`
    as soon as it is noticed. `views` is told of each change, as a learner process tells it.
    """

    def __init__(
        self,
        job: Job,
        world: int,
        cluster: Cluster | None = None,
        observer: Observer | None = None,
        start: Sequence[LearnerState] | None = None,
        device: torch.device = torch.device("cpu"),  # noqa: B008 - devices are values
        bears_losses: bool = True,
        views: MembershipObserver | None = None,
    ) -> None:
        job.validate(world)
        self.job = job
        self.cluster = cluster or Cluster()
        self.environment = simpy.Environment()
        self.model = FlatModel(job.workload.make_model(), device)
        self.first_buffers = self.model.own_buffers()
        """Those of the model with which learners begin."""
        self.workspace = torch.empty_like(self.model.weights)
        """For the step of any learner, `[P]`."""
        self.loader = Loader(job.workload, job.num_workers)
        self.num_events = 0
        self.lives: dict[int, Life] = {}
        """Everybody who ever lived, by name."""
        self._hash = hashlib.sha256()
        self._observer = observer or Silence()
        self._bears_losses = bears_losses
        self._views = views or IgnoreMembership()
        self.faults = VirtualFaults(self, job.faults)
        for rank in range(world):
            self.bring_to_life(rank).state = start[rank] if start else None
        position, minutes = (start[0].position, start[0].minutes) if start else (Position(), 0.0)
        self.view = self._make_view(
            Membership(0, tuple(range(world))), Plan(world, position, minutes), list(start or ())
        )

    def run(self) -> Outcome:
        """Let everything happen. Raises what a learner raised, `Deadlock`, and `PeerLost` when nobody can go on."""
        self.faults.begin()
        try:
            while True:
                self.view.begin()
                self._wait_for(self.view.over)
                if not self.view.reasons:
                    break
                self._regroup()
            seconds = float(self.environment.now)
            states = self.view.finish()
        except Failed as failed:
            raise failed.error from None
        finally:
            self.loader.close()
        losses, num_views = tuple(self.faults.losses), self.view.view.number + 1
        return Outcome(states, seconds, self.num_events, self._hash.hexdigest(), losses, num_views)

    def record(self, name: int, kind: str, detail: bytes = b"") -> None:
        """Add an event of a learner to the hash. What is to happen at it happens."""
        self.num_events += 1
        self._hash.update(struct.pack("<dq", self.environment.now, name) + kind.encode() + b"\0" + detail)
        self.faults.after_event(self.num_events)

    def bring_to_life(self, name: int) -> Life:
        """A learner that is new, or comes back; who began with the run may suffer faults of its own."""
        is_first = self.environment.now == 0.0
        self.lives[name] = Life(
            name,
            ComputeTimes(self.cluster.compute, self.job.seed, name),
            Delays(self.job.stragglers, self.job.seed, name),
            FaultsOf(self.job.faults if is_first else (), name),
        )
        return self.lives[name]

    def _make_view(self, view: Membership, plan: Plan, states: list[LearnerState]) -> VirtualMembership:
        lives = [self.lives[name] for name in view.members]
        made = VirtualMembership(self, view, plan, lives, states or [None] * len(lives), self._observer)
        for learner in made.learners:
            if learner.life.tally is not None:
                learner.count_on(learner.life.tally)
        return made

    def _wait_for(self, event: simpy.Event) -> None:
        try:
            while not event.processed:
                self.environment.step()
        except EmptySchedule:
            raise self.view.deadlock() from None

    def _regroup(self) -> None:
        """Who lives goes on in a new view, from what all have done."""
        before = self.view
        for learner in before.learners:
            life = learner.life
            if not life.is_dead:
                life.past, life.tally, life.state = learner.past(), learner.tally(), learner.state(Position()).copy()
        self._views.pause()
        self._wait_for(self.environment.timeout(self.cluster.watch.regroup))
        living = tuple(sorted(name for name, life in self.lives.items() if not life.is_dead))
        change = Membership(before.view.number + 1, living, "; ".join(before.reasons))
        if not self._bears_losses:
            raise PeerLost(change.reason)
        view = next_membership(self.job, before.view, change)
        for name in set(living) - set(view.members):
            self.lives[name].death = "left with its super-learner"
        pasts = [self.lives[name].past for name in view.members]
        plan = plan_after(before.plan, pasts, self.job, lambda: before.noted)
        self.view = self._make_view(view, plan, self._starts(view, plan))
        self._views.begin(view, plan.position, True)

    def _starts(self, view: Membership, plan: Plan) -> list[LearnerState]:
        """The states with which the members of a view begin; who is to takes that of another."""
        states = [self.lives[name].state for name in view.members]
        nothing = LearnerState(0, plan.world, Position(), 0.0, torch.empty(0), {}, {})  # who has none is a taker
        found = [state or nothing for state in states]
        if plan.source is not None:
            source = found[plan.source]
            for rank in plan.takers:
                theirs = source.copy()
                found[rank] = replace(
                    found[rank], weights=theirs.weights, buffers=theirs.buffers, optimizer=theirs.optimizer
                )
        return [
            replace(state, rank=rank, world=plan.world, position=plan.position, minutes=plan.minutes, epochs_ended=None)
            for rank, state in enumerate(found)
        ]
