"""The joiners of a running experiment: which are requested, which have been started, and how each attempt ended."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from starling.errors import StarlingError
from starling.launch.messages import JoinAnswer, JoinRequest
from starling.launch.process import end_loaders
from starling.launch.requests import Requests
from starling.launch.roster import LearnerRecord, LearnerState, Roster
from starling.timeouts import JOINER_FRESH
from starling.training.faults import Join

MAX_LEARNERS = 4096
Succession = Callable[[Sequence[int], Collection[int], Sequence[int]], tuple[int, ...]]
"""Computes the members of the next membership, in rank order, from the members of the current one, the ids of lost
learners and the ids of joiners; see `Strategy.successors`."""


def any_number(members: Sequence[int], lost: Collection[int], joining: Sequence[int]) -> tuple[int, ...]:
    """The succession of a strategy that works with any number of learners."""
    gone = set(lost)
    return (*(learner for learner in members if learner not in gone), *joining)


@dataclass(frozen=True)
class Changes:
    """How the set of learners may change during a run."""

    succession: Succession = any_number
    replaces: bool = False
    """Whether a lost learner is restarted."""
    joins: Sequence[Join] = ()
    """Learners that join at a given time."""
    requests: Requests | None = None
    """Requests of other processes for more learners; None if there can be none."""
    is_open: bool = True
    """Whether these requests are granted."""
    say: Callable[[str], None] = lambda line: None
    on_join: Callable[[int, int], None] = lambda learner_id, num_learners: None
    """Called when a learner has joined, with the number of learners that now train."""
    on_left_out: Callable[[int, str], None] = lambda learner_id, reason: None
    """Called when a joiner was started but did not join, with the reason."""


@dataclass
class _OpenRequest:
    request: JoinRequest
    open: set[int]
    """The learners that have neither joined nor failed yet."""
    joined: list[int] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


class Joiners:
    """Requested and started joiners, each until it trains or has failed.

    `start` starts a process for a learner that has none running.
    """

    def __init__(self, changes: Changes, roster: Roster, start: Callable[[int], LearnerRecord]) -> None:
        self._changes = changes
        self._roster = roster
        self._start = start
        self._wanted: list[int] = []
        self._joining: dict[int, LearnerRecord] = {}
        self._open_requests: list[_OpenRequest] = []
        self._timed = sorted(changes.joins, key=lambda join: join.at_seconds)
        self._begin: float | None = None

    def __contains__(self, record: LearnerRecord) -> bool:
        return self._joining.get(record.learner_id) is record

    def want(self, learner_ids: Iterable[int]) -> None:
        """Request these learners: `tend` starts each once its previous process, if any, has exited."""
        self._wanted = list(dict.fromkeys([*self._wanted, *learner_ids]))

    def tend(self, members: Sequence[int], is_ending: bool) -> list[LearnerRecord]:
        """Take new requests, start the requested learners, and return those that were started.

        Called only after all `members`, except joiners still on their way, have entered a membership. `is_ending` is
        true once one of them has exited: then requests are refused, and no learner is started.
        """
        now = self._roster.clock()
        self._begin = now if self._begin is None else self._begin
        while self._timed and now - self._begin >= self._timed[0].at_seconds:
            self._join_on_purpose(self._timed.pop(0).join, members)
        for request in self._changes.requests.take() if self._changes.requests else ():
            self._take(request, members, is_ending)
        learners = self._roster.learners
        still_running = {each for each in self._wanted if each in learners and learners[each].is_running}
        due = [each for each in self._wanted if each not in still_running and not is_ending]
        if due:
            self._wanted = [each for each in self._wanted if each in still_running]
        started = [record for each in due if (record := self._started(each, len(members))) is not None]
        self._joining |= {each.learner_id: each for each in started}
        return started

    def ready(self, members: Sequence[int]) -> tuple[list[int], tuple[int, ...]]:
        """The joiners to admit now, oldest first, and the members of the next membership. Of the ready joiners, as many
        are admitted as the strategy can use; both results are empty if that is none."""
        ready = [
            each.learner_id
            for each in self.waiting(members)
            if each.state is LearnerState.READY and each.is_running and self._roster.since_heard(each) < JOINER_FRESH
        ]
        for number in range(len(ready), 0, -1):
            try:
                return ready[:number], self._changes.succession(members, (), ready[:number])
            except StarlingError:
                continue
        return [], ()

    def expected(self, members: Collection[int]) -> list[LearnerRecord]:
        """The joiners that are members already: the other members wait for them."""
        inside = set(members) if self._joining else set()
        return [each for each in self._joining.values() if each.learner_id in inside]

    def waiting(self, members: Collection[int]) -> list[LearnerRecord]:
        """The joiners that are not members yet."""
        inside = set(members) if self._joining else set()
        return [each for each in self._joining.values() if each.learner_id not in inside]

    def settle(self, members: Sequence[int], exited: Sequence[LearnerRecord]) -> list[int]:
        """Remove the joiners that have started training or have `exited`; return the ids of `members` among the
        exited."""
        failed, is_one_missing = [], False
        gone = {each.learner_id for each in exited}
        for learner_id, record in list(self._joining.items()):
            if record.attempt.generation >= 0:
                del self._joining[learner_id]
                self._changes.on_join(learner_id, len(members))
                self._note(learner_id, len(members), "")
            elif learner_id in gone:
                del self._joining[learner_id]
                self._leave_out(record, record.describe_exit(), members)
                failed += [learner_id] if learner_id in members else []
                is_one_missing = True
        if is_one_missing and not failed:
            self.drop_unusable(members)
        return failed

    def drop_unusable(self, members: Sequence[int]) -> None:
        """If the members cannot form a valid membership with the remaining joiners, kill these joiners and drop the
        learners that have not been started."""
        waiting = self.waiting(members)
        try:
            self._changes.succession(members, (), [*(each.learner_id for each in waiting), *self._wanted])
        except StarlingError as error:
            for record in waiting:
                del self._joining[record.learner_id]
                record.kill()
                self._leave_out(record, f"learner {record.learner_id} was killed ({error})", members)
            for learner_id in self._wanted:
                self._note(learner_id, len(members), f"learner {learner_id} was not started ({error})")
            self._wanted.clear()

    def close(self, members: Sequence[int]) -> None:
        """Answer the requests that are still open when the run ends."""
        for each in self._open_requests:
            each.failed += [f"learner {joiner}: the run ended before it joined" for joiner in sorted(each.open)]
            self._answer(each, len(members))
        self._open_requests.clear()

    def _leave_out(self, record: LearnerRecord, reason: str, members: Sequence[int]) -> None:
        self._roster.lose(record.learner_id)
        if record.process is not None:
            end_loaders([record.process])
        self._changes.on_left_out(record.learner_id, reason)
        self._note(record.learner_id, len(members), reason)

    def _started(self, learner_id: int, num_members: int) -> LearnerRecord | None:
        try:
            return self._start(learner_id)
        except OSError as error:  # for example out of memory; the run continues without this joiner
            reason = f"learner {learner_id} could not be started ({error})"
            self._changes.say(reason)
            self._note(learner_id, num_members, reason)
            return None

    def _join_on_purpose(self, learner_id: int, members: Sequence[int]) -> None:
        is_there = learner_id in members or learner_id in self._joining
        if is_there or learner_id in self._wanted:
            self._changes.say(f"faults: learner {learner_id} does not join, because it is already running or starting")
        else:
            self.want([learner_id])

    def _take(self, request: JoinRequest, members: Sequence[int], is_ending: bool) -> None:
        if is_ending or not self._changes.is_open:
            self._refuse(request, "the run is ending" if is_ending else "the run was started with on_loss: stop")
            return
        others = [each for each in [*self._joining, *self._wanted] if each not in members]
        limit = MAX_LEARNERS - len(members) - len(others)
        if not 1 <= request.learners <= limit:
            self._refuse(request, f"the number of learners must be in [1, {limit}], got {request.learners}")
            return
        learner_ids = self._free(request.learners, {*members, *others})
        try:
            self._changes.succession(members, (), [*others, *learner_ids])
        except StarlingError as error:
            num_before = len(members) + len(others)
            self._refuse(request, f"cannot add {request.learners} to the run's {num_before} learners: {error}")
            return
        self._open_requests.append(_OpenRequest(request, set(learner_ids)))
        self.want(learner_ids)

    def _free(self, number: int, taken: Collection[int]) -> list[int]:
        """`number` unused ids: those of lost learners first, then new ones."""
        known = sorted({*self._roster.learners, *taken})
        running = {each.learner_id for each in self._roster.learners.values() if each.is_running}
        free = [each for each in known if each not in taken and each not in running]
        return [*free, *range(known[-1] + 1, known[-1] + 1 + number)][:number]

    def _note(self, learner_id: int, num_members: int, failure: str) -> None:
        for each in [each for each in self._open_requests if learner_id in each.open]:
            each.open.remove(learner_id)
            if failure:
                each.failed.append(failure)
            else:
                each.joined.append(learner_id)
            if not each.open:
                self._open_requests.remove(each)
                self._answer(each, num_members)

    def _answer(self, open_request: _OpenRequest, num_members: int) -> None:
        if self._changes.requests:
            answer = JoinAnswer("", tuple(sorted(open_request.joined)), tuple(open_request.failed), num_members)
            self._changes.requests.answer(open_request.request, answer)

    def _refuse(self, request: JoinRequest, reason: str) -> None:
        self._changes.say(f"a request for learners was refused: {reason}")
        if self._changes.requests:
            self._changes.requests.answer(request, JoinAnswer(refused=reason))
