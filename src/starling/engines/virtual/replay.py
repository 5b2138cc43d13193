"""Replays a record: runs the same strategy with real gradients in the recorded order.

Each activity of a learner runs in a greenlet. It can therefore wait for its turn at any point where it uses the
weights, as a thread of the `processes` engine does, and not only where it awaits a handle.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import simpy
import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import Tensor

from starling.checkpoint.state import LearnerState
from starling.engines.virtual.engine import VirtualEngine
from starling.engines.virtual.learner import VirtualLearner
from starling.engines.virtual.membership import Activity, MembershipBatches, VirtualBatches, VirtualMembership
from starling.engines.virtual.network import VirtualHandle
from starling.errors import Deadlock, ReplayError
from starling.learner import Handle, Learner
from starling.training.faults import NotFinite
from starling.training.job import Job, Observer
from starling.training.loading import Loaded
from starling.training.membership import Membership
from starling.training.order import (
    BACKGROUND,
    FOREGROUND,
    FREE,
    LEFT,
    NO_BATCH,
    NO_ROUND,
    ROUND,
    Order,
    Script,
    Turns,
)
from starling.training.speeds import Stragglers
from starling.training.succession import CutAgreement, MembershipStart, RecordedCuts
from starling.workload import Ticket

_OVER = "more than its record has"


class RecordEnded(ReplayError):  # noqa: N818 - an outcome
    """The error that is raised when the whole record has been replayed and the record ends before the run did. Callers
    compare the states before they propagate this error."""


@dataclass(frozen=True)
class Moment:
    """A gradient in a replay, at the moment before it is used."""

    number: int
    """Number of the gradient in the replay, counted from 1."""
    learner: int
    ticket: Ticket
    loss: float
    gradient: float
    """Norm of the gradient."""
    weights: float
    """Norm of the learner's weights."""
    distance: float
    """Norm of the difference between the learner's weights and the mean of all learners' weights."""
    staleness: int
    """Number of changes to the learner's weights since they were read for the gradient."""
    ids: tuple[str, ...]
    """Names of the examples in the mini-batch, if the data have names for examples."""
    vectors: Mapping[str, Tensor] = field(default_factory=dict, repr=False, compare=False)
    """The gradient `g`, the learner's weights `w`, and the `mean` of all learners' weights, each `[P]`. They are valid
    only during the call of `watch`."""


class ReplayStopped(Exception):  # noqa: N818 - an outcome
    """The exception that is raised when a replay has reached the gradient at which it was to stop."""


class GivenOrder(Order):
    """Lets the activities of a learner use its weights in a given order. An activity waits for ever once its record has
    ended."""

    def __init__(self, learner: ReplayedLearner, turns: Sequence[str]) -> None:
        super().__init__()
        self.gives = self.notes = True
        left = next((turn[1:].split(",") for turn in turns if turn.startswith(LEFT)), None)
        self._learner, self.turns_left = learner, Turns(learner.life.name, turns)
        self.num_used = list(learner.replica.order.num_used)  # not 0 if the replica began from a saved state
        self._num_alone = self.num_used[0]
        limits = [math.inf] * 3 if left is None else [float(each) for each in left]
        self._most_alone, *self._most_started = limits
        self._is_shared = False
        self._waiting: list[simpy.Event] = []

    @property
    def num_own(self) -> int:
        return self.num_used[self._learner.is_behind]

    def share(self) -> None:
        self._is_shared = True

    def wait(self) -> None:
        if self._is_shared:
            self._await(self._activity)
        while self._num_alone == self._most_alone and not self._is_shared:
            self._learner.suspend(self._learner.new_event(), _OVER)

    def started(self, is_behind: bool) -> None:
        super().started(is_behind)
        while self.has_left(is_behind):
            self._learner.suspend(self._learner.new_event(), _OVER)

    def has_left(self, is_behind: bool, more: int = 0) -> bool:
        """Return whether an activity left, according to the record, before it started as much work as it has started
        now, plus `more`."""
        return self.num_started[is_behind][0] + more > self._most_started[is_behind]

    def note(self) -> None:
        self.num_used[self._learner.is_behind] += 1
        if self._is_shared:
            self._take()
        else:
            self._num_alone += 1

    def chose(self, key: int) -> None:
        self._await(f"{self._activity}{key}")
        self._take()

    def entered(self, takes_place: bool) -> None:
        self._await(ROUND if takes_place else NO_ROUND)
        self._take()

    def ended(self) -> None:
        self._await(NO_BATCH)
        self._take()

    def following(self) -> str | None:
        """Return the next turn of the calling activity, or None if the record has no further turn."""
        return self.turns_left.following(self._learner.is_behind)

    @property
    def _activity(self) -> str:
        return BACKGROUND if self._learner.is_behind else FOREGROUND

    def _await(self, turn: str) -> None:
        while not self.turns_left.is_next(turn):
            event = self._learner.new_event()
            if has_more := self.turns_left.expect(turn, self._learner.is_behind):
                self._waiting.append(event)
            self._learner.suspend(event, "its turn" if has_more else _OVER)

    def _take(self) -> None:
        self.turns_left.take()
        waiting, self._waiting = self._waiting, []
        for event in waiting:
            event.succeed()


class ReplayedLearner(VirtualLearner):
    """A learner that follows its record."""

    def __init__(
        self,
        membership: VirtualMembership,
        rank: int,
        observer: Observer,
        start: LearnerState | None,
        script: Script,
    ) -> None:
        self.script, self.simulation = script, membership.simulation
        self.watch: Callable[[ReplayedLearner, float], None] = lambda learner, loss: None
        self._num_rounds = 0
        self._greenlets: dict[int, greenlet] = {}
        self._begun: set[int] = set()
        super().__init__(membership, rank, observer, start)
        self.recorded = script.claimed(self.tickets)
        self.given = self.replica.order = GivenOrder(self, script.turns)
        for portion, stops in script.barriers:
            if stops:
                self.tickets.end_at(portion)
            else:
                self.barriers.add(portion)

    def new_event(self) -> simpy.Event:
        return self._environment.event()

    def suspend(self, event: simpy.Event, what: str) -> None:
        """Let the calling activity wait for an event at any point of its code."""
        getcurrent().parent.switch(VirtualHandle(event, lambda: None, lambda: what))

    def report_step(self, loss: float) -> None:
        super().report_step(loss)
        self.watch(self, loss)

    def pass_last_barriers(self) -> None:
        """Pass the recorded barriers that no recorded claim follows. The learner was killed before it made that
        claim."""
        if NO_BATCH in self.script.turns:
            return
        cuts, states = self.script.cuts, self.script.states
        last = states[-1][0] if states and self.cuts is None else -1
        uses = max((turn for _, turn in cuts.values()), default=0)
        while True:
            portion, before = self.barriers.following(), self.given.num_own
            is_recorded = self.tickets.num_before(portion) <= last
            if self.cuts is not None:
                is_recorded = self.cuts.num_passed <= max(cuts, default=-1)
            if not (is_recorded or self.given.following() == FOREGROUND or before < uses):
                return
            self._pass_barriers(portion)
            if not is_recorded and self.given.num_own == before:
                return  # the next entry of the record is not a barrier

    def round(self, period: float) -> Handle[int | None]:
        number, self._num_rounds = self._num_rounds, self._num_rounds + 1
        if self.cuts is not None:
            self.cuts.completed(number)

        def result() -> int | None:
            takes_place = self.given.following() != NO_ROUND
            self.order.entered(takes_place)
            if not takes_place:
                return None
            if self.cuts is not None:
                self.cuts.entered(number)
            self.statistics.averaging.rounds += 1
            return number

        return VirtualHandle(self._happened(), result, lambda: f"round {number}")

    def keep_up(self, most: float) -> Handle[None]:
        return VirtualHandle(self._happened(), lambda: None, lambda: "nothing")

    def first(self, handles: Mapping[int, Handle[Any]]) -> Handle[int]:
        turn = self.given.following()
        if turn is None:
            return VirtualHandle(self.new_event(), lambda: 0, lambda: _OVER)
        chosen = handles.get(int(turn[1:] or -1))
        if not isinstance(chosen, VirtualHandle):
            raise ReplayError(f"learner {self.life.name}: its record has {turn!r}, but it waits for {sorted(handles)}")

        def result() -> int:
            self.order.chose(int(turn[1:]))
            return int(turn[1:])

        return VirtualHandle(chosen.event, result, chosen.waits_for)

    def end_membership(self, membership: int) -> None:
        self.replica.order = FREE  # no activity is left that must follow an order
        super().end_membership(membership)

    def finish(self, num_portions: int, undone: Collection[int] = ()) -> LearnerState:
        self.replica.order = FREE
        return super().finish(num_portions, undone)

    def exchange(self, peer: int, tensor: Tensor, tag: int) -> Awaitable[Tensor]:
        return Learner.exchange(self, peer, tensor, tag)  # this awaits two handles, as on the `processes` engine

    def _batches_of(self, shared: MembershipBatches) -> VirtualBatches:
        return _RecordedBatches(self, shared)

    def _cuts_of(self, membership: VirtualMembership) -> CutAgreement:
        return RecordedCuts(self.script.cuts, lambda: self.order.num_own)

    def _awaited(self, kind: str) -> None:
        """Do nothing. Because an activity also waits for its turns, `_resume` counts the handles that it has
        awaited."""

    def _resume(self, activity: Activity, coroutine: Coroutine[Any, Any, None]) -> Any:
        own = self._greenlets.get(id(activity))
        if own is None:
            if id(activity) in self._begun:
                if self.given.has_left(self.is_behind, more=1):
                    return VirtualHandle(self.new_event(), lambda: None, lambda: _OVER)
                self.given.num_started[self.is_behind][0] += 1
            self._begun.add(id(activity))
            own = self._greenlets[id(activity)] = greenlet(coroutine.send)
            handle = own.switch(None)
        else:
            handle = own.switch()
        if own.dead:
            del self._greenlets[id(activity)]
        return handle

    def _close(self, activity: Activity, coroutine: Coroutine[Any, Any, None]) -> None:
        if (own := self._greenlets.pop(id(activity), None)) is not None:
            own.throw(GreenletExit)
        super()._close(activity, coroutine)

    def _happened(self) -> simpy.Event:
        event = self.new_event()
        event.callbacks = None
        return event


class _RecordedBatches(VirtualBatches):
    """The mini-batches that a learner claimed, according to its record."""

    def __init__(self, learner: ReplayedLearner, shared: MembershipBatches) -> None:
        group = learner.simulation.job.sync_groups(learner.world).of(learner.rank)
        super().__init__(shared, group, learner.rank, learner.script.learner)
        self._learner, self._membership = learner, shared

    def next(self, claim: int) -> Sequence[Loaded] | None:
        claims = self._learner.recorded or []
        if claim < len(claims):
            number, _ = claims[claim]
            self._membership.num_drawn = max(self._membership.num_drawn, number + 1)
            return self.load(number)
        self._learner.pass_last_barriers()
        return None  # the learner then waits for the turn in which it received no further mini-batch


class ReplayEngine(VirtualEngine):
    """Replays the learners whose record is in `scripts`, which contains the scripts of each membership by rank."""

    def __init__(
        self,
        job: Job,
        scripts: Sequence[Sequence[Script]],
        observer: Observer,
        start: Sequence[LearnerState] | None = None,
    ) -> None:
        self._scripts, self._place, self._num_gradients = scripts, 0, 0
        self.watch: Callable[[Moment], bool] | None = None
        """Function that is called with each gradient. The replay stops when the function returns True."""
        faults = tuple(fault for fault in job.faults if isinstance(fault, NotFinite))
        shares = job.batch_shares
        if shares == "auto":
            shares = dict(enumerate(MembershipStart.decode(scripts[0][0].plan).shares))
        job = replace(job, faults=faults, stragglers=Stragglers(), batch_shares=shares)
        super().__init__(job, len(scripts[0]), observer=observer, start=start)

    def _learner(self, membership: VirtualMembership, rank: int, start: LearnerState | None) -> VirtualLearner:
        script = self._scripts[self._place][rank]
        learner = ReplayedLearner(membership, rank, self._observer, start, script)
        learner.watch = self._look
        return learner

    def _look(self, learner: ReplayedLearner, loss: float) -> None:
        """Call `watch` with a gradient. Raises `ReplayStopped` if `watch` returns True."""
        self._num_gradients += 1
        if self.watch is None:
            return
        own, norm = learner.replica, torch.linalg.vector_norm
        mean = torch.stack([each.replica.weights for each in self._current.learners]).mean(dim=0)
        ticket, examples = learner.claimed()[0]
        moment = Moment(
            self._num_gradients,
            learner.life.name,
            ticket,
            loss,
            float(norm(own.gradients)),
            float(norm(own.weights)),
            float(norm(own.weights - mean)),
            own.version - learner.gradient_version,
            tuple(getattr(examples, "ids", ())),
            {"g": own.gradients, "w": own.weights, "mean": mean},
        )
        if self.watch(moment):
            raise ReplayStopped

    def _wait_for(self, event: simpy.Event) -> None:
        """Wait for an event, or until all learners have replayed the record of this membership."""
        try:
            super()._wait_for(event)
        except Deadlock:
            for learner in cast(list[ReplayedLearner], self._current.learners):
                if learner.cuts is not None:
                    learner.cuts.save()  # states that became complete after the learner's last claim
            if self._place + 1 == len(self._scripts):
                raise self._stuck() from None
            self._end(self._scripts[self._place + 1][0].members)
            super()._wait_for(event)

    def _stuck(self) -> ReplayError:
        """Return the error for a replay that has reached the end of the record although the run has not ended."""
        learners = cast(list[ReplayedLearner], self._current.learners)
        held = [str(each.life.name) for each in learners if not each.given.turns_left.are_over]
        done = sum(each.statistics.num_claimed for each in learners)
        if held:
            return ReplayError(
                f"the replay stops after {done} mini-batches: learners {', '.join(held)} wait for what no other has "
                f"sent ({self._current.deadlock()})"
            )
        return RecordEnded(
            f"the record ends after {done} mini-batches, before the run did: its learners were killed or "
            "ended with an error, or it is not complete; up to there, each saved state has the same weights"
        )

    def _end(self, members: Sequence[int]) -> None:
        """End the membership. `members` continue in the next one."""
        for life in self._current.lives:
            if life.name not in members:
                life.death = "was lost"
        self._current.leave("a membership of the record has ended")

    def _after(self, before: VirtualMembership) -> tuple[Membership, MembershipStart]:
        self._place += 1
        script, simulation = self._scripts[self._place][0], self._simulation
        for name in script.members:
            if name not in simulation.lives or simulation.lives[name].is_dead:
                simulation.begin_life(name)
        return Membership(script.number, tuple(script.members)), MembershipStart.decode(script.plan)
