"""One membership of a virtual run: it drives its learners' coroutines until all are done, or until it is over.

When a membership is over, each learner leaves it where it next waits for another. A gradient under way is finished, as
on the `processes` engine, so that it counts.
"""

from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import simpy
import torch
from simpy.events import Initialize
from torch import Tensor

from starling.checkpoint.state import LearnerState
from starling.consensus import are_one_model, consensus, consensus_distance
from starling.engines.virtual.batches import MembershipBatches
from starling.engines.virtual.cluster import Cluster
from starling.engines.virtual.computation import Computation
from starling.engines.virtual.faults import VirtualFaults
from starling.engines.virtual.learner import FOREGROUND, Surroundings, VirtualLearner
from starling.engines.virtual.lives import VirtualLife
from starling.engines.virtual.network import Network, VirtualGradient, VirtualHandle, VirtualRounds
from starling.errors import Deadlock, ProtocolError
from starling.training.job import Job, Observer
from starling.training.loading import Loader
from starling.training.membership import Membership, MembershipChanged
from starling.training.shards import HeldShard, host_copy
from starling.training.succession import MembershipStart, different_weights, must_begin_equal


class Failed(Exception):  # noqa: N818 - carries what a strategy raised
    """Carries a strategy's exception unchanged through simpy, which would make a new one from its arguments."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class Killed(BaseException):
    """Ends a learner wherever it is. No strategy can catch it."""


class _Ended(Exception):  # noqa: N818 - a generator cannot raise StopIteration
    """A coroutine has come to its end."""


@dataclass
class _Activity:
    learner: VirtualLearner
    process: simpy.Process | None = None
    waits_for: VirtualHandle[Any] | None = None


@dataclass(frozen=True)
class Simulation:
    """What all memberships of a virtual run share."""

    job: Job
    cluster: Cluster
    environment: simpy.Environment
    computation: Computation
    loader: Loader
    faults: VirtualFaults
    record: Callable[[int, str, bytes], None]
    """Adds an event of a learner to the run's: name, kind, detail."""


class VirtualMembership:
    """The learners of a membership, by rank, which begin as `plan` says, each from its own state in `starts`."""

    def __init__(
        self,
        simulation: Simulation,
        membership: Membership,
        plan: MembershipStart,
        lives: Sequence[VirtualLife],
        starts: Sequence[LearnerState | None],
        observer: Observer,
    ) -> None:
        job, world, environment = simulation.job, len(membership.members), simulation.environment
        self.membership, self.plan = membership, plan
        self.over = environment.event()
        """Happens when all learners have left, or are done."""
        self.reasons: list[str] = []
        """Why it is over before all are done."""
        self._simulation, self._environment = simulation, environment
        self._world, self._num_workers = world, job.sync_groups(world).num_workers
        self._begun = float(environment.now)
        self._activities: dict[tuple[int, str], _Activity] = {}
        self._driven: VirtualLife | None = None
        self._shared: tuple[Tensor, Tensor] | None = None
        self._first_state = starts[0]
        self.batches = MembershipBatches(job, world, plan, simulation.loader, self._now)
        self._rounds = VirtualRounds(environment, world)
        self.network = Network(
            environment, simulation.cluster, self._record, membership.members, simulation.faults.apart, job.seed
        )
        surroundings = Surroundings(
            job=job,
            world=world,
            cluster=simulation.cluster,
            environment=environment,
            computation=simulation.computation,
            faults=simulation.faults,
            batches=self.batches,
            network=self.network,
            rounds=self._rounds,
            now=self._now,
            record=simulation.record,
            check=self._check,
            consensus_distance=self._consensus_distance if simulation.computation.holds_weights else lambda: None,
            shared_memory=self._shared_memory,
            start=self._start,
        )
        self.learners = [
            VirtualLearner(surroundings, life, rank, simulation.computation.new_replica(), observer, start)
            for rank, (life, start) in enumerate(zip(lives, starts, strict=True))
        ]

    def _now(self) -> float:
        return float(self._environment.now) - self._begun

    def begin(self) -> None:
        """Let all learners start. Raises ProtocolError if some must begin with the same weights and do not."""
        self._check_weights()
        for learner in self.learners:
            if not learner.life.is_dead:
                job = self._simulation.job
                self._start(learner, job.strategy.start(learner, job.options), FOREGROUND)
        self._look_whether_over()

    def _check_weights(self) -> None:
        job, first = self._simulation.job, self.learners[0]
        if not self._simulation.computation.holds_weights or not must_begin_equal(job, self._first_state):
            return
        for learner in self.learners[1:]:
            if not are_one_model(first.weights, learner.weights):
                raise ProtocolError(different_weights(job, learner.life.name, first.life.name))

    def _start(self, learner: VirtualLearner, coroutine: Coroutine[Any, Any, None], activity: str) -> None:
        """Begin to drive one of a learner's coroutines."""
        under_way = self._activities[learner.rank, activity] = _Activity(learner)
        under_way.process = self._environment.process(self._drive(under_way, coroutine, activity))

    def _record(self, rank: int, kind: str, detail: bytes) -> None:
        self._simulation.record(self.membership.members[rank], kind, detail)

    def _check(self) -> None:
        if self.reasons:
            raise MembershipChanged(self.membership)

    def end_of(self, life: VirtualLife) -> None:
        """A learner has died: end all that it does."""
        for activity in list(self._activities.values()):
            if activity.learner.life is life:
                self._interrupt(activity)
        if self._driven is life:
            raise Killed

    def leave(self, reason: str) -> None:
        """End this membership: learners that wait for others leave now, the others before they would wait."""
        self.reasons.append(reason)
        for activity in list(self._activities.values()):
            if activity.waits_for is not None and not _is_own(activity.waits_for):
                self._interrupt(activity)
        self._look_whether_over()

    def deadlock(self) -> Deadlock:
        """The error of a membership in which nothing is left to happen."""
        return Deadlock(
            f"deadlock after {self._environment.now:.6g} simulated seconds: nothing is left to happen, but "
            + "; ".join(
                f"learner {activity.learner.life.name}{kind} waits for {activity.waits_for.waits_for()}"
                for (_, kind), activity in sorted(self._activities.items(), key=lambda item: item[0])
                if activity.waits_for is not None
            )
        )

    def finish(self) -> list[LearnerState]:
        """All learners are done: report it. The final states, by rank."""
        num_portions = self.batches.num_portions
        return [learner.course.finish(num_portions) for learner in self.learners]

    def _consensus_distance(self) -> float:
        weights = [learner.weights for learner in self.learners]
        if not any(learner.course.shards.held for learner in self.learners):
            return consensus_distance(weights, consensus(weights, []))
        model = torch.cat([shard.weights for shard in self._shards()])
        return consensus_distance(weights[: self._num_workers], model)

    def _shared_memory(self, num_pieces: int) -> tuple[Tensor, Tensor]:
        if self._shared is None:
            counts = torch.zeros(num_pieces, self._world, dtype=torch.int64)
            self._shared = host_copy(self.learners[0].weights), counts
        return self._shared

    def _shards(self) -> list[HeldShard]:
        """The pieces of the model, each once, in their order."""
        found = {shard.piece.start: shard for learner in self.learners for shard in learner.course.shards.held}
        return [found[start] for start in sorted(found)]

    def _drive(
        self, under_way: _Activity, coroutine: Coroutine[Any, Any, None], kind: str
    ) -> Generator[simpy.Event, None, None]:
        """Run a coroutine to its end, or until its learner leaves this membership or dies."""
        learner = under_way.learner
        try:
            if not (learner.life.is_dead or self.reasons):
                yield from self._advance(under_way, coroutine, kind)
            self._left(learner, kind)
        except _Ended:
            self._record(learner.rank, "end", b"")
            if kind == FOREGROUND:
                learner.is_finished = True
                self._rounds.finish()
        except (MembershipChanged, Killed, simpy.Interrupt):
            self._left(learner, kind)
        except Exception as error:
            raise Failed(error) from error
        yield from self._wake_to_leave(learner.life)
        coroutine.close()
        del self._activities[learner.rank, kind]
        self._look_whether_over()

    def _left(self, learner: VirtualLearner, kind: str) -> None:
        learner.has_left = (
            learner.has_left or kind == FOREGROUND
        )  # after its background has left, the foreground may continue

    def _advance(
        self, under_way: _Activity, coroutine: Coroutine[Any, Any, None], kind: str
    ) -> Generator[simpy.Event, None, None]:
        """Whenever the coroutine waits for a handle, wait for its event, until the learner dies or must leave."""
        learner = under_way.learner
        while True:
            self._driven, learner.activity = learner.life, kind
            try:
                handle = coroutine.send(None)
            except StopIteration as end:
                raise _Ended from end
            finally:
                self._driven = None
            if not isinstance(handle, VirtualHandle):
                raise ProtocolError(
                    f"learner {learner.rank} awaited {handle!r}; a strategy awaits only what its learner started"
                )
            under_way.waits_for = handle
            if self.reasons and not _is_own(handle):
                return
            if kind == FOREGROUND:
                learner.wait = learner.now(), handle.computing
            if not handle.event.processed:
                yield handle.event
            if learner.life.still_until > self._environment.now:
                yield from self._stand_still(learner.life)
            if learner.life.is_dead:
                return
            under_way.waits_for = None
            if kind == FOREGROUND:
                learner.book()

    def _stand_still(self, life: VirtualLife) -> Generator[simpy.Event, None, None]:
        while not life.is_dead and (until := life.still_until) > self._environment.now:
            yield self._environment.timeout(until - self._environment.now)

    def _wake_to_leave(self, life: VirtualLife) -> Generator[simpy.Event, None, None]:
        """A learner that is paused or cut off does not hear at once that a membership is over."""
        while (
            self.reasons and not life.is_dead and (seconds := self._simulation.faults.seconds_out_of_reach(life)) > 0.0
        ):
            try:
                yield self._environment.timeout(seconds)
            except simpy.Interrupt:
                continue

    def _interrupt(self, activity: _Activity) -> None:
        process = activity.process
        if process is None or not process.is_alive or process is self._environment.active_process:
            return
        if not isinstance(process.target, Initialize):  # a process that has not begun checks first
            process.interrupt()

    def _look_whether_over(self) -> None:
        """Is over once all have left or are done, and the others have heard of every death."""
        if self._activities or self.over.triggered:  # asked at the end of each activity: of all learners only then
            return
        if self.reasons or not any(learner.life.is_dead for learner in self.learners):
            self.over.succeed()


def _is_own(handle: VirtualHandle[Any]) -> bool:
    """Whether a learner waits only for a gradient of its own."""
    return isinstance(handle, VirtualGradient) and handle.given_away is None
