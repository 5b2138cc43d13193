"""Why learners stand still: for whom, since when, what that one last reported and how long ago, and where its log is.

A learner knows what it waits for. In a mean nobody knows who is late: it is who takes part and does not wait in it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from starling.engines.processes.stalls import Stall
from starling.report.lines import duration
from starling.report.roster import Known, Roster

Seconds = float
TIMES_AS_LONG = 10.0
"""A wait is unusual when it is so many times as long as the time between two such waits."""
DATA = "data"
"""What a learner waits for when it is its mini-batch that is late."""
LogOf = Callable[[int], str]
"""Where the log of a learner is, by its name."""


@dataclass
class _Episode:
    """Learners that wait for one reason, and were told of."""

    cause: tuple[int, ...] | str
    waits: dict[int, int] = field(default_factory=dict)
    """The number of the wait of each that waits still."""
    names: set[int] = field(default_factory=set)
    """All that waited."""
    since: float = 0.0
    again_at: Seconds = 0.0
    """How long the wait has to be until it is told again."""


class Stalls:
    """Tells of unusual waits: once for each, again whenever one has doubled, and one line when it ends.

    Unusual is more than `long_seconds`, and more than `TIMES_AS_LONG` the usual.
    """

    def __init__(self, roster: Roster, log_of: LogOf, long_seconds: Seconds) -> None:
        self._roster = roster
        self._log_of = log_of
        self._long_seconds = long_seconds
        self._episodes: list[_Episode] = []
        self.ended: list[str] = []
        """The lines about waits that are over."""

    def look(self) -> list[str]:
        """The lines to say now. To be called about once a second."""
        lines = []
        waiting = self._roster.waiting()
        for episode in list(self._episodes):
            waits = episode.waits
            episode.waits = {name: waits[name] for name in waits if _number(waiting.get(name)) == waits[name]}
            if not episode.waits:
                self._episodes.remove(episode)
                cause = episode.cause if isinstance(episode.cause, tuple) else ()
                self.ended.append(resumed_line(sorted(episode.names), self._roster.clock() - episode.since, cause))
                lines.append(self.ended[-1])
        for episode in self._episodes:
            self._narrow(episode)
        self._unite()
        known = {name for episode in self._episodes for name in episode.waits}
        for each in waiting.values():
            if each.name not in known and each.wait and each.wait.is_unusual(self._long_seconds, TIMES_AS_LONG):
                self._join(each, each.wait)
        for episode in self._episodes:
            if (lasted := self._roster.clock() - episode.since) >= episode.again_at:
                episode.again_at = 2.0 * lasted
                lines.append(explain(sorted(episode.waits), self._roster, self._log_of))
        return lines

    def _narrow(self, episode: _Episode) -> None:
        """Of those who looked late at first, some have said since that they wait themselves."""
        if isinstance(episode.cause, tuple):
            causes = _causes(_late(sorted(episode.waits), self._roster), self._roster)
            if causes and set(causes) < set(episode.cause):
                episode.cause = tuple(causes)

    def _unite(self) -> None:
        """Make one of those that wait for the same learners, as it turned out."""
        by_cause: dict[tuple[int, ...] | str, _Episode] = {}
        for episode in self._episodes:
            first = by_cause.setdefault(episode.cause, episode)
            if first is not episode:
                first.waits |= episode.waits
                first.names |= episode.names
                first.since = min(first.since, episode.since)
                first.again_at = max(first.again_at, episode.again_at)
        self._episodes = list(by_cause.values())

    def _join(self, known: Known, wait: Stall) -> None:
        """Count a wait to those of the same kind that are told of already, or begin to tell."""
        causes = [known.name] if wait.what == DATA else _causes(_late([known.name], self._roster), self._roster)
        cause = tuple(causes) or wait.what
        same = [each for each in self._episodes if each.cause == cause]
        episode = same[0] if same else _Episode(cause, since=known.waits_since)
        if not same:
            self._episodes.append(episode)
        episode.waits[known.name] = wait.number
        episode.names.add(known.name)
        episode.since = min(episode.since, known.waits_since)


def explain(waiters: Sequence[int], roster: Roster, log_of: LogOf) -> str:
    """Why these learners, of which some wait still, stand still."""
    waits = {name: each.wait for name in waiters if (each := roster.learners[name]).wait}
    starved = sorted(name for name, wait in waits.items() if wait.what == DATA)
    waiters = starved or sorted(waits)
    longest = max((waits[name] for name in waiters), key=lambda each: each.seconds)
    verb = "has" if len(waiters) == 1 else "have"
    line = f"{_names(waiters)} {verb} waited {duration(longest.seconds)} in {longest.what}{_beside(longest)}"
    if starved:
        others = sorted(waits.keys() - set(starved))
        for_it = f"; {_names(others)} {'waits' if len(others) == 1 else 'wait'} for that" if others else ""
        return f"{line}{for_it}; see {_logs(waiters, log_of)}"
    late = _late(waiters, roster)
    if not late:
        return (
            f"{line}: all of those who take part wait in it, so what is between them is stuck; {_logs(waiters, log_of)}"
        )
    causes = _causes(late, roster)
    whom = "" if longest.what.endswith(_names(late)) else f" for {_names(late)}"
    chain = f", on account of {_names(causes)}" if set(causes) != set(late) else ""
    told = "; ".join(f"{_state(roster.learners[name], roster)}; its log: {log_of(name)}" for name in causes[:3])
    more = f"; and {len(causes) - 3} more" if len(causes) > 3 else ""
    return f"{line}{whom}{chain}: {told}{more}"


def own_line(name: int, wait: Stall) -> str:
    """What a learner itself can say about its wait."""
    line = f"learner {name} has waited {duration(wait.seconds)} in {wait.what}{_beside(wait)}"
    if wait.whom and not wait.what.endswith(_names(wait.whom)):
        line += f" for {_names(wait.whom)}"
    if wait.whom:
        line += ": see its log" if len(wait.whom) == 1 else ", or for some of them: see their logs"
    return line


def resumed_line(names: Sequence[int], seconds: Seconds, cause: Sequence[int] = ()) -> str:
    """A wait that was told of, on account of those that are the `cause`, is over."""
    whom = f" for {_names(cause)}" if cause else ""
    return f"{_names(names)} {'goes' if len(names) == 1 else 'go'} on after {duration(seconds)} of waiting{whom}"


def _beside(wait: Stall) -> str:
    usual = f", one every {wait.usual:.2g} s until then" if wait.usual else ""
    behind = ", behind its training" if wait.is_behind else ""
    return f" ({'; '.join(filter(None, (usual[2:], behind[2:])))})" if usual or behind else ""


def _late(waiters: Sequence[int], roster: Roster) -> list[int]:
    """Those who these learners wait for, as far as it can be told."""
    waiting = roster.waiting()
    late: set[int] = set()
    for wait in (waiting[name].wait for name in waiters):
        if wait is None:
            continue
        everybody = wait.whom or tuple(each.name for each in roster.present())
        if wait.whom and not wait.is_group:
            late.update(wait.whom)
        else:
            late.update(name for name in everybody if not _waits_in(waiting.get(name), wait.what))
    return sorted(name for name in late - set(waiters) if name in roster.learners)


def _waits_in(known: Known | None, what: str) -> bool:
    return known is not None and known.wait is not None and known.wait.what == what


def _causes(late: Sequence[int], roster: Roster) -> list[int]:
    """Who those that are late wait for themselves, and so on, as far as it leads."""
    causes: set[int] = set()
    seen, ahead = set(late), list(late)
    while ahead:
        name = ahead.pop()
        known = roster.learners[name]
        waits_itself = known.wait is not None and known.wait.what != DATA and not roster.silence(known)
        further = _late([name], roster) if waits_itself else []
        if not further:
            causes.add(name)
        new = [each for each in further if each not in seen]
        seen.update(new)
        ahead += new
    return sorted(causes) or sorted(late)


def _state(known: Known, roster: Roster) -> str:
    """What a learner is known to do, or not to do."""
    who = f"learner {known.name}"
    if known.is_lost:
        return f"{who} was lost"
    if known.has_ended:
        return f"{who} has ended"
    if known.heard_at is None:
        return f"{who} has not said anything yet"
    now = roster.clock()
    said = f"it last said {duration(now - known.said_at)} ago: {known.doing}"
    if silence := roster.silence(known):
        return f"{who} has given no sign of life for {duration(silence)}; {said}"
    state = f"{who} lives, heard {duration(now - known.heard_at)} ago"
    if known.wait is not None and not known.wait.is_behind:
        state += f", and has waited {duration(known.wait.seconds)} in {known.wait.what}"
    return f"{state}; {said}"


def _number(known: Known | None) -> int | None:
    return None if known is None or known.wait is None else known.wait.number


def _names(names: Sequence[int]) -> str:
    if len(names) == 1:
        return f"learner {names[0]}"
    shown = ", ".join(map(str, names[:8])) if len(names) > 8 else ", ".join(map(str, names[:-1]))
    return f"learners {shown} and {len(names) - 8} more" if len(names) > 8 else f"learners {shown} and {names[-1]}"


def _logs(names: Iterable[int], log_of: LogOf) -> str:
    return ", ".join(log_of(name) for name in list(names)[:3])
