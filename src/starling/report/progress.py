"""What people see while a run goes on: a live table on a terminal, lines anywhere else."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table

from starling.report.lines import duration, epoch_line, progress_line, time_left
from starling.report.meter import EpochEnd, Snapshot

Say = Callable[[str], None]
"""Where a line goes that people read."""
MAX_ROWS = 16
"""Learners that are shown one by one; of more, these are the first."""
LINES_EVERY = 5.0
"""Seconds between two lines of one learner where there is no terminal."""


class Display:
    """The progress of all learners, as a context manager.

    `clock` gives seconds; between two lines about one learner at least `LINES_EVERY` of them pass.
    """

    def __init__(self, title: str, world: int, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._title = title
        self._world = world
        self._console = console
        self._clock = clock
        self.away: set[int] = set()
        """Learners that were lost and have not come back."""
        self._snapshots: dict[int, Snapshot] = {}
        self._said: dict[int, float] = {}
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(self._table(), console=self._console, refresh_per_second=4, transient=False)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.update(self._table(ended=kind is None))
            self._live.stop()
            self._live = None

    def progress(self, snapshot: Snapshot) -> None:
        """A learner has gone on."""
        self._snapshots[snapshot.rank] = snapshot
        if self._live is not None:
            self._live.update(self._table())
        elif snapshot.rank < MAX_ROWS and self._is_time(snapshot.rank):
            self.say(progress_line(snapshot))

    def lost(self, learner: int) -> None:
        """A learner is gone; what it did last is shown no more."""
        self.away.add(learner)
        self._snapshots.pop(learner, None)

    def joined(self, learner: int) -> None:
        """A learner has come, or come back."""
        self.away.discard(learner)
        self._world = max(self._world, learner + 1)

    def epoch(self, end: EpochEnd) -> None:
        """A learner has ended an epoch."""
        if end.rank < MAX_ROWS:
            self.say(epoch_line(end))

    def say(self, line: str) -> None:
        """Print a line above the table."""
        say_on(self._console)(line)

    def _is_time(self, rank: int) -> bool:
        now = self._clock()
        if now - self._said.get(rank, now - LINES_EVERY) < LINES_EVERY:
            return False
        self._said[rank] = now
        return True

    def _table(self, ended: bool = False) -> Table:
        newest = max(self._snapshots.values(), key=lambda each: each.fraction, default=None)
        if newest is None:
            done = "starting"
        elif ended:
            done = f"ended after {duration(60.0 * newest.minutes)}"
        else:
            done = f"{100 * newest.fraction:.0f} %, {time_left(newest) or '?'} left"
        total = sum(each.audio_rate for each in self._snapshots.values())
        speed = f", {total:.0f} s of audio per s" if total > 0.0 else ""
        table = Table(title=f"{self._title}: {done}{speed}", title_justify="left")
        for name in ("learner", "epoch", "batch", "loss", "running", "lr", "audio s/s"):
            table.add_column(name, justify="right")
        for rank in range(min(self._world, MAX_ROWS)):
            table.add_row(str(rank), *_cells(self._snapshots.get(rank), "lost" if rank in self.away else "starting"))
        if self._world > MAX_ROWS:
            table.add_row("…", f"{self._world} learners", *[""] * 5)
        return table


def say_on(console: Console) -> Say:
    """Print lines on a console as they are."""
    return lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True)


def _cells(snapshot: Snapshot | None, otherwise: str) -> list[str]:
    if snapshot is None:
        return [otherwise, *[""] * 5]
    return [
        str(snapshot.epoch + 1),
        f"{snapshot.batch + 1}/{snapshot.num_batches}",
        f"{snapshot.loss:.4f}",
        f"{snapshot.running_loss:.4f}",
        f"{snapshot.learning_rate:.2e}",
        f"{snapshot.audio_rate:.1f}" if snapshot.audio_rate > 0.0 else "",
    ]


class Bars:
    """Progress bars by name on a terminal, nothing elsewhere; as a context manager."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def __call__(self, name: str, done: int, total: int) -> None:
        """`done` of `total` (0: not known) of what `name` names."""
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=None)
        self._progress.update(self._tasks[name], completed=done, total=total or None)
