"""Explains why a run is stalled: which learners wait for which others, since when, and what those did last.

A learner knows what it waits for, but not which learner is late in a mean over several. The launcher does: it is the
learner that takes part in the mean and is not waiting in it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from starling.engines.processes.stalls import Stall
from starling.launch.roster import LearnerRecord, LearnerState, Roster
from starling.reporting.lines import duration

Seconds = float
TIMES_AS_LONG = 10.0
"""A wait is unusual if it takes so many times the usual time between two such waits."""
DATA = "data"
"""`Stall.what` of a wait for the learner's own mini-batch."""
LogOf = Callable[[int], str]
"""Returns the path of a learner's log, by its id."""


@dataclass
class _Episode:
    """A reported stall: one or several learners that wait for the same cause."""

    cause: tuple[int, ...] | str
    """The learners that are late, or `Stall.what` if they are unknown."""
    waits: dict[int, int] = field(default_factory=dict)
    """`Stall.number` of each learner that still waits."""
    learners: set[int] = field(default_factory=set)
    """All learners that have waited in this stall."""
    since: float = 0.0
    again_at: Seconds = 0.0
    """The duration at which the stall is reported again."""


class Stalls:
    """Reports stalls, that is, unusual waits: one line for each, another whenever it has doubled, and one when it ends.

    A wait is unusual if it is longer than `long_seconds` and than `TIMES_AS_LONG` times the usual time.
    """

    def __init__(self, roster: Roster, log_of: LogOf, long_seconds: Seconds) -> None:
        self._roster = roster
        self._log_of = log_of
        self._long_seconds = long_seconds
        self._episodes: list[_Episode] = []
        self.ended: list[str] = []
        """The lines about stalls that have ended."""

    def look(self) -> list[str]:
        """The lines to print now; call this about once a second."""
        lines = []
        waiting = self._roster.waiting()
        for episode in list(self._episodes):
            now = {each: waiting[each].number for each in episode.waits if each in waiting}
            episode.waits = dict(episode.waits.items() & now.items())
            if not episode.waits:
                self._episodes.remove(episode)
                cause = episode.cause if isinstance(episode.cause, tuple) else ()
                self.ended.append(resumed_line(sorted(episode.learners), self._roster.clock() - episode.since, cause))
                lines.append(self.ended[-1])
        for episode in self._episodes:
            self._narrow(episode)
        self._unite()
        known = {learner_id for episode in self._episodes for learner_id in episode.waits}
        for learner_id, wait in waiting.items():
            if learner_id not in known and wait.is_unusual(self._long_seconds, TIMES_AS_LONG):
                self._join(self._roster.learners[learner_id], wait)
        for episode in self._episodes:
            if (lasted := self._roster.clock() - episode.since) >= episode.again_at:
                episode.again_at = 2.0 * lasted
                lines.append(explain(sorted(episode.waits), self._roster, self._log_of))
        return lines

    def _narrow(self, episode: _Episode) -> None:
        """Remove learners from the cause of a stall that have meanwhile reported that they are waiting themselves."""
        if isinstance(episode.cause, tuple):
            causes = _causes(_late(sorted(episode.waits), self._roster), self._roster)
            if causes and set(causes) < set(episode.cause):
                episode.cause = tuple(causes)

    def _unite(self) -> None:
        """Merge stalls that turn out to have the same cause."""
        by_cause: dict[tuple[int, ...] | str, _Episode] = {}
        for episode in self._episodes:
            first = by_cause.setdefault(episode.cause, episode)
            if first is not episode:
                first.waits |= episode.waits
                first.learners |= episode.learners
                first.since = min(first.since, episode.since)
                first.again_at = max(first.again_at, episode.again_at)
        self._episodes = list(by_cause.values())

    def _join(self, record: LearnerRecord, wait: Stall) -> None:
        """Add a wait to the stall with the same cause, or start a new stall."""
        own = record.learner_id
        causes = [own] if wait.what == DATA else _causes(_late([own], self._roster), self._roster)
        cause = tuple(causes) or wait.what
        same = [each for each in self._episodes if each.cause == cause]
        episode = same[0] if same else _Episode(cause, since=record.attempt.wait_began_at)
        if not same:
            self._episodes.append(episode)
        episode.waits[own] = wait.number
        episode.learners.add(own)
        episode.since = min(episode.since, record.attempt.wait_began_at)


def explain(waiters: Sequence[int], roster: Roster, log_of: LogOf) -> str:
    """A line that says why these learners are stalled. Learners that no longer wait are ignored."""
    waits = {waiter: wait for waiter in waiters if (wait := roster.learners[waiter].attempt.wait)}
    starved = sorted(waiter for waiter, wait in waits.items() if wait.what == DATA)
    waiters = starved or sorted(waits)
    longest = max((waits[waiter] for waiter in waiters), key=lambda each: each.seconds)
    verb = "has" if len(waiters) == 1 else "have"
    line = f"{_names(waiters)} {verb} waited {duration(longest.seconds)} in {longest.what}{_beside(longest)}"
    if starved:
        others = sorted(waits.keys() - set(starved))
        for_it = f"; {_names(others)} {'waits' if len(others) == 1 else 'wait'} for that" if others else ""
        return f"{line}{for_it}; see {_logs(waiters, log_of)}"
    late = _late(waiters, roster)
    if not late:
        return (
            f"{line}: all learners that take part wait in it, so the connection between them is stuck; "
            f"{_logs(waiters, log_of)}"
        )
    causes = _causes(late, roster)
    whom = "" if longest.what.endswith(_names(late)) else f" for {_names(late)}"
    waits_itself = "which waits" if len(late) == 1 else "which wait"
    chain = f", {waits_itself} for {_names(causes)}" if set(causes) != set(late) else ""
    told = "; ".join(f"{_state(roster.learners[each], roster)}; its log: {log_of(each)}" for each in causes[:3])
    more = f"; and {len(causes) - 3} more" if len(causes) > 3 else ""
    return f"{line}{whom}{chain}: {told}{more}"


def own_line(learner_id: int, wait: Stall) -> str:
    """A line about a wait for the learner's own log."""
    line = f"learner {learner_id} has waited {duration(wait.seconds)} in {wait.what}{_beside(wait)}"
    if wait.whom and not wait.what.endswith(_names(wait.whom)):
        line += f" for {_names(wait.whom)}"
    if wait.whom:
        line += ": see its log" if len(wait.whom) == 1 else " or some of them: see their logs"
    return line


def resumed_line(waiters: Sequence[int], seconds: Seconds, cause: Sequence[int] = ()) -> str:
    """A line about the end of a stall; `cause` are the learners that were late."""
    whom = f" for {_names(cause)}" if cause else ""
    verb = "continues" if len(waiters) == 1 else "continue"
    return f"{_names(waiters)} {verb} after waiting {duration(seconds)}{whom}"


def _beside(wait: Stall) -> str:
    usual = f"one every {wait.usual:.2g} s until then" if wait.usual else ""
    behind = "behind its training" if wait.is_behind else ""
    return f" ({'; '.join(filter(None, (usual, behind)))})" if usual or behind else ""


def _late(waiters: Sequence[int], roster: Roster) -> list[int]:
    """The learners for which `waiters` wait, as far as they are known."""
    waiting = roster.waiting()
    waiting_in: dict[str, set[int]] = {}
    for learner_id, wait in waiting.items():
        waiting_in.setdefault(wait.what, set()).add(learner_id)
    late: set[int] = set()
    for wait in (waiting[waiter] for waiter in waiters):
        group = wait.whom or tuple(each.learner_id for each in roster.present())
        if wait.whom and not wait.is_group:
            late.update(wait.whom)
        else:
            late |= set(group) - waiting_in.get(wait.what, set())
    return sorted(each for each in late - set(waiters) if each in roster.learners)


def _causes(late: Sequence[int], roster: Roster) -> list[int]:
    """The last learners in the chains of waits that start with the learners in `late`."""
    causes: set[int] = set()
    seen, ahead = set(late), list(late)
    while ahead:
        learner_id = ahead.pop()
        record = roster.learners[learner_id]
        wait = record.attempt.wait
        waits_itself = wait is not None and wait.what != DATA and not roster.silence(record)
        further = _late([learner_id], roster) if waits_itself else []
        if not further:
            causes.add(learner_id)
        new = [each for each in further if each not in seen]
        seen.update(new)
        ahead += new
    return sorted(causes) or sorted(late)


def _state(record: LearnerRecord, roster: Roster) -> str:
    """The state of a learner for which others wait, as text."""
    learner = f"learner {record.learner_id}"
    if record.state is LearnerState.LOST:
        return f"{learner} was lost"
    if not record.is_present:
        return f"{learner} has ended"
    attempt = record.attempt
    if attempt.heard_at is None:
        return f"{learner} has sent nothing yet"
    now = roster.clock()
    reported = f"it last reported {duration(now - attempt.doing_since)} ago: {attempt.doing}"
    if silence := roster.silence(record):
        return f"{learner} has not sent a heartbeat for {duration(silence)}; {reported}"
    state = f"{learner} runs, last heard {duration(now - attempt.heard_at)} ago"
    if attempt.wait is not None and not attempt.wait.is_behind:
        state += f", and has waited {duration(attempt.wait.seconds)} in {attempt.wait.what}"
    return f"{state}; {reported}"


def _names(learners: Sequence[int]) -> str:
    if len(learners) == 1:
        return f"learner {learners[0]}"
    if len(learners) > 8:
        return f"learners {', '.join(map(str, learners[:8]))} and {len(learners) - 8} more"
    return f"learners {', '.join(map(str, learners[:-1]))} and {learners[-1]}"


def _logs(learners: Iterable[int], log_of: LogOf) -> str:
    return ", ".join(log_of(each) for each in list(learners)[:3])
