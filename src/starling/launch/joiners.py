"""Learners that join a run under way: which are wanted, which were started, and what became of each."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from starling.errors import StarlingError
from starling.launch.messages import JoinAnswer, JoinRequest
from starling.launch.process import end_loaders
from starling.launch.requests import Requests
from starling.launch.roster import LearnerRecord, LearnerState, Roster
from starling.timeouts import JOINER_FRESH
from starling.training.faults import Join

MOST_LEARNERS = 4096
Succession = Callable[[Sequence[int], Collection[int], Sequence[int]], tuple[int, ...]]
"""From the members of a membership, the ids of those lost and of those that join to the members of the next one, in the
order of their ranks; see `Strategy.successors`."""


def any_number(members: Sequence[int], lost: Collection[int], joining: Sequence[int]) -> tuple[int, ...]:
    """The succession where any number of learners will do."""
    return (*(learner for learner in members if learner not in lost), *joining)


@dataclass(frozen=True)
class Changes:
    """How the learners of a run may change while it trains."""

    succession: Succession = any_number
    replaces: bool = False
    """Whether a lost learner is started again."""
    joins: Sequence[Join] = ()
    """Learners that join at a given time."""
    requests: Requests | None = None
    """Where other processes ask for more learners."""
    is_open: bool = True
    """Whether they may have more."""
    say: Callable[[str], None] = lambda line: None
    on_join: Callable[[int, int], None] = lambda learner_id, num_learners: None
    """Called when a learner has joined, with the number of learners that train now."""
    on_left_out: Callable[[int, str], None] = lambda learner_id, reason: None
    """Called for a learner that was started and did not join, with the reason."""


@dataclass
class _Asked:
    request: JoinRequest
    open: set[int]
    """The learners whose outcome is not known yet."""
    joined: list[int] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


class Joiners:
    """The learners that are to join, from the request until they train or have failed.

    `start` starts the process of a learner that has none running.
    """

    def __init__(self, changes: Changes, roster: Roster, start: Callable[[int], LearnerRecord]) -> None:
        self._changes = changes
        self._roster = roster
        self._start = start
        self._wanted: list[int] = []
        self._joining: list[LearnerRecord] = []
        self._asked: list[_Asked] = []
        self._timed = sorted(changes.joins, key=lambda join: join.at_seconds)
        self._begin: float | None = None

    def __contains__(self, record: LearnerRecord) -> bool:
        return any(record is each for each in self._joining)

    def want(self, learner_ids: Iterable[int]) -> None:
        """Start these learners as soon as no process of theirs runs."""
        self._wanted += [each for each in learner_ids if each not in self._wanted]

    def tend(self, members: Sequence[int], is_ending: bool) -> list[LearnerRecord]:
        """Start the learners that are wanted, and return those that were started. All `members` have met; `is_ending`
        once one of them has ended well."""
        now = self._roster.clock()
        self._begin = now if self._begin is None else self._begin
        while self._timed and now - self._begin >= self._timed[0].at_seconds:
            self._join_on_purpose(self._timed.pop(0).join, members)
        for request in self._changes.requests.take() if self._changes.requests else ():
            self._take(request, members, is_ending)
        running = self._running()
        due = [each for each in self._wanted if each not in running and not is_ending]
        self._wanted = [each for each in self._wanted if each not in due]
        started = [record for each in due if (record := self._started(each, len(members))) is not None]
        self._joining += started
        return started

    def ready(self, members: Sequence[int]) -> tuple[list[int], tuple[int, ...]]:
        """The joiners that can be let in now, the first ones first, and the members with them; none if too few are
        ready for the strategy."""
        ready = [
            each.learner_id
            for each in self._joining
            if each.state is LearnerState.READY
            and each.is_running
            and each.learner_id not in members
            and self._roster.since_heard(each) < JOINER_FRESH
        ]
        for number in range(len(ready), 0, -1):
            try:
                return ready[:number], self._changes.succession(members, (), ready[:number])
            except StarlingError:
                continue
        return [], ()

    def expected(self, members: Collection[int]) -> list[LearnerRecord]:
        """The joiners that the other members wait for."""
        return [each for each in self._joining if each.learner_id in members]

    def waiting(self, members: Collection[int]) -> list[LearnerRecord]:
        """The joiners that are not members yet."""
        return [each for each in self._joining if each.learner_id not in members]

    def settle(self, members: Sequence[int], exited: Sequence[LearnerRecord]) -> list[int]:
        """Note which joiners have come to train, and which have `exited` before that; the ids of members that did not
        come."""
        failed, is_one_missing = [], False
        for record in list(self._joining):
            learner_id = record.learner_id
            if record.generation >= 0:
                self._joining.remove(record)
                self._changes.on_join(learner_id, len(members))
                self._note(learner_id, len(members), "")
            elif any(record is each for each in exited):
                self._joining.remove(record)
                self._leave_out(record, record.end_in_words(), members)
                failed += [learner_id] if learner_id in members else []
                is_one_missing = True
        if is_one_missing and not failed:
            self.drop_the_rest(members)
        return failed

    def drop_the_rest(self, members: Sequence[int]) -> None:
        """If the remaining joiners cannot form a valid membership, kill them and drop the pending requests."""
        waiting = self.waiting(members)
        try:
            self._changes.succession(members, (), [*(each.learner_id for each in waiting), *self._wanted])
        except StarlingError as error:
            for record in waiting:
                self._joining.remove(record)
                record.kill()
                self._leave_out(record, f"learner {record.learner_id} was killed ({error})", members)
            for learner_id in self._wanted:
                self._note(learner_id, len(members), f"learner {learner_id} was not started ({error})")
            self._wanted.clear()

    def close(self, members: Sequence[int]) -> None:
        """The run has ended: answer the requests that are still open."""
        for asked in self._asked:
            asked.failed += [f"learner {each}: the run ended before it had joined" for each in sorted(asked.open)]
            self._answer(asked, len(members))
        self._asked.clear()

    def _leave_out(self, record: LearnerRecord, reason: str, members: Sequence[int]) -> None:
        self._roster.lose(record.learner_id)
        if record.process is not None:
            end_loaders([record.process])
        self._changes.on_left_out(record.learner_id, reason)
        self._note(record.learner_id, len(members), reason)

    def _started(self, learner_id: int, num_members: int) -> LearnerRecord | None:
        try:
            return self._start(learner_id)
        except OSError as error:  # such as too little memory; the others do not need it
            reason = f"learner {learner_id} could not be started ({error})"
            self._changes.say(reason)
            self._note(learner_id, num_members, reason)
            return None

    def _running(self) -> set[int]:
        return {each.learner_id for each in self._roster.learners.values() if each.is_running}

    def _join_on_purpose(self, learner_id: int, members: Sequence[int]) -> None:
        is_there = learner_id in members or any(each.learner_id == learner_id for each in self._joining)
        if is_there or learner_id in self._wanted:
            self._changes.say(f"learner {learner_id} was to join on purpose, but is there already")
        else:
            self.want([learner_id])

    def _take(self, request: JoinRequest, members: Sequence[int], is_ending: bool) -> None:
        if is_ending or not self._changes.is_open:
            self._refuse(request, "the run is ending" if is_ending else "the run was started with on_loss: stop")
            return
        others = [each for each in [*(each.learner_id for each in self._joining), *self._wanted] if each not in members]
        most = MOST_LEARNERS - len(members) - len(others)
        if not 1 <= request.learners <= most:
            self._refuse(request, f"{request.learners} learners are asked for; the number must be in [1, {most}]")
            return
        learner_ids = self._free(request.learners, {*members, *others})
        try:
            self._changes.succession(members, (), [*others, *learner_ids])
        except StarlingError as error:
            num_before = len(members) + len(others)
            self._refuse(request, f"the run keeps its {num_before} learners, and gets no {request.learners}: {error}")
            return
        self._asked.append(_Asked(request, set(learner_ids)))
        self.want(learner_ids)

    def _free(self, number: int, taken: Collection[int]) -> list[int]:
        """So many ids: first those of lost learners, then new ones."""
        known = sorted({*self._roster.learners, *taken})
        running = self._running()
        free = [each for each in known if each not in taken and each not in running]
        return [*free, *range(known[-1] + 1, known[-1] + 1 + number)][:number]

    def _note(self, learner_id: int, num_members: int, failure: str) -> None:
        for asked in [each for each in self._asked if learner_id in each.open]:
            asked.open.remove(learner_id)
            if failure:
                asked.failed.append(failure)
            else:
                asked.joined.append(learner_id)
            if not asked.open:
                self._asked.remove(asked)
                self._answer(asked, num_members)

    def _answer(self, asked: _Asked, num_members: int) -> None:
        if self._changes.requests:
            answer = JoinAnswer("", tuple(sorted(asked.joined)), tuple(asked.failed), num_members)
            self._changes.requests.answer(asked.request, answer)

    def _refuse(self, request: JoinRequest, reason: str) -> None:
        self._changes.say(f"a request for learners was refused: {reason}")
        if self._changes.requests:
            self._changes.requests.answer(request, JoinAnswer(refused=reason))
