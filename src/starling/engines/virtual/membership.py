"""The objects that the learners of one membership share in a virtual run: mini-batches, averaging rounds and the
network.

When a membership is over, each learner leaves it as soon as it next waits for another learner. A gradient that is under
way is completed, as on the `processes` engine, so that it counts.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, TypeVar

import simpy
import torch
from simpy.events import Initialize
from torch import Tensor

from starling.checkpoint.state import LearnerState
from starling.consensus import are_one_model, consensus, consensus_distance
from starling.engines.virtual.computation import Computation, Member
from starling.engines.virtual.network import Network, VirtualHandle
from starling.engines.virtual.simulation import Simulation, VirtualLife
from starling.errors import Deadlock, ProtocolError
from starling.training.loading import Loaded
from starling.training.membership import Membership, MembershipChanged
from starling.training.shards import host_copy
from starling.training.succession import CutAgreement, MembershipStart, different_weights, must_begin_equal
from starling.training.tickets import DoneTickets, SyncGroupTickets
from starling.workload import Ticket

T = TypeVar("T")


class Killed(BaseException):
    """Exception that ends a learner at any point of its code. No strategy can catch it."""


class MembershipBatches:
    """The tickets of a membership and their mini-batches, for all learners of the membership. `done` contains the
    tickets that were done in it."""

    def __init__(self, simulation: Simulation, plan: MembershipStart, clock: Callable[[], float]) -> None:
        job = simulation.job
        self._size = job.sync_groups(plan.world).size
        self.done = DoneTickets(plan.position)
        self.tickets = SyncGroupTickets(
            job.workload,
            plan.position,
            job.budget,
            self._size,
            plan.shares,
            ranks_per_learner=simulation.ranks_per_learner,
        )
        self.agreed: dict[tuple[int, int, str], tuple[Any, int]] = {}
        """Result of the first member of a sync group at a claim, and the number of members that still need it."""
        self.clock, self._workload = clock, job.workload
        self.num_drawn = 0
        """Number of portions that all sync groups together have drawn."""
        self._batches = simulation.loader.load(self.tickets.take(count()))
        self._loaded: dict[int, Loaded] = {}

    def agree(self, what: tuple[int, int, str], find: Callable[[], T]) -> T:
        """Return the result of `find` for the first member of a sync group. All members get the same result. It is
        discarded once each member has received it."""
        found, num_to_come = self.agreed.pop(what) if what in self.agreed else (find(), self._size)
        if num_to_come > 1:
            self.agreed[what] = found, num_to_come - 1
        return found

    def draw(self) -> int:
        """Return the number of the next portion that no sync group has drawn."""
        self.num_drawn += 1
        return self.num_drawn - 1

    def load(self, ticket: Ticket) -> Loaded:
        """Return a ticket with its mini-batch. If the data is not divided into parts, mini-batches are loaded in order,
        and kept until they are taken."""
        if self._workload.num_parts > 1:
            return ticket, self._workload.load(ticket)
        while ticket.step not in self._loaded:
            loaded = next(self._batches)
            self._loaded[loaded[0].step] = loaded
        return self._loaded.pop(ticket.step)

    @property
    def num_portions(self) -> int:
        """Number of drawn portions that are within the budget."""
        return self.tickets.handed_out(self.num_drawn)


class VirtualBatches:
    """The `BatchSource` of one virtual learner."""

    def __init__(self, shared: MembershipBatches, sync_group: range, rank: int, name: int) -> None:
        self._shared, self._parts = shared, shared.tickets.parts(name)
        self._group, self._member = sync_group.start, rank - sync_group.start

    def next(self, claim: int) -> Sequence[Loaded] | None:
        return self.load(self._shared.agree((self._group, claim, "number"), self._shared.draw))

    def load(self, number: int) -> Sequence[Loaded] | None:
        """Return this learner's tickets of a portion, with their mini-batches, or None beyond the budget."""
        drawn = self._shared.tickets.drawn(number, self._member)
        parts = zip(drawn, self._parts, strict=False)
        return [self._shared.load(replace(ticket, part=part) if part else ticket) for ticket, part in parts] or None

    def agreed_seconds(self, claim: int) -> float:
        return self._shared.agree((self._group, claim, "seconds"), self._shared.clock)

    def reach(self, portion: int) -> None:
        """Return at once, because there are no checkpoint barriers on which to agree."""

    def done(self, ticket: Ticket) -> None:
        self._shared.done.add(ticket.step)


class VirtualRounds(CutAgreement):
    """The averaging rounds of all learners. This is the `Board` of their `Rounds`."""

    def __init__(self, environment: simpy.Environment, world: int) -> None:
        self._environment = environment
        self._world = world
        self._events: dict[int, simpy.Event] = {}
        self._num_opened = 0
        self._first_free = 0  # the first round that no learner has entered
        self._counted: Counter[tuple[str, int]] = Counter()  # number of learners by action and round
        self._cuts: dict[int, int] = {}

    def event(self, number: int) -> simpy.Event:
        """Return the event that happens when round `number` opens, or when it is certain that it will never open."""
        return self._events.setdefault(number, self._environment.event())

    def open(self, number: int, is_behind: bool) -> None:
        if number == self._num_opened:
            self._num_opened += 1
            self.event(number).succeed()

    def enter(self, number: int) -> bool:
        """Enter a round, and return whether the round takes place."""
        if self._is_last("entered", number):  # no learner will ask for the event again
            del self._events[number]
        if number >= self._num_opened:
            return False
        self._first_free = max(self._first_free, number + 1)
        return True

    def finish(self, first_unopened: int) -> None:
        if self._is_last("finished", 0):
            self.event(self._num_opened).succeed()

    def passed(self, barrier: int, num_entered: int) -> None:
        if self._is_last("passed", barrier):
            self._cuts[barrier] = self._first_free

    def cut(self, barrier: int) -> int | None:
        return self._cuts.get(barrier)

    def _is_last(self, what: str, number: int) -> bool:
        """Count a learner that has performed the action `what`, and return whether it was the last learner to do so."""
        self._counted[what, number] += 1
        if self._counted[what, number] < self._world:
            return False
        del self._counted[what, number]
        return True


@dataclass
class Activity:
    """A coroutine of a learner. A simpy process drives it."""

    rank: int
    process: simpy.Process | None = None
    waits_for: VirtualHandle[Any] | None = None

    def interrupt(self) -> None:
        """End the activity at the point where it waits."""
        process = self.process
        if process is None or not process.is_alive or process is process.env.active_process:
            return
        if not isinstance(process.target, Initialize):  # a process that has not begun first checks for itself
            process.interrupt()


class VirtualMembership:
    """A membership that begins according to `plan`. The engine adds its `learners`, by rank."""

    def __init__(
        self, simulation: Simulation, computation: Computation, membership: Membership, plan: MembershipStart
    ) -> None:
        self.simulation, self.computation = simulation, computation
        self.membership, self.plan = membership, plan
        self.world = len(membership.members)
        self.lives = [simulation.lives[name] for name in membership.members]
        self.learners: list[Member] = []
        self.activities: dict[tuple[int, str], Activity] = {}
        """Activities of the learners, by rank and kind."""
        self.driven: VirtualLife | None = None
        """Learner whose coroutine is running."""
        self.over = simulation.environment.event()
        """Event that happens when each learner has left or is done."""
        self.reasons: list[str] = []
        """Reasons why the membership ended before all learners were done."""
        self._begun = simulation.now
        self._shared: tuple[Tensor, Tensor] | None = None
        self.batches = MembershipBatches(simulation, plan, self.now)
        self.rounds = VirtualRounds(simulation.environment, self.world)
        self.network = Network(simulation, membership.members)
        self.heal = self.network.heal

    def now(self) -> float:
        """Simulated seconds since the membership began."""
        return self.simulation.now - self._begun

    def begin(self) -> None:
        """Start all learners. Raises `ProtocolError` if learners that must begin with the same weights have different
        weights."""
        job, first = self.simulation.job, self.learners[0].replica.weights
        if self.computation.holds_weights and must_begin_equal(job, self.lives[0].state):
            for life, learner in zip(self.lives, self.learners, strict=True):
                if not are_one_model(first, learner.replica.weights):
                    raise ProtocolError(different_weights(job, life.name, self.lives[0].name))
        for life, learner in zip(self.lives, self.learners, strict=True):
            if not life.is_dead:
                learner.record_membership(self.membership, self.plan)
                learner.begin()
        self.look_whether_over()

    def check(self) -> None:
        """Raise `MembershipChanged` if the membership is over."""
        if self.reasons:
            raise MembershipChanged(self.membership)

    def end_of(self, life: VirtualLife) -> None:
        """End all activities of a learner that has died."""
        for activity in list(self.activities.values()):
            if self.lives[activity.rank] is life:
                activity.interrupt()
        if self.driven is life:
            raise Killed

    def leave(self, reason: str) -> None:
        """End this membership. Learners that wait for others leave now; the other learners leave before they would next
        wait."""
        self.reasons.append(reason)
        for activity in list(self.activities.values()):
            if activity.waits_for is not None and not activity.waits_for.is_own:
                activity.interrupt()
        self.look_whether_over()

    def look_whether_over(self) -> None:
        """End the membership if all learners have left or are done, and the survivors have been notified of every
        death."""
        if self.activities or self.over.triggered:  # cheap, because this is called at the end of each activity
            return
        if self.reasons or not any(life.is_dead for life in self.lives):
            self.over.succeed()

    def deadlock(self) -> Deadlock:
        """Return the error for a membership in which no event is left."""
        return Deadlock(
            f"deadlock after {self.simulation.now:.6g} simulated seconds: nothing is left to happen, but "
            + "; ".join(
                f"learner {self.membership.members[rank]}{kind} waits for {activity.waits_for.waits_for()}"
                for (rank, kind), activity in sorted(self.activities.items(), key=lambda item: item[0])
                if activity.waits_for is not None
            )
        )

    def finish(self) -> list[LearnerState]:
        """Report that all learners are done, and return their final states, by rank."""
        num_portions = self.batches.num_portions
        return [learner.finish(num_portions) for learner in self.learners]

    def consensus_distance(self) -> float | None:
        """Return the consensus distance of all learners' weights, or None if the weights have no values."""
        if not self.computation.holds_weights:
            return None
        weights = [learner.replica.weights for learner in self.learners]
        found = {shard.piece.start: shard for learner in self.learners for shard in learner.own_shards.held}
        if not found:
            return consensus_distance(weights, consensus(weights, []))
        model = torch.cat([found[start].weights for start in sorted(found)])
        return consensus_distance(weights[: self.simulation.job.sync_groups(self.world).num_workers], model)

    def shared_memory(self, num_pieces: int) -> tuple[Tensor, Tensor]:
        """Return the weights `[P]` and the counts `[num_pieces, L]` that all L learners share."""
        if self._shared is None:
            counts = torch.zeros(num_pieces, self.world, dtype=torch.int64)
            self._shared = host_copy(self.learners[0].replica.weights), counts
        return self._shared
