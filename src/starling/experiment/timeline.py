"""The record of when each learner computed and when it waited, in the experiment's folder; see docs/events.md.

    exp/<name>/seen/from-00000000/times-0.tsv   stretches of learner 0's training, since the run began or was resumed

A stretch is a mini-batch at first. Later it lasts a thousandth of the time since the file began, so that the file grows
with the logarithm of that time. Where a resume drops mini-batches, the reading of these files drops their stretches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from operator import add, attrgetter
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, TextIO

from starling.errors import DataError
from starling.experiment.seen import segments, start_of
from starling.reporting.evidence import Stretch

if TYPE_CHECKING:
    from starling.checkpoint.state import LearnerState
    from starling.training.job import ClaimReport, EpochReport, Spent, StepReport

Seconds = float
EXACT = 1000
"""Stretches of a learner that hold one mini-batch each, before they grow."""
_EVEN_OF_MANY = 50
"""The same where so many learners share a process that fewer would be left for each."""
_ALL_LEARNERS = 16_000
"""Exact stretches of all learners of one process."""
_COLUMNS = ("time", "seconds", "step", "batches", "examples", "frames", "loss", "computing", "for_data", "for_peers")


_NOTHING = (0.0, 0.0, 0.0)


@dataclass
class _Open:
    """A learner's stretch that has not been written."""

    begun: Seconds | None = None
    """When the file's first stretch ended."""
    written: Seconds = 0.0
    """When the last one ended."""
    num_written: int = 0
    batches: int = 0
    examples: int = 0
    frames: int = 0
    summed: float = 0.0
    """Losses times frames."""
    spent: tuple[Seconds, ...] = _NOTHING
    """Computing, waiting for data, waiting for peers."""
    last: StepReport | None = None
    booked: tuple[Seconds, ...] = _NOTHING
    """What is in `spent`, or was written, of the epoch under way."""


class Timeline:
    """An observer that writes the stretches of the learners it is told of, `world` of them.

    `clock` gives the time of day, by which learners are brought in line; None on a simulated clock, where all have one.
    A file that cannot be written costs the record, and nothing else: `warn` is called once.
    """

    def __init__(
        self,
        segment: Path,
        world: int = 1,
        clock: Callable[[], float] | None = time.time,
        warn: Callable[[Path, OSError], None] = lambda path, error: None,
    ) -> None:
        self._segment = segment
        self._clock = clock
        self._warn = warn
        self._exact = max(_EVEN_OF_MANY, min(EXACT, _ALL_LEARNERS // world))
        self._open: dict[int, _Open] = {}
        self._files: dict[int, TextIO] = {}
        self._has_failed = False

    saves = False

    def on_claim(self, report: ClaimReport) -> None: ...

    def on_step(self, report: StepReport) -> None:
        own = self._open.setdefault(report.rank, _Open())
        self._book(own, report.spent)
        frames = max(1, report.num_frames) if math.isfinite(report.loss) else 0
        own.batches += 1
        own.examples += report.num_examples
        own.frames += frames
        own.summed += report.loss * frames if frames else 0.0
        own.last = report
        now = 60.0 * report.minutes
        begun = now if own.begun is None else own.begun
        if own.num_written < self._exact or now - own.written >= (now - begun) / self._exact:
            self._write(report.rank, own)

    def on_epoch(self, report: EpochReport, state: LearnerState) -> None:
        if own := self._open.get(report.rank):
            self._book(own, report.spent)
            own.booked = _NOTHING

    def on_barrier(self, state: LearnerState) -> None: ...

    def continue_in(self, segment: Path) -> None:
        """What follows belongs to another membership."""
        self.close()
        self._segment = segment

    def close(self) -> None:
        """Write what is still in memory."""
        for learner, own in self._open.items():
            if own.batches:
                self._write(learner, own)
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._open = {learner: _Open(booked=own.booked) for learner, own in self._open.items()}

    def _book(self, own: _Open, spent: Spent) -> None:
        """Add what was spent since the last report to the open stretch."""
        now = spent.computing, spent.waiting_for_data, spent.waiting_for_peers
        more = (max(0.0, new - old) for new, old in zip(now, own.booked, strict=True))
        own.spent = tuple(map(add, own.spent, more))
        own.booked = now

    def _write(self, learner: int, own: _Open) -> None:
        if own.last is None:
            return
        now = 60.0 * own.last.minutes
        row = (
            f"{now if self._clock is None else self._clock():.4f}",
            f"{now:.4f}",
            own.last.ticket.step,
            own.batches,
            own.examples,
            own.frames,
            f"{own.summed / own.frames:.6g}" if own.frames else "nan",
            *(f"{each:.4f}" for each in own.spent),
        )
        self._append(learner, "\t".join(map(str, row)))
        own.begun = now if own.begun is None else own.begun
        own.written, own.num_written = now, own.num_written + 1
        own.batches = own.examples = own.frames = 0
        own.summed, own.spent = 0.0, _NOTHING

    def _append(self, learner: int, row: str) -> None:
        path = self._segment / f"times-{learner}.tsv"
        try:
            if learner not in self._files:
                self._files[learner] = path.open("w", buffering=1, encoding="utf-8")  # a kill loses no line
                self._files[learner].write("\t".join(_COLUMNS) + "\n")
            self._files[learner].write(row + "\n")
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                self._warn(path, error)


def read_timeline(seen: Path) -> list[Stretch]:
    """The stretches of a run that are in its weights, by the time at which they ended. Lines that make no sense, such
    as the last one of a learner that was killed, are left out."""
    found = segments(seen)
    stretches: list[Stretch] = []
    for place, segment in enumerate(found):
        ends = math.inf
        if place + 1 < len(found):
            with suppress(DataError):
                ends = start_of(found[place + 1]).next_ticket.step
        stretches += [each for each in _read_segment(segment) if each.step < ends]
    return sorted(stretches, key=attrgetter("end"))


def _read_segment(segment: Path) -> Iterator[Stretch]:
    """Learners start their own clocks; the time of day, usually read a moment later, brings them in line."""
    by_learner = {path: rows for path in sorted(segment.glob("times-*.tsv")) if (rows := list(_read(path)))}
    started = {path: median(row[0] - row[1] for row in rows) for path, rows in by_learner.items()}
    for path, rows in by_learner.items():
        late = started[path] - min(started.values())
        before: Seconds | None = None
        for _, seconds, step, batches, examples, frames, loss, computing, for_data, for_peers in rows:
            end = seconds + late
            begin = end - computing - for_data - for_peers if before is None else min(before, end)
            before = end
            yield Stretch(
                int(path.stem.removeprefix("times-")),
                begin,
                end,
                int(step),
                int(batches),
                int(examples),
                int(frames),
                loss,
                computing,
                for_data,
                for_peers,
            )


def _read(path: Path) -> Iterator[tuple[float, ...]]:
    if not path.stem.removeprefix("times-").isdecimal():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file):
            if number == 0 or not line.endswith("\n"):
                continue
            with suppress(ValueError):
                row = tuple(map(float, line.split("\t")))
                if len(row) == len(_COLUMNS) and all(map(math.isfinite, row[:6] + row[7:])):
                    yield row
