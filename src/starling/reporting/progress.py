"""The output of a run: a live table on a terminal, and lines for epochs and other events."""

import math
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn
from rich.progress import Progress as ProgressBars
from rich.table import Table

from starling.events import Events
from starling.launch.messages import LearnerMessage, Progress, Said, Saved
from starling.launch.roster import Roster
from starling.reporting.epochs import Advice, Score, duration, ended_epochs, merged, share, time_left
from starling.timeouts import DRAW_EVERY, SCORE_WAIT, SCREEN_EVERY

Say = Callable[[str], None]
"""Prints a line."""
MAX_ROWS = 16
"""Largest number of learners in the table."""


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
        self._told_at = clock()
        """Time at which the last line about all learners was printed."""
        self._live: Live | None = None
        self._drawn_at = -math.inf

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(self._table(), console=self._console, refresh_per_second=1.0 / DRAW_EVERY)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
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
                self._tell(summary.line(self._score), "epoch", **summary.fields())
                self._score = None
                self._has_told()
                for end in sorted(summary.ends, key=lambda each: share(each.so_far, "computing")):
                    if line := self._advice.line(end):
                        self._tell(line, "advice", text=line)

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
            done = f"ended after {duration(newest.new.end)}"
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
        f"{progress.so_far.loss:.4f}",
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
