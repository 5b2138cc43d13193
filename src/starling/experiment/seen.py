"""The record in the experiment's folder of what each learner saw and when it computed; see docs/events.md.

    exp/<name>/seen/from-00000000/start.json      the data position at which the segment starts
    exp/<name>/seen/from-00000000/learner-0.tsv   epoch, batch, step, and the utterances of every mini-batch
    exp/<name>/seen/from-00000000/skipped-0.tsv   utterances that could not be used, with the reason
    exp/<name>/seen/from-00000000/times-0.tsv     stretches of learner 0's training, with their times
    exp/<name>/seen/from-00000480/...             the next segment, after a resume or a new membership at step 480

A mini-batch is recorded before its gradient is computed: if its learner is lost while gradients are averaged, the
others may still complete the mean. Mini-batches after the position at which the next segment starts are not in the
weights. Readers of the record ignore them.

A stretch is a mini-batch at first. Later it lasts a thousandth of the time since its file began, so that the file grows
with the logarithm of that time.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, TextIO

from pydantic import ValidationError

from starling.checkpoint.manifest import SavedPosition
from starling.errors import DataError
from starling.reporting.epochs import SPENT, Stretch
from starling.reporting.events import Warn, once
from starling.workload import Position, Ticket

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


def begin_segment(folder: Path, position: Position, earlier: Path | None = None) -> Path:
    """Create the folder of a segment that starts at `position`, and remove segments that start there or later.

    If the run resumes from another experiment, `earlier` is the record of that one; it is copied.
    """
    segment = folder / f"from-{position.num_done:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    if earlier is not None and earlier.resolve() != folder.resolve():
        for old in segments(folder):
            shutil.rmtree(old)
        for old in segments(earlier):
            shutil.copytree(old, folder / old.name)
    for old in segments(folder):
        if _begin(old) >= position.num_done:
            shutil.rmtree(old)
    segment.mkdir()
    start = SavedPosition.of(position).model_dump_json(indent=2)
    (segment / "start.json").write_text(start + "\n", encoding="utf-8")
    return segment


def segments(folder: Path) -> list[Path]:
    """The segments of a record, in order."""
    return sorted((path for path in folder.glob("from-*") if path.is_dir()), key=_begin)


def _begin(segment: Path) -> int:
    """How many mini-batches were done when a segment started: the sort key, because names with more than eight digits
    do not sort correctly as text."""
    number = segment.name.removeprefix("from-")
    return int(number) if number.isdecimal() else 0


class Record:
    """An observer that writes tables into the segment of the present membership."""

    saves = False

    def __init__(self, segment: Path) -> None:
        self._segment = segment
        self._files: dict[str, TextIO] = {}

    def on_claim(self, report: ClaimReport) -> None: ...

    def on_step(self, report: StepReport) -> None: ...

    def on_epoch(self, report: EpochReport, state: LearnerState) -> None: ...

    def on_barrier(self, state: LearnerState) -> None: ...

    def continue_in(self, segment: Path) -> None:
        """Continue the record in another segment."""
        self.close()
        self._segment = segment

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _write(self, name: str, columns: Iterable[str], row: Iterable[object]) -> None:
        """Add a row to a table. It is in the file at once: a kill loses no row."""
        if name not in self._files:
            self._files[name] = (self._segment / name).open("w", buffering=1, encoding="utf-8")
            self._files[name].write("\t".join(columns) + "\n")
        self._files[name].write("\t".join(map(str, row)) + "\n")


class Seen(Record):
    """Records the utterances of every mini-batch.

    Skipped utterances are listed, and counted over all learners: `count(name, number)` adds to a shared counter and
    returns the sum. More than `max_skipped` in one epoch raise a DataError.
    """

    def __init__(
        self, segment: Path, count: Callable[[str, int], int], max_skipped: int, say: Callable[[str], None]
    ) -> None:
        super().__init__(segment)
        self._count = count
        self._max_skipped = max_skipped
        self._say = say
        self._num_skipped: dict[tuple[int, int], int] = {}
        self._earlier: dict[int, set[str]] | None = None

    def on_claim(self, report: ClaimReport) -> None:
        ticket = report.ticket
        row = (ticket.epoch + 1, ticket.index + 1, ticket.step, *report.ids)
        self._write(f"learner-{report.rank}.tsv", ("epoch", "batch", "step", "utterances"), row)
        if report.skipped:
            self._skip(report)

    def on_epoch(self, report: EpochReport, state: LearnerState) -> None:
        if num_skipped := self._num_skipped.pop((report.rank, report.epoch), 0):
            listed = self._segment / f"skipped-{report.rank}.tsv"
            self._say(f"learner {report.rank} skipped {num_skipped} utterances of epoch {report.epoch + 1}: {listed}")

    def continue_in(self, segment: Path) -> None:
        super().continue_in(segment)
        self._num_skipped.clear()
        self._earlier = None

    def _skip(self, report: ClaimReport) -> None:
        rank, epoch = report.rank, report.ticket.epoch
        for name, reason in report.skipped:
            row = (epoch + 1, name, " ".join(reason.split()))
            self._write(f"skipped-{rank}.tsv", ("epoch", "id", "reason"), row)
        self._num_skipped[rank, epoch] = self._num_skipped.get((rank, epoch), 0) + len(report.skipped)
        if (total := self._count(f"skipped/{epoch}", len(report.skipped)) + self._before(epoch)) > self._max_skipped:
            name, reason = report.skipped[-1]
            raise DataError(
                f"learner {rank}: {total} utterances of epoch {epoch + 1} could not be used, the last one {name} "
                f"({reason}); data.filter.max_skipped allows {self._max_skipped}: see {self._segment}/skipped-*.tsv, "
                "and prepare the data again"
            )

    def _before(self, epoch: int) -> int:
        """How many utterances of an epoch were skipped in earlier segments."""
        if self._earlier is None:
            older = [each for each in segments(self._segment.parent) if _begin(each) < _begin(self._segment)]
            self._earlier = read_skipped(older)
        return len(self._earlier.get(epoch, ()))


@dataclass
class _Open:
    """A learner's stretch that has not been written."""

    stretch: Stretch = field(default_factory=Stretch)
    booked: Mapping[str, Seconds] = field(default_factory=dict)
    """What is in `stretch`, or was written, of the time spent in the epoch under way."""
    begun: Seconds | None = None
    """When the file's first stretch ended."""
    written: Seconds = 0.0
    """When the last one ended."""
    num_written: int = 0

    def book(self, spent: Spent) -> None:
        """Add what was spent since the last report."""
        for name, seconds in vars(spent).items():
            more = max(0.0, seconds - self.booked.get(name, 0.0))
            setattr(self.stretch, name, getattr(self.stretch, name) + more)
        self.booked = vars(spent)


class Timeline(Record):
    """Records when each of `world` learners computed and when it waited.

    `clock` gives the time of day, by which learners are brought in line; None on a simulated clock, where all have one.
    A file that cannot be written costs the record, and nothing else: `warn` is called once.
    """

    def __init__(
        self,
        segment: Path,
        world: int = 1,
        clock: Callable[[], float] | None = time.time,
        warn: Warn = lambda path, error: None,
    ) -> None:
        super().__init__(segment)
        self._clock = clock
        self._warn = once(warn)
        self._exact = max(_EVEN_OF_MANY, min(EXACT, _ALL_LEARNERS // world))
        self._open: dict[int, _Open] = {}

    def on_step(self, report: StepReport) -> None:
        own = self._open.setdefault(report.rank, _Open())
        own.book(report.spent)
        own.stretch.add(report)
        now = own.stretch.end
        begun = now if own.begun is None else own.begun
        if own.num_written < self._exact or now - own.written >= (now - begun) / self._exact:
            self._end(own)

    def on_epoch(self, report: EpochReport, state: LearnerState) -> None:
        if own := self._open.get(report.rank):
            own.book(report.spent)
            own.booked = {}

    def close(self) -> None:
        """Write what is still in memory."""
        for own in self._open.values():
            if own.stretch.batches:
                self._end(own)
        super().close()
        self._open = {learner: _Open(booked=own.booked) for learner, own in self._open.items()}

    def _end(self, own: _Open) -> None:
        """Write a learner's stretch, and begin the next."""
        each, name = own.stretch, f"times-{own.stretch.learner}.tsv"
        counts = each.step, each.batches, each.examples, each.frames
        spent = (f"{getattr(each, kind):.4f}" for kind in SPENT)
        at = each.end if self._clock is None else self._clock()
        try:
            self._write(name, _COLUMNS, (f"{at:.4f}", f"{each.end:.4f}", *counts, f"{each.loss:.6g}", *spent))
        except OSError as error:
            self._warn(self._segment / name, error)
        own.begun = each.end if own.begun is None else own.begun
        own.written, own.num_written, own.stretch = each.end, own.num_written + 1, Stretch()


@dataclass(frozen=True)
class SeenBatch:
    """One mini-batch in the record, and the learner that computed it."""

    learner: int
    ticket: Ticket
    utterances: tuple[str, ...]


def read_seen(folder: Path, end: Position) -> Iterator[SeenBatch]:
    """The mini-batches in the weights of a checkpoint at `end`: those of all segments, without the ones that the start
    of a later segment dropped.

    Raises DataError if the record is missing or damaged.
    """
    found = segments(folder)
    if not found:
        raise DataError(
            f"{folder}: no record of what learners saw; `starling train` and `starling simulate` write one, but older "
            "versions did not"
        )
    return batches_in(found, [*(start_of(segment) for segment in found[1:]), end])


def batches_in(found: Sequence[Path], ends: Sequence[Position | None]) -> Iterator[SeenBatch]:
    """The mini-batches of segments that are in the weights of a checkpoint at the end of each; None: all of them.
    Raises DataError if the record is damaged."""
    for segment, end in zip(found, ends, strict=True):
        for path in sorted(segment.glob("learner-*.tsv")):
            yield from (batch for batch in _read(path) if end is None or _is_done(batch.ticket.step, end))


def _is_done(step: int, until: Position) -> bool:
    """Whether a mini-batch is in the weights of a checkpoint at `until`."""
    return step < until.next_ticket.step and all(step != ticket.step for ticket in until.outstanding)


def read_skipped(found: Iterable[Path]) -> dict[int, set[str]]:
    """The utterances that were skipped in each epoch of these segments."""
    skipped: dict[int, set[str]] = {}
    for path in (path for segment in found for path in segment.glob("skipped-*.tsv")):
        for _, line in _lines(path):
            epoch, _, rest = line.partition("\t")
            if epoch.isdecimal():
                skipped.setdefault(int(epoch) - 1, set()).add(rest.partition("\t")[0])
    return skipped


def start_of_record(folder: Path) -> Position:
    """The position at which the record starts."""
    return start_of(segments(folder)[0]) if segments(folder) else Position()


def ends_of(found: Sequence[Path]) -> list[Position | None]:
    """The positions at which these segments, in order, were ended by the next one; None of the last one, and where that
    is damaged."""
    ends: list[Position | None] = [None] * len(found)
    for place, following in enumerate(found[1:]):
        with suppress(DataError):
            ends[place] = start_of(following)
    return ends


def start_of(segment: Path) -> Position:
    """The position at which a segment starts. Raises DataError if that is missing or damaged."""
    path = segment / "start.json"
    try:
        return SavedPosition.model_validate(json.loads(path.read_text(encoding="utf-8"))).position
    except (OSError, ValueError, ValidationError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from error


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines below the header with their numbers. The last one is left out if it is incomplete, because the learner
    was killed."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if number > 1 and line.endswith("\n"):
                yield number, line.removesuffix("\n")


def _read(path: Path) -> Iterator[SeenBatch]:
    learner = int(path.stem.removeprefix("learner-"))
    for number, line in _lines(path):
        try:
            epoch, batch, step, *utterances = line.split("\t")
            ticket = Ticket(int(epoch) - 1, int(batch) - 1, int(step))
        except ValueError:
            raise DataError(f"{path}:{number}: {line[:80]!r} is not epoch, batch, step, utterances") from None
        yield SeenBatch(learner, ticket, tuple(utterances))


def read_timeline(seen: Path) -> list[Stretch]:
    """The stretches of a run that are in its weights, by the time at which they ended. Lines that make no sense, such
    as the last one of a learner that was killed, are left out."""
    found = segments(seen)
    stretches: list[Stretch] = []
    for segment, end in zip(found, ends_of(found), strict=True):
        last = math.inf if end is None else end.next_ticket.step
        stretches += [each for each in _read_segment(segment) if each.step < last]
    return sorted(stretches, key=attrgetter("end"))


def _read_segment(segment: Path) -> Iterator[Stretch]:
    """Learners start their own clocks; the time of day, usually read a moment later, brings them in line."""
    by_learner = {path: rows for path in sorted(segment.glob("times-*.tsv")) if (rows := list(_read_times(path)))}
    started = {path: median(row[0] - row[1] for row in rows) for path, rows in by_learner.items()}
    for path, rows in by_learner.items():
        late = started[path] - min(started.values())
        before: Seconds | None = None
        for _, seconds, *counts, loss, computing, for_data, for_peers in rows:
            end = seconds + late
            begin = end - computing - for_data - for_peers if before is None else min(before, end)
            before = end
            step, batches, examples, frames = map(int, counts)
            summed, spent = loss * frames if frames else 0.0, (computing, for_data, for_peers)
            learner = int(path.stem.removeprefix("times-"))
            yield Stretch(learner, begin, end, step, batches, examples, frames, summed, 0.0, *spent)


def _read_times(path: Path) -> Iterator[tuple[float, ...]]:
    if not path.stem.removeprefix("times-").isdecimal():
        return
    for _, line in _lines(path):
        with suppress(ValueError):
            row = tuple(map(float, line.split("\t")))
            if len(row) == len(_COLUMNS) and all(map(math.isfinite, row[:6] + row[7:])):
                yield row
