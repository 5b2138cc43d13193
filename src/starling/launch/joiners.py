"""Learners that come to a run that goes on: who is wanted, who was started, and what became of each."""

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from starling.errors import StarlingError
from starling.launch.process import LOADING_GRACE, Process, Seconds, end_loading
from starling.launch.requests import Answer, Request, Requests
from starling.training.faults import Join

FRESH: Seconds = 5.0
"""Who is to be let in has given a sign of life so recently."""
MOST_LEARNERS = 4096
Succession = Callable[[Sequence[int], Collection[int], Sequence[int]], tuple[int, ...]]
"""From the members of a view, the names of those lost and of those who came to the members of the next view, in the
order of their ranks; see `Strategy.successors`."""


def everybody(members: Sequence[int], lost: Collection[int], came: Sequence[int]) -> tuple[int, ...]:
    """The succession where any number of learners will do."""
    return (*(name for name in members if name not in lost), *came)


@dataclass(frozen=True)
class Changes:
    """How the learners of a run may change while it goes on."""

    succession: Succession = everybody
    replaces: bool = False
    """Whether a learner that was lost is started again."""
    joins: Sequence[Join] = ()
    """Learners that come at a time."""
    requests: Requests | None = None
    """Where others ask for more."""
    is_open: bool = True
    """Whether they may have more."""
    say: Callable[[str], None] = lambda line: None
    on_join: Callable[[int], None] = lambda name: None
    on_left_out: Callable[[int, str], None] = lambda name, reason: None
    """Called for who was started and did not join, with the reason."""


@dataclass
class _Asked:
    request: Request
    names: set[int]
    """Of whom it is not yet known what becomes."""
    joined: list[int] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


class Joiners:
    """Those who are to join, from their being wanted until they compute or have failed.

    `processes` are all of the run, and `start` starts one more under a name that nobody bears.
    """

    def __init__(self, changes: Changes, processes: list[Process], start: Callable[[int], Process]) -> None:
        self._changes = changes
        self._processes = processes
        self._start = start
        self._wanted: list[int] = []
        self._coming: list[Process] = []
        self._asked: list[_Asked] = []
        self._timed = sorted(changes.joins, key=lambda join: join.at_seconds)
        self._begin: float | None = None

    def __contains__(self, process: Process) -> bool:
        return any(process is each for each in self._coming)

    def want(self, names: Iterable[int]) -> None:
        """Start learners under these names as soon as nobody bears them."""
        self._wanted += [name for name in names if name not in self._wanted]

    def tend(self, members: Sequence[int], is_ending: bool) -> list[Process]:
        """Start who is wanted; the new processes. All of `members` have met; `is_ending` if one has ended well."""
        now = time.monotonic()
        self._begin = now if self._begin is None else self._begin
        while self._timed and now - self._begin >= self._timed[0].at_seconds:
            self._join_on_purpose(self._timed.pop(0).join, members)
        for request in self._changes.requests.take() if self._changes.requests else ():
            self._take(request, members, is_ending)
        borne = self._borne()
        due = [name for name in self._wanted if name not in borne and not is_ending]
        self._wanted = [name for name in self._wanted if name not in due]
        started = [process for name in due if (process := self._started(name, len(members))) is not None]
        self._coming += started
        return started

    def ready(self, members: Sequence[int]) -> tuple[list[int], tuple[int, ...]]:
        """Those who can be let in now, the first ones first, and the members of the view with them; nobody if too few
        are ready for the strategy."""
        now = time.monotonic()
        names = [
            each.rank
            for each in self._coming
            if each.is_ready and each.is_running and each.rank not in members and now - each.heard < FRESH
        ]
        for number in range(len(names), 0, -1):
            try:
                return names[:number], self._changes.succession(members, (), names[:number])
            except StarlingError:
                continue
        return [], ()

    def joining(self, members: Collection[int]) -> list[Process]:
        """Those who are expected by the others, and have not yet met them."""
        return [each for each in self._coming if each.rank in members]

    def waiting(self, members: Collection[int]) -> list[Process]:
        """Those whom nobody expects yet."""
        return [each for each in self._coming if each.rank not in members]

    def settle(self, members: Sequence[int], ended: Sequence[Process]) -> list[int]:
        """Take note of who has come to compute, and of who has `ended` before; the names of those who have failed the
        others, who expected them."""
        failed, is_one_missing = [], False
        for process in list(self._coming):
            name = process.rank
            if process.view >= 0:
                self._coming.remove(process)
                self._changes.say(f"learner {name} has joined; {len(members)} learners go on")
                self._changes.on_join(name)
                self._note(name, len(members), "")
            elif any(process is each for each in ended):
                self._coming.remove(process)
                self._leave_out(process, process.end_in_words(), members)
                failed += [name] if name in members else []
                is_one_missing = True
        if is_one_missing and not failed:
            self.leave_out_the_stranded(members)
        return failed

    def leave_out_the_stranded(self, members: Sequence[int]) -> None:
        """Some have failed: end those who wait, and want nobody any more, where these cannot come without them."""
        waiting = self.waiting(members)
        try:
            self._changes.succession(members, (), [*(each.rank for each in waiting), *self._wanted])
        except StarlingError as error:
            for process in waiting:
                self._coming.remove(process)
                process.popen.kill()
                process.popen.wait()
                self._leave_out(process, f"learner {process.rank} was ended ({error})", members)
            for name in self._wanted:
                self._note(name, len(members), f"learner {name} was not started ({error})")
            self._wanted.clear()

    def _leave_out(self, process: Process, reason: str, members: Sequence[int]) -> None:
        process.is_out = True
        end_loading([process], time.monotonic() + LOADING_GRACE)
        self._changes.say(f"{reason}; it had not joined, and the others go on without it")
        self._changes.on_left_out(process.rank, reason)
        self._note(process.rank, len(members), reason)

    def close(self, members: Sequence[int]) -> None:
        """The run has ended: tell those who still wait."""
        for asked in self._asked:
            asked.failed += [f"learner {name}: the run ended before it had joined" for name in sorted(asked.names)]
            self._answer(asked, len(members))
        self._asked.clear()

    def _started(self, name: int, num_members: int) -> Process | None:
        try:
            return self._start(name)
        except OSError as error:  # such as too little memory; the others do not need it
            reason = f"learner {name} could not be started ({error})"
            self._changes.say(reason)
            self._note(name, num_members, reason)
            return None

    def _borne(self) -> set[int]:
        return {each.rank for each in self._processes if each.is_running}

    def _join_on_purpose(self, name: int, members: Sequence[int]) -> None:
        if name in members or name in self._wanted or any(each.rank == name for each in self._coming):
            self._changes.say(f"learner {name} was to join on purpose, but is there already")
        else:
            self.want([name])

    def _take(self, request: Request, members: Sequence[int], is_ending: bool) -> None:
        if is_ending or not self._changes.is_open:
            self._refuse(request, "the run has come to its end" if is_ending else "it was started with on_loss: stop")
            return
        others = [name for name in [*(each.rank for each in self._coming), *self._wanted] if name not in members]
        num_most = MOST_LEARNERS - len(members) - len(others)
        if not 1 <= request.learners <= num_most:
            self._refuse(request, f"{request.learners} learners are asked for; the number must be in [1, {num_most}]")
            return
        names = self._names(request.learners, {*members, *others})
        try:
            self._changes.succession(members, (), [*others, *names])
        except StarlingError as error:
            self._refuse(request, f"with {request.learners} more, {len(members) + len(others)} learners go on: {error}")
            return
        self._asked.append(_Asked(request, set(names)))
        self.want(names)

    def _names(self, number: int, taken: Collection[int]) -> list[int]:
        """Names for so many: first those of learners that were lost, then new ones."""
        known = sorted({each.rank for each in self._processes} | set(taken))
        free = [name for name in known if name not in taken and name not in self._borne()]
        return [*free, *range(known[-1] + 1, known[-1] + 1 + number)][:number]

    def _note(self, name: int, num_members: int, failure: str) -> None:
        for asked in [each for each in self._asked if name in each.names]:
            asked.names.remove(name)
            if failure:
                asked.failed.append(failure)
            else:
                asked.joined.append(name)
            if not asked.names:
                self._asked.remove(asked)
                self._answer(asked, num_members)

    def _answer(self, asked: _Asked, num_members: int) -> None:
        if self._changes.requests:
            answer = Answer("", tuple(sorted(asked.joined)), tuple(asked.failed), num_members)
            self._changes.requests.answer(asked.request, answer)

    def _refuse(self, request: Request, reason: str) -> None:
        self._changes.say(f"nobody joins: {reason}")
        if self._changes.requests:
            self._changes.requests.answer(request, Answer(refused=reason))
