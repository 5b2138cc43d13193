"""One view of the learners of a virtual cluster: it drives their coroutines until all are done, or until it is over.

When a view is over, each learner leaves it where it next waits for another. What it computes by itself it finishes, as
on the `processes` engine, so that its gradient counts.
"""

from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import simpy
import torch
from simpy.events import Initialize
from torch import Tensor, nn

from starling.checkpoint.state import LearnerState
from starling.consensus import consensus, consensus_distance
from starling.engines.virtual.learner import FOREGROUND, Life, VirtualLearner
from starling.engines.virtual.network import Network, VirtualGradient, VirtualHandle, VirtualRounds
from starling.errors import Deadlock, ProtocolError
from starling.training.flat import split
from starling.training.job import Observer
from starling.training.loading import Loaded
from starling.training.membership import Membership, MembershipChanged
from starling.training.replica import Replica
from starling.training.shards import HeldShard, host_copy
from starling.training.succession import Plan
from starling.training.tickets import DoneTickets, SyncGroupTickets
from starling.workload import Ticket

if TYPE_CHECKING:
    from starling.engines.virtual.engine import VirtualEngine

T = TypeVar("T")


class Failed(Exception):  # noqa: N818 - carries what a strategy raised
    """Brings a strategy's exception, as it is, through simpy, which would make a new one of its first arguments."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class Killed(BaseException):
    """Ends a learner in the middle of what it does. No strategy can catch it."""


class _Ended(Exception):  # noqa: N818 - a generator cannot raise StopIteration
    """A coroutine has come to its end."""


@dataclass
class _Activity:
    learner: VirtualLearner
    process: simpy.Process | None = None
    waits_for: VirtualHandle[Any] | None = None


class SyncGroupWords(Generic[T]):
    """What the first member of a team finds at a claim is what all of its `size` members get, each once."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._words: dict[tuple[int, int], tuple[T, int]] = {}

    def of(self, sync_group: int, claim: int, find: Callable[[], T]) -> T:
        """What a member gets that has come to its claim of this number; forgotten when all have come to it."""
        word, num_to_come = (
            self._words.pop((sync_group, claim)) if (sync_group, claim) in self._words else (find(), self._size)
        )
        if num_to_come > 1:
            self._words[sync_group, claim] = word, num_to_come - 1
        return word

    def __len__(self) -> int:
        return len(self._words)


class VirtualMembership:
    """The learners of a `view`, by rank, that begin as `plan` says, each from its own state in `starts`."""

    def __init__(
        self,
        engine: "VirtualEngine",
        view: Membership,
        plan: Plan,
        lives: Sequence[Life],
        starts: Sequence[LearnerState | None],
        observer: Observer,
    ) -> None:
        self.view, self.plan = view, plan
        self.job, self.cluster, self.environment = engine.job, engine.cluster, engine.environment
        self.model, self.faults = engine.model, engine.faults
        self.first_buffers = engine.first_buffers
        self.world = len(view.members)
        self.over = self.environment.event()
        """Happens when all have left, or are done."""
        self.reasons: list[str] = []
        """Why it is over before all are done."""
        self.noted = DoneTickets(plan.position)
        self._engine = engine
        self._begun = float(self.environment.now)
        self._activities: dict[tuple[int, str], _Activity] = {}
        self._driven: Life | None = None
        self._num_drawn = 0  # portions that all teams together have drawn
        self._shared: tuple[Tensor, Tensor] | None = None
        sync_group_size = self.job.sync_group_size(self.world)
        self._draws: SyncGroupWords[int] = SyncGroupWords(sync_group_size)
        self._agreed_seconds: SyncGroupWords[float] = SyncGroupWords(sync_group_size)
        self._tickets = SyncGroupTickets(self.job.workload, plan.position, self.job.budget, sync_group_size)
        self._batches = engine.loader.load(self._tickets.take(count(), members=range(sync_group_size)))
        self._loaded: dict[int, Loaded] = {}
        self.rounds = VirtualRounds(self.environment, self.world)
        self.network = Network(
            self.environment, self.cluster, self.record, view.members, self.faults.apart, self.job.seed
        )
        self.learners = [
            VirtualLearner(self, life, rank, self._new_replica(), observer, start)
            for rank, (life, start) in enumerate(zip(lives, starts, strict=True))
        ]

    def now(self) -> float:
        """Simulated seconds since this view began."""
        return float(self.environment.now) - self._begun

    def begin(self) -> None:
        """Let all learners start."""
        for learner in self.learners:
            if not learner.life.is_dead:
                self.start(learner, self.job.strategy.start(learner, self.job.options), FOREGROUND)
        self._look_whether_over()

    def start(self, learner: VirtualLearner, coroutine: Coroutine[Any, Any, None], activity: str) -> None:
        """Begin to drive one of a learner's coroutines."""
        under_way = self._activities[learner.rank, activity] = _Activity(learner)
        under_way.process = self.environment.process(self._drive(under_way, coroutine, activity))

    def record(self, rank: int, kind: str, detail: bytes = b"") -> None:
        """Add an event to the run's."""
        self._engine.record(self.view.members[rank], kind, detail)

    def check(self) -> None:
        """Raise ViewChanged where this view is over."""
        if self.reasons:
            raise MembershipChanged(self.view)

    def end_of(self, life: Life) -> None:
        """A learner has died: whatever it does ends here."""
        for activity in list(self._activities.values()):
            if activity.learner.life is life:
                self._interrupt(activity)
        if self._driven is life:
            raise Killed

    def leave(self, reason: str) -> None:
        """Let this view be over: who waits for others leaves, and the others as soon as they would."""
        self.reasons.append(reason)
        for activity in list(self._activities.values()):
            if activity.waits_for is not None and not _is_own(activity.waits_for):
                self._interrupt(activity)
        self._look_whether_over()

    def deadlock(self) -> Deadlock:
        """The error of a view in which nothing is left to happen."""
        return Deadlock(
            f"deadlock after {self.environment.now:.6g} simulated seconds: nothing is left to happen, but "
            + "; ".join(
                f"learner {activity.learner.life.name}{kind} waits for {activity.waits_for.waits_for()}"
                for (_, kind), activity in sorted(self._activities.items(), key=lambda item: item[0])
                if activity.waits_for is not None
            )
        )

    def finish(self) -> list[LearnerState]:
        """All are done: report it. The final states, by rank."""
        num_portions = self._tickets.handed_out(self._num_drawn)
        return [learner.finish(num_portions) for learner in self.learners]

    def draw(self, sync_group: int, claim: int) -> int:
        """The number of the tickets that a team gets at its claim of this number: the next that nobody has."""
        return self._draws.of(sync_group, claim, self._next_number)

    def _next_number(self) -> int:
        self._num_drawn += 1
        return self._num_drawn - 1

    def agreed_seconds(self, sync_group: int, claim: int) -> float:
        """`now()` of the first of a team that makes its claim of this number."""
        return self._agreed_seconds.of(sync_group, claim, self.now)

    def take(self, ticket: Ticket) -> Loaded:
        """A ticket with its mini-batch. Those of undivided data are loaded in order and kept until taken."""
        if self.job.workload.num_parts > 1:
            return ticket, self.job.workload.load(ticket)
        while ticket.step not in self._loaded:
            loaded = next(self._batches)
            self._loaded[loaded[0].step] = loaded
        return self._loaded.pop(ticket.step)

    def real_gradient(self, learner: VirtualLearner, at: Tensor) -> float:
        """Leave the gradient of the learner's mini-batch at the weights `at` `[P]` with its replica; the loss."""
        self.model.look_at(at)
        self.model.gather_in(learner.replica.gradients)
        self.model.look_at_buffers(learner.buffers)
        loss = learner.compute_gradient(self.model.model, self.model)
        learner.buffers = self.model.own_buffers()  # a module may have put others in their place
        return loss

    def consensus_distance(self) -> float:
        """(1/L) sum_l |w_l - consensus|^2, now."""
        weights = [learner.weights for learner in self.learners]
        if not any(learner.shards for learner in self.learners):
            return consensus_distance(weights, consensus(weights, []))
        model = torch.cat([shard.weights for shard in self._shards()])
        return consensus_distance((learner.weights for learner in self.learners if learner.is_worker), model)

    def shared(self, num_pieces: int) -> tuple[Tensor, Tensor]:
        """The memory that all learners share, `[P]`, and for each piece the steps of each learner on it."""
        if self._shared is None:
            counts = torch.zeros(num_pieces, self.world, dtype=torch.int64)
            self._shared = host_copy(self.learners[0].weights), counts
        return self._shared

    def _shards(self) -> list[HeldShard]:
        """The pieces of the model, each once, in their order."""
        found = {shard.piece.start: shard for learner in self.learners for shard in learner.shards}
        return [found[start] for start in sorted(found)]

    def _new_replica(self) -> Replica:
        weights = self.model.weights.clone()
        gradients = torch.zeros_like(weights)
        parameters = [nn.Parameter(view) for view in split(weights, self.model.parameters)]
        for parameter, gradient in zip(parameters, split(gradients, self.model.parameters), strict=True):
            parameter.grad = gradient
        make_optimizer, clip_norm = self.job.make_optimizer, self.job.clip_norm
        return Replica(weights, gradients, parameters, make_optimizer, clip_norm, self._engine.workspace)

    def _drive(
        self, under_way: _Activity, coroutine: Coroutine[Any, Any, None], kind: str
    ) -> Generator[simpy.Event, None, None]:
        """Run a coroutine to its end, or until its learner leaves this view or dies."""
        learner = under_way.learner
        try:
            if not (learner.life.is_dead or self.reasons):
                yield from self._let_go_on(under_way, coroutine, kind)
            self._left(learner, kind)
        except _Ended:
            self.record(learner.rank, "end")
            if kind == FOREGROUND:
                learner.is_finished = True
                self.rounds.finish()
        except (MembershipChanged, Killed, simpy.Interrupt):
            self._left(learner, kind)
        except Exception as error:
            raise Failed(error) from error
        yield from self._wake_to_leave(learner.life)
        coroutine.close()
        del self._activities[learner.rank, kind]
        self._look_whether_over()

    def _left(self, learner: VirtualLearner, kind: str) -> None:
        learner.has_left = learner.has_left or kind == FOREGROUND  # its background leaves at once, and it may go on

    def _let_go_on(
        self, under_way: _Activity, coroutine: Coroutine[Any, Any, None], kind: str
    ) -> Generator[simpy.Event, None, None]:
        """Whenever the coroutine waits for a handle, wait for the handle's event; until it dies, or has to leave."""
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
            begin = learner.now()
            if not handle.event.processed:
                yield handle.event
            yield from self._stand_still(learner.life)
            if learner.life.is_dead:
                return
            under_way.waits_for = None
            if kind == FOREGROUND:
                learner.book(learner.now() - begin, handle.computing)

    def _stand_still(self, life: Life) -> Generator[simpy.Event, None, None]:
        while not life.is_dead and (until := life.still_until) > self.environment.now:
            yield self.environment.timeout(until - self.environment.now)

    def _wake_to_leave(self, life: Life) -> Generator[simpy.Event, None, None]:
        """Who stands still, or is cut off, does not hear that a view is over."""
        while self.reasons and not life.is_dead and (seconds := self.faults.seconds_out_of_reach(life)) > 0.0:
            try:
                yield self.environment.timeout(seconds)
            except simpy.Interrupt:
                continue

    def _interrupt(self, activity: _Activity) -> None:
        process = activity.process
        if process is None or not process.is_alive or process is self.environment.active_process:
            return
        if not isinstance(process.target, Initialize):  # who has not begun looks before it does
            process.interrupt()

    def _look_whether_over(self) -> None:
        """All have left or are done, and nobody has died of whom the others are still to hear."""
        is_unheard = not self.reasons and any(learner.life.is_dead for learner in self.learners)
        if not self._activities and not is_unheard and not self.over.triggered:
            self.over.succeed()


def _is_own(handle: VirtualHandle[Any]) -> bool:
    """Whether a learner waits for nothing but a gradient of its own."""
    return isinstance(handle, VirtualGradient) and handle.given_away is None
