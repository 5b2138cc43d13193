"""The output of a run: a live table on a terminal, and lines for epochs and other events, such as stalls.

A line about a stall explains which learners wait for which others, since when, and the others' last activity. A learner
knows for what it waits, but not which learner is late in a mean over several learners. The launcher can identify the
late learner, which takes part in the mean but is not waiting in it.
"""

from __future__ import annotations

import math
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn
from rich.progress import Progress as ProgressBars
from rich.table import Table
from rich.text import Text

from starling.engines.processes.stalls import Stall
from starling.errors import some
from starling.events import Events
from starling.launch.messages import LearnerMessage, Progress, Said, Saved
from starling.launch.roster import LearnerRecord, LearnerState, Roster
from starling.reporting.epochs import Advice, Score, duration, ended_epochs, merged, running_loss, share, time_left
from starling.timeouts import DRAW_EVERY, EPOCH_EVERY, SCORE_WAIT, SCREEN_EVERY, Seconds

Say = Callable[[str], None]
"""Prints a line."""
EPOCH_LINES = 10
"""Number of epochs of which each gets a line. Of later ones, only the newest within `EPOCH_EVERY` gets one, unless
there is a score."""
MAX_ROWS = 16
"""Largest number of learners in the table."""
TIMES_AS_LONG = 10.0
"""Factor of the usual time between two waits above which a wait is unusual."""
DATA = "data"
"""`Stall.what` of a wait for the learner's own mini-batch."""


class Display:
    """Displays a run on the screen, and writes everything to `events` too; a context manager.

    It shows the state of `roster`, which hears everything first. Its methods may be called from any thread; `clock`
    returns seconds.
    """

    def __init__(
        self, title: str, roster: Roster, console: Console, events: Events, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._title = title
        self._roster = roster
        self._console = console
        self._print = say_on(console)
        self._events = events
        self._clock = clock
        self._lock = threading.RLock()
        self._last_epoch = -1
        """Last epoch that was reported."""
        self._advice = Advice(roster.world)
        self._score: Score | None = None
        """Newest score if it has not been printed yet."""
        self._score_at = 0.0
        self._has_told_saved = False
        """Whether a checkpoint was printed since the last line about all learners."""
        self._epoch_line: str | None = None
        """Line of the newest epoch if it has not been printed."""
        self._epoch_told_at = -math.inf
        self._told_at = clock()
        """Time at which the last line about all learners was printed."""
        self._live: Live | None = None
        self._drawn_at = -math.inf

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(self._table(), console=self._console, refresh_per_second=1.0 / DRAW_EVERY)
            self._live.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with self._lock:
            self.tell_epochs(is_over=True)
            self._tell_score()
            if self._live is not None:
                self._live.update(self._table(ended=kind is None))
                self._live.stop()
                self._live = None

    def hear(self, message: LearnerMessage) -> None:
        """Show a learner's message, if its kind is displayed: progress, the statistics of an epoch, which are printed
        once they are complete, a line, or a checkpoint. At most one checkpoint is printed between two lines about all
        learners, and always the final one."""
        with self._lock:
            match message:
                case Progress():
                    if message.new.frames:
                        self._show_progress()
                    if message.ended_at is not None:
                        self.tell_epochs()
                case Said():
                    self.say(message.line)
                case Saved():
                    folder, moment, distance = message.folder, message.moment, message.consensus_distance
                    self._events.write("checkpoint", folder=folder, moment=moment, consensus_distance=distance)
                    if not self._has_told_saved or moment == "end":
                        self._has_told_saved = True
                        apart = f", consensus distance {distance:.3g}" if distance is not None else ""
                        self._print(f"saved {folder}{apart}")

    def tell_epochs(self, is_over: bool = False) -> None:
        """Report the epochs that have ended, with advice. A membership change may also have ended some."""
        with self._lock:
            for summary in ended_epochs(self._roster, self._last_epoch, is_over):
                self._last_epoch = summary.epoch
                self._events.write("epoch", **summary.fields())
                self._epoch_line = summary.line(self._score)
                if summary.epoch < EPOCH_LINES or self._score is not None:
                    self._tell_epoch()
                self._score = None
                for end in sorted(summary.ends, key=lambda each: share(each.so_far, "computing")):
                    if line := self._advice.line(end):
                        self._tell(line, "advice", text=line)
            if is_over or self._clock() - self._epoch_told_at >= EPOCH_EVERY:
                self._tell_epoch()

    def lost(self, learner_id: int, reason: str) -> None:
        """Report a lost learner."""
        self._tell(f"{reason}; the others continue without it", "loss", learner=learner_id, reason=reason)
        self.tell_epochs()

    def joined(self, learner_id: int, num_learners: int) -> None:
        """Report a learner that has joined."""
        line = f"learner {learner_id} has joined; {num_learners} learners train now"
        self._tell(line, "join", learner=learner_id, num_learners=num_learners)
        self.tell_epochs()

    def left_out(self, learner_id: int, reason: str) -> None:
        """Report a joiner that was started but did not join."""
        line = f"{reason}; it had not joined, and the others continue without it"
        self._tell(line, "left-out", learner=learner_id, reason=reason)

    def scored(self, score: Score) -> None:
        """Report a score on the validation set. The next epoch line includes it; if none follows within `SCORE_WAIT`,
        it is printed on a separate line. Its verdict is printed once, and not again while the model does not work."""
        with self._lock:
            rates, trained = {"wer": score.wer, "cer": score.cer}, {"epochs": score.epochs, "step": score.steps}
            self._events.write("validation", set=score.set_name, **rates, **trained)
            self._score, self._score_at = score, self._clock()
            self._events.judge(score.verdict, self._print)

    def tick(self) -> None:
        """Print a score that has waited long enough; call this about once a second."""
        with self._lock:
            if self._clock() - self._score_at >= SCORE_WAIT:
                self._tell_score()

    def say(self, line: str) -> None:
        """Print a line above the table."""
        self._tell(line, "message", text=line)

    def _show_progress(self) -> None:
        if self._live is not None:
            if self._clock() - self._drawn_at >= DRAW_EVERY:  # a table takes a millisecond
                self._drawn_at = self._clock()
                self._live.update(self._table())
        elif self._clock() - self._told_at >= SCREEN_EVERY and (shown := self._shown()):
            self._print(_line(shown))
            self._has_told()

    def _tell_epoch(self) -> None:
        """Print the line of the newest epoch, if it has not been printed."""
        if self._epoch_line is not None:
            self._print(self._epoch_line)
            self._epoch_line, self._epoch_told_at = None, self._clock()
            self._has_told()

    def _tell_score(self) -> None:
        if self._score is not None:
            self._print(self._score.told)
            self._score = None

    def _has_told(self) -> None:
        self._told_at, self._has_told_saved = self._clock(), False

    def _tell(self, line: str, kind: str, **fields: object) -> None:
        """Write an event, and print it as a line."""
        self._events.write(kind, **fields)
        self._print(line)

    def _shown(self) -> list[Progress]:
        """The newest progress of each member."""
        return [each.newest for each in self._roster.learners.values() if each.newest and each.rank is not None]

    def _table(self, ended: bool = False) -> Table:
        shown = self._shown()
        newest = max(shown, key=lambda each: each.fraction, default=None)
        if newest is None:
            done = "starting"
        elif ended:
            done = f"ended, training {duration(newest.new.end)}"
        else:
            done = f"{100 * newest.fraction:.0f} %, {time_left(newest) or '?'} left"
        table = Table(title=f"{self._title}: {done}{_speed(shown)}", title_justify="left")
        for name in ("learner", "epoch", "batch", "loss", "running", "lr", "audio s/s"):
            table.add_column(name, justify="right")
        known = [each for _, each in sorted(self._roster.learners.items()) if each.newest or each.rank is not None]
        for each in known[:MAX_ROWS]:
            if each.rank is None:
                cells = [each.state.value]
            else:
                cells = ["starting"] if each.newest is None else _cells(each.newest)
            table.add_row(str(each.learner_id), *cells)
        if len(known) > MAX_ROWS:
            table.add_row("…", f"{len(known)} learners")
        return table


@dataclass(frozen=True)
class Prose:
    """A line that is wrapped to the width of the console that prints it."""

    line: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(wrapped(self.line, options.max_width))


def wrapped(line: str, width: int) -> str:
    """Wrap a line at spaces, but not between a number and `%`. Further lines are indented by two more spaces."""
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.fill(
        line.replace(" %", "\xa0%"), width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    ).replace("\xa0", " ")


def say_on(console: Console) -> Say:
    """A function that prints lines on a console without markup."""
    return lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True)


def _line(shown: Sequence[Progress]) -> str:
    """The progress of several learners in one line."""
    newest, loss = max(shown, key=lambda each: each.fraction), merged(each.new for each in shown).loss
    return (
        f"epoch {newest.epoch + 1}, batch {newest.batch + 1}/{newest.num_batches}: loss {loss:.4f}, "
        f"lr {newest.learning_rate:.3g}{_speed(shown)}, {100 * newest.fraction:.0f} % done"
        f"{f', {left} left' if (left := time_left(newest)) else ''}"
    )


def _speed(shown: Sequence[Progress]) -> str:
    total = sum(each.new.audio_rate for each in shown)
    return f", {total:.0f} s of audio per s" if total > 0.0 else ""


def _cells(progress: Progress) -> list[str]:
    audio_rate = progress.new.audio_rate
    return [
        str(progress.epoch + 1),
        f"{progress.batch + 1}/{progress.num_batches}",
        f"{progress.new.loss:.4f}",
        f"{running_loss(progress):.4f}",
        f"{progress.learning_rate:.2e}",
        f"{audio_rate:.1f}" if audio_rate > 0.0 else "",
    ]


class Bars(ProgressBars):
    """Named progress bars on a terminal, and no output elsewhere; a context manager."""

    def __init__(self, console: Console) -> None:
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
        super().__init__(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._ids: dict[str, TaskID] = {}

    def __call__(self, name: str, done: int, total: int) -> None:
        """Set the bar `name` to `done` of `total` (0: unknown)."""
        if name not in self._ids:
            self._ids[name] = self.add_task(name, total=None)
        self.update(self._ids[name], completed=done, total=total or None)


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
