"""Explains why a run is stalled: which learners wait for which others, since when, and the others' last activity.

A learner knows for what it waits, but not which learner is late in a mean over several learners. The launcher can
identify the late learner, which takes part in the mean but is not waiting in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from starling.engines.processes.stalls import Stall
from starling.errors import some
from starling.launch.roster import LearnerRecord, LearnerState, Roster
from starling.reporting.epochs import duration

Seconds = float
TIMES_AS_LONG = 10.0
"""Factor of the usual time between two waits above which a wait is unusual."""
DATA = "data"
"""`Stall.what` of a wait for the learner's own mini-batch."""


@dataclass
class _Episode:
    """A reported stall: one or several learners that wait for the same cause."""

    cause: tuple[int, ...] | str
    """Learners that are late, or `Stall.what` if they are unknown."""
    waits: dict[int, int]
    """`Stall.number` of each learner that still waits."""
    learners: set[int]
    """All learners that have waited in this stall."""
    since: float
    again_at: Seconds = 0.0
    """Duration at which the stall is reported again."""

    def unite(self, other: _Episode) -> None:
        """Add a stall that turned out to have the same cause."""
        self.waits |= other.waits
        self.learners |= other.learners
        self.since, self.again_at = min(self.since, other.since), max(self.again_at, other.again_at)


class Stalls:
    """Reports stalls, that is, unusual waits: one line for each stall, another whenever its duration has doubled, and
    one when it ends.

    A wait is unusual if it is longer than `long_seconds` and than `TIMES_AS_LONG` times the usual time. Lines name the
    logs of learners in the folder `logs`.
    """

    def __init__(self, roster: Roster, logs: Path, long_seconds: Seconds) -> None:
        self._roster = roster
        self._logs = logs
        self._long_seconds = long_seconds
        self._episodes: list[_Episode] = []
        self.ended: list[str] = []
        """Lines about stalls that have ended."""

    def look(self) -> list[tuple[str, str]]:
        """The lines to print now, each with the kind of its event; call this about once a second."""
        told, waiting, now = [], self._roster.waiting(), self._roster.clock()
        by_cause: dict[tuple[int, ...] | str, _Episode] = {}
        for episode in [*self._episodes, *self._begun(waiting)]:
            numbers = {each: waiting[each].number for each in episode.waits if each in waiting}
            episode.waits = dict(episode.waits.items() & numbers.items())
            if episode.waits:
                causes = _causes(_late(sorted(episode.waits), self._roster), self._roster)
                if causes and isinstance(episode.cause, tuple) and set(causes) < set(episode.cause):
                    episode.cause = tuple(causes)  # the others have meanwhile reported that they are waiting themselves
                by_cause.setdefault(episode.cause, episode).unite(episode)
            else:
                cause = episode.cause if isinstance(episode.cause, tuple) else ()
                self.ended.append(resumed_line(sorted(episode.learners), now - episode.since, cause))
                told.append(("stall-over", self.ended[-1]))
        self._episodes = list(by_cause.values())
        for episode in self._episodes:
            if (lasted := now - episode.since) >= episode.again_at:
                episode.again_at = 2.0 * lasted
                told.append(("stall", explain(sorted(episode.waits), self._roster, self._logs)))
        return told

    def _begun(self, waiting: Mapping[int, Stall]) -> Iterator[_Episode]:
        """Yield each unusual wait that belongs to no stall yet as a new stall."""
        known = {(learner, number) for episode in self._episodes for learner, number in episode.waits.items()}
        for own, wait in waiting.items():
            if (own, wait.number) not in known and wait.is_unusual(self._long_seconds, TIMES_AS_LONG):
                causes = [own] if wait.what == DATA else _causes(_late([own], self._roster), self._roster)
                since = self._roster.learners[own].attempt.wait_began_at
                yield _Episode(tuple(causes) or wait.what, {own: wait.number}, {own}, since)


def explain(waiters: Sequence[int], roster: Roster, logs: Path) -> str:
    """Return a line that says why these learners are stalled. Learners that no longer wait are ignored."""
    waits = {waiter: wait for waiter in waiters if (wait := roster.learners[waiter].attempt.wait)}
    starved = sorted(waiter for waiter, wait in waits.items() if wait.what == DATA)
    waiters = starved or sorted(waits)
    longest = max((waits[waiter] for waiter in waiters), key=lambda each: each.seconds)
    line = _waited(waiters, longest)
    if starved:
        others = sorted(waits.keys() - set(starved))
        for_it = f"; {_names(others)} {'waits' if len(others) == 1 else 'wait'} for that" if others else ""
        return f"{line}{for_it}; see {_logs(waiters, logs)}"
    late = _late(waiters, roster)
    if not late:
        return (
            f"{line}: all learners that take part wait in it, so the connection between them is stuck; "
            f"{_logs(waiters, logs)}"
        )
    causes = _causes(late, roster)
    waits_itself = "which waits" if len(late) == 1 else "which wait"
    chain = f", {waits_itself} for {_names(causes)}" if set(causes) != set(late) else ""
    told = "; ".join(f"{_state(roster.learners[each], roster)}; its log: {_logs([each], logs)}" for each in causes[:3])
    more = f"; and {len(causes) - 3} more" if len(causes) > 3 else ""
    return f"{_waited(waiters, longest, late)}{chain}: {told}{more}"


def own_line(learner_id: int, wait: Stall) -> str:
    """A line about a wait for the learner's own log."""
    line = _waited([learner_id], wait, wait.whom)
    if wait.whom:
        line += ": see its log" if len(wait.whom) == 1 else " or some of them: see their logs"
    return line


def resumed_line(waiters: Sequence[int], seconds: Seconds, cause: Sequence[int] = ()) -> str:
    """A line about the end of a stall; `cause` are the learners that were late."""
    whom = f" for {_names(cause)}" if cause else ""
    verb = "continues" if len(waiters) == 1 else "continue"
    return f"{_names(waiters)} {verb} after waiting {duration(seconds)}{whom}"


def _waited(waiters: Sequence[int], wait: Stall, whom: Sequence[int] = ()) -> str:
    """A text that says how long learners have waited, in what, and for whom, unless the wait itself tells that."""
    usual = f"one every {wait.usual:.2g} s until then" if wait.usual else ""
    beside = "; ".join(filter(None, (usual, "behind its training" if wait.is_behind else "")))
    verb = "has" if len(waiters) == 1 else "have"
    line = f"{_names(waiters)} {verb} waited {duration(wait.seconds)} in {wait.what}{f' ({beside})' if beside else ''}"
    return f"{line} for {_names(whom)}" if whom and not wait.what.endswith(_names(whom)) else line


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
        return f"learners {some(learners, 8)}"
    return f"learners {', '.join(map(str, learners[:-1]))} and {learners[-1]}"


def _logs(learners: Sequence[int], logs: Path) -> str:
    return ", ".join(f"{logs}/learner-{each}.log" for each in learners[:3])
