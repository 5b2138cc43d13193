"""The continuation of a run after a membership change, and the saving of states that include the same work.

The plan of a membership says with which learners, at which position and from whose state the run continues. The saved
states of all learners must include the same work, although learners may not step together.

Learners pass a checkpoint barrier at different times, each between two of its own mini-batches, and no learner waits
there. Suppose that each learner saved the weights that it has at that moment. A round between two of these moments
would then be in one state but not in the other, and the mean of the saved weights would lack a part of one learner's
progress and include a part of another learner's progress twice. Therefore a learner copies its state, and adds to the
copy the changes of further rounds, up to the cut. The cut is the first round that no learner has entered when the last
learner passes the barrier. The changes of a round sum to zero over all learners, whatever the learners have done in the
meantime. The mean of the copies therefore includes each mini-batch before the barrier once, and no later mini-batch.

Similarly, a server copies its model shards before the first push of a worker that has passed the barrier, and applies
the pushes of workers that have not passed it to the copies, too; see `HeldShard.fork`.
"""

from __future__ import annotations

import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

import torch
from pydantic import TypeAdapter
from torch import Tensor

from starling.checkpoint.state import MEMBERSHIP_PREFIX, ROUNDS_PREFIX, LearnerState, beyond_membership, has_common, own
from starling.consensus import ROUNDING
from starling.errors import ConfigError, PeerLost
from starling.training.faults import Kill, NotFinite, Pause, faults_of
from starling.training.job import Job, Statistics
from starling.training.membership import Membership
from starling.training.order import Script
from starling.training.replica import Replica
from starling.training.speeds import Delays, shares_for
from starling.training.tickets import DoneTickets, SyncGroupTickets, position_after
from starling.workload import Position

_NUM_SUMS = 64


@dataclass(frozen=True)
class Past:
    """A learner's progress before a new membership."""

    membership: int | None = None
    """Number of the last membership in which the learner trained; None if it is new and has no state."""
    num_done: int = 0
    """Number of mini-batches that the learner completed in that membership."""
    minutes: float = 0.0
    """Training time so far."""
    counted: int = 0
    """Sum of the strategy's common counts."""


@dataclass(kw_only=True)
class Life:
    """The state that one learner keeps from one membership to the next."""

    name: int
    delays: Delays
    """Delays that are injected into the learner."""
    faults: Iterator[Sequence[Kill | Pause | NotFinite]]
    """Faults that are injected at each of the learner's mini-batches."""
    state: LearnerState | None = None
    """State of the learner at the end of the last membership, or from a checkpoint; None if it has none yet."""
    script: Script | None = None
    """The learner's part of the record that it follows; None if it follows no record."""
    past: Past = field(default_factory=Past)
    statistics: Statistics = field(default_factory=Statistics)

    @classmethod
    def begin(cls, job: Job, name: int, is_new: bool, **more: Any) -> Self:
        """Create the `Life` of a learner that starts. A joiner or restarted learner (`is_new`) has no injected
        faults."""
        return cls(
            name=name,
            delays=Delays(job.stragglers, job.seed, name),
            faults=faults_of(() if is_new else job.faults, name),
            **more,
        )


@dataclass(frozen=True)
class MembershipStart:
    """The plan with which a membership begins: the position of the run, and the learners that copy another learner's
    state."""

    world: int
    position: Position
    minutes: float
    """Training time so far, which is the same for all learners."""
    source: int | None = None
    """Rank whose state the `takers` copy, and whose strategy state all learners copy. With islands, it is the first
    rank of an island, each of whose ranks provides its state to the ranks with the same model shard. None if each
    learner continues from its own state."""
    takers: tuple[int, ...] = ()
    """Ranks that copy the state of `source`."""
    shares: tuple[int, ...] = ()
    """Batch shares by rank. If the tuple is empty, each learner has one mini-batch."""
    measured: tuple[tuple[int, int], ...] = ()
    """Name and batch share of each learner whose speed was measured when the run began."""

    def with_shares(self, job: Job, names: Sequence[int], seconds: Sequence[float] | None = None) -> MembershipStart:
        """Return the plan with the batch shares of the learners that have these names, by rank. `seconds` contains the
        time that each learner needs for a mini-batch, if it was measured."""
        measured = self.measured if seconds is None else tuple(zip(names, shares_for(seconds), strict=True))
        given = dict(measured) if job.batch_shares == "auto" else job.batch_shares
        shares = tuple(given.get(name, 1) for name in names) if given else ()
        return replace(self, shares=shares, measured=measured)

    def encode(self) -> str:
        """Return the plan as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str | bytes) -> MembershipStart:
        """Decode a plan that `encode` has encoded."""
        return TypeAdapter(cls).validate_json(text)

    def state(self, rank: int, own: LearnerState | None) -> LearnerState:
        """Return the state with which learner `rank` begins. A learner without a state receives its weights later from
        `source`."""
        own = own or LearnerState(rank, self.world, self.position, self.minutes, torch.empty(0), {}, {})
        return replace(
            own.for_computing(),
            rank=rank,
            world=self.world,
            position=self.position,
            minutes=self.minutes,
            epochs_ended=None,
            strategy=beyond_membership(own.strategy),
        )

    def with_source(self, rank: int, own: LearnerState, source: LearnerState) -> LearnerState:
        """Return the state of learner `rank` with the parts that it copies from the state of its `source`."""
        state = own.with_strategy_of(source)
        if rank not in self.takers:
            return state
        return replace(state, weights=source.weights, buffers=source.buffers, optimizer=source.optimizer)


def next_membership(job: Job, before: Membership, change: Membership, is_ordered: bool = False) -> Membership:
    """Return the membership after `before`. Its members are the living learners in `change` with which the strategy can
    continue.

    `Strategy.successors` determines their order. With `is_ordered`, `change` already lists them in order, possibly
    after several memberships in which this learner did not take part. Raises `PeerLost` if the strategy cannot
    continue.
    """
    members_before, members_now = set(before.members), set(change.members)
    lost = [name for name in before.members if name not in members_now]
    joined = [name for name in change.members if name not in members_before]
    try:
        if not is_ordered:
            return replace(change, members=job.strategy.successors(job.options, before.members, lost, joined))
        lost_ranks = [rank for rank, name in enumerate(before.members) if name not in members_now]
        ranks = job.strategy.survivors(job.options, len(before.members), lost_ranks)
        leaving = members_before - {before.members[rank] for rank in ranks}
        members = tuple(name for name in change.members if name not in leaving)
        job.validate(len(members))
    except (ConfigError, PeerLost) as error:
        raise PeerLost(f"{change.reason}; {job.strategy.name} cannot continue: {error}") from error
    return replace(change, members=members)


def plan_after(
    before: MembershipStart,
    members: Sequence[Past],
    job: Job,
    all_done: Callable[[], DoneTickets],
    names: Sequence[int] = (),
) -> MembershipStart:
    """Return the plan of a membership, given its members' pasts by rank. `before` is the plan of the last membership in
    which any of the members trained, and `all_done` returns the tickets that were done in it. The batch shares of the
    members depend on their `names`."""
    size = job.island.size
    models = [_past_of_island(members[first : first + size]) for first in range(0, len(members), size)]
    if all(each.membership is None for each in models) and any(each.membership is not None for each in members):
        raise PeerLost(
            "the ranks of every island were interrupted at different steps, so that no whole model is left; resume "
            "from the newest checkpoint"
        )
    last = max(each.membership for each in models if each.membership is not None)
    newest = max(
        range(len(models)),
        key=lambda number: (
            models[number].membership == last,
            models[number].num_done,
            models[number].counted,
            -number,
        ),
    )
    if job.strategy.has_one_model:
        # all learners are one sync group
        per_batch = job.island.tensor
        tickets = SyncGroupTickets(job.workload, before.position, job.budget, before.world, before.shares, per_batch)
        position = tickets.position(models[newest].num_done)
        current = [each.membership == last and each.num_done == models[newest].num_done for each in models]
    else:
        position = position_after(before.position, job.workload, all_done())
        if not job.strategy.has_common_state(job.options):
            newest = next(number for number, each in enumerate(models) if each.membership is not None)
        current = [each.membership is not None for each in models]
    takers = tuple(rank for rank in range(len(members)) if not current[rank // size])
    plan = MembershipStart(
        world=len(members),
        position=position,
        minutes=max(each.minutes for each in members),
        source=newest * size if takers or job.strategy.has_common_state(job.options) else None,
        takers=takers,
        measured=before.measured,
    )
    return plan.with_shares(job, names)


def _past_of_island(ranks: Sequence[Past]) -> Past:
    """Return the past of the model that these ranks hold. It is the past of a joiner unless all ranks have made the
    same steps."""
    pasts = {(each.membership, each.num_done) for each in ranks}
    return ranks[0] if len(pasts) == 1 else Past()


def must_begin_equal(job: Job, start: LearnerState | None) -> bool:
    """Return whether learners that begin with state `start`, or without a state, must all have the same weights."""
    return job.strategy.begins_equal(job.options, has_common({} if start is None else start.strategy))


def sketch(weights: Tensor) -> list[float]:
    """Return numbers with which learners compare their weights `[P]` without sending them: the norm, and sums of every
    64th weight. Rounding changes these numbers little; a difference in weights changes them considerably."""
    sums = torch.stack([weights[first::_NUM_SUMS].sum(dtype=torch.float64) for first in range(_NUM_SUMS)])
    return [float(torch.linalg.vector_norm(weights, dtype=torch.float64)), *sums.tolist()]


def are_apart(mine: Sequence[float], theirs: Sequence[float]) -> bool:
    """Return whether the weights of two sketches differ by more than rounding."""
    most = ROUNDING * max(mine[0], theirs[0])
    return any(abs(one - other) > most for one, other in zip(mine, theirs, strict=True))


def different_weights(job: Job, learner: int, other: int) -> str:
    """Return the message that two learners begin with different weights."""
    return (
        f"learner {learner} and learner {other} begin with different weights, but under {job.strategy.name} all "
        "learners begin with the same; let make_model give every learner the same weights, for example after "
        "torch.manual_seed. After a resume, its checkpoint holds different ones: resume with another number of "
        "learners, which all begin with the mean"
    )


class CutAgreement(ABC):
    """Agreement of all learners on the cut of each checkpoint barrier. Barriers and rounds are numbered from 0."""

    @abstractmethod
    def passed(self, barrier: int, num_entered: int) -> None:
        """Record that this learner has passed a barrier after entering `num_entered` rounds. The last learner to pass
        places the cut."""

    @abstractmethod
    def cut(self, barrier: int) -> int | None:
        """Return the cut of a barrier, or None if it is not known yet."""

    def is_cut(self, barrier: int, number: int) -> bool:
        """Return whether a round is the cut of a barrier that this learner has passed. The background calls this method
        whenever it enters a round, before the round changes anything."""
        return self.cut(barrier) == number

    def saved(self, barrier: int) -> None:  # noqa: B027 - the processes' store forgets a cut, memory need not
        """Record that this learner has the complete state of a barrier, and no longer needs the cut of the barrier."""


class RecordedCuts(CutAgreement):
    """Cuts that become known at the same time as in a record.

    `cuts` contains, for each barrier, its cut and the number of times that the activity that saved the state had used
    the weights. `num_own` returns the number of times that the calling activity has used the weights.
    """

    def __init__(self, cuts: Mapping[int, tuple[int | None, int]], num_own: Callable[[], int]) -> None:
        self._cuts, self._num_own = cuts, num_own

    def passed(self, barrier: int, num_entered: int) -> None:
        """Do nothing, because the cut is recorded."""

    def is_cut(self, barrier: int, number: int) -> bool:
        return barrier in self._cuts and self._cuts[barrier][0] == number

    def cut(self, barrier: int) -> int | None:
        number, turn = self._cuts.get(barrier, (None, 0))
        return number if self._num_own() >= turn else None


@dataclass
class _Pending:
    """A state at a checkpoint barrier that is not saved yet."""

    barrier: int
    state: LearnerState
    save: Callable[[LearnerState], None]
    complete: Callable[[LearnerState], LearnerState]
    is_complete: bool = False
    cut: int | None = None
    """Cut of the barrier, once the background has found it."""


class Cuts:
    """The states that a learner has copied at checkpoint barriers and that are not complete yet.

    The foreground copies and saves states. The background reports the rounds that it enters and completes.
    """

    def __init__(self, replica: Replica, agreement: CutAgreement, takes_turns: bool = True) -> None:
        """Begin without states. `takes_turns` is false if the learner follows the record of a run that copied no
        states."""
        self._replica, self._agreement, self._takes_turns = replica, agreement, takes_turns
        self._lock = threading.Lock()
        self._pending: list[_Pending] = []
        self.num_passed = self._num_entered = self._num_completed = 0
        self.on_cut: Callable[[int, int | None, int], object] = lambda barrier, cut, turn: None
        """Function that is called with a barrier whose state is complete, the cut of the barrier (None at the end of
        the run), and the number of times that the calling activity had used the weights when it asked for the cut."""

    def entered(self, number: int) -> None:
        """Record that the background enters a round."""
        with self._lock:
            self._num_entered = number + 1
            pending = [each for each in self._pending if not each.is_complete]
        for each in pending:
            if self._agreement.is_cut(each.barrier, number):
                each.cut = number
                self._complete(each)

    def completed(self, number: int) -> None:
        """Record that the background has completed all rounds below `number`."""
        self._num_completed = number

    def add(
        self,
        state: LearnerState,
        save: Callable[[LearnerState], None],
        complete: Callable[[LearnerState], LearnerState] | None = None,
    ) -> None:
        """Copy the state at the next barrier, and `save` it once it is complete. A state is complete when it includes
        its rounds. With `complete`, that function completes the state after all learners have passed the barrier."""
        copied = state.copy()
        if complete is None and self._takes_turns:
            self._replica.order.wait()  # before the lock, because the background acquires it in its own turns
        with self._lock:
            chosen = self._copy_for_rounds() if complete is None else complete
            self._pending.append(pending := _Pending(self.num_passed, copied, save, chosen))
            num_entered = self._num_entered
        self.num_passed += 1
        self._agreement.passed(pending.barrier, num_entered)

    @property
    def pending(self) -> list[LearnerState]:
        """The states that are not saved yet."""
        return [each.state for each in self._pending]

    def save(self, is_over: bool = False) -> None:
        """Save, in order, the states that are complete, or all states if the run is over. Call this method between two
        mini-batches."""
        while self._pending:
            first = self._pending[0]
            turn = self._replica.order.num_own
            cut = None if is_over else self._agreement.cut(first.barrier)
            if not first.is_complete:
                if not is_over and (cut is None or self._num_completed < cut):
                    return
                self._complete(first)
            self.on_cut(first.barrier, cut if first.cut is None else first.cut, turn)
            if not is_over:
                self._agreement.saved(first.barrier)
            self._pending.pop(0)
            first.save(first.state)

    def _complete(self, pending: _Pending) -> None:
        """Complete a state that other learners no longer change."""
        with self._lock:
            if not pending.is_complete:
                pending.state = pending.complete(pending.state)
                pending.is_complete = True

    def _copy_for_rounds(self) -> Callable[[LearnerState], LearnerState]:
        """Copy the state that rounds change, and let further rounds add their changes to the copies. Return a function
        that puts the copies into a state."""
        replica, copies = self._replica, self._replica.copy_for_rounds(self._takes_turns)

        def complete(state: LearnerState) -> LearnerState:
            optimizer = replica.end_copy_for_rounds(copies, state.optimizer)
            kept = replica.strategy_state.items()
            of_rounds = {name: own(each) for name, each in kept if name.startswith((MEMBERSHIP_PREFIX, ROUNDS_PREFIX))}
            return replace(state, weights=copies[0], optimizer=optimizer, strategy=state.strategy | of_rounds)

        return complete
