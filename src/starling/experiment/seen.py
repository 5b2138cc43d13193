"""The record, in the experiment's folder, of what each learner saw and when it computed; see docs/events.md.

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

import math
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from statistics import median

from pydantic import TypeAdapter

from starling.errors import DataError
from starling.launch.messages import Stretch
from starling.workload import Position, Ticket

Seconds = float
TIMES = ("time", "seconds", "step", "batches", "examples", "frames", "loss", "computing", "for_data", "for_peers")
"""Columns of `times-*.tsv`."""


def begin_segment(folder: Path, position: Position, earlier: Path | None = None) -> Path:
    """Create the folder of a segment that starts at `position`, and remove segments that start there or later.

    If the run resumes from another experiment, `earlier` is that experiment's record, which is copied.
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
    start = TypeAdapter(Position).dump_json(position, indent=2)
    (segment / "start.json").write_bytes(start + b"\n")
    return segment


def segments(folder: Path) -> list[Path]:
    """The segments of a record, in order."""
    return sorted((path for path in folder.glob("from-*") if path.is_dir()), key=_begin)


def _begin(segment: Path) -> int:
    """Number of mini-batches that were done when a segment started. It is the sort key, because names with more than
    eight digits do not sort correctly as text."""
    number = segment.name.removeprefix("from-")
    return int(number) if number.isdecimal() else 0


@dataclass(frozen=True)
class SeenBatch:
    """One mini-batch in the record, and the learner that computed it."""

    learner: int
    ticket: Ticket
    utterances: tuple[str, ...]


def read_seen(folder: Path, end: Position) -> Iterator[SeenBatch]:
    """The mini-batches in the weights of a checkpoint at `end`: those of all segments, except mini-batches that the
    start of a later segment dropped.

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
    """The mini-batches of segments that are in the weights of a checkpoint at the end of each; an end of None includes
    all of them. Raises DataError if the record is damaged."""
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


def ends_of(found: Sequence[Path]) -> list[Position | None]:
    """The positions at which the next segment ended each of these segments, in order; None for the last one, and where
    that position is damaged."""
    ends: list[Position | None] = [None] * len(found)
    for place, following in enumerate(found[1:]):
        with suppress(DataError):
            ends[place] = start_of(following)
    return ends


def start_of(segment: Path) -> Position:
    """The position at which a segment starts. Raises DataError if that is missing or damaged."""
    path = segment / "start.json"
    try:
        position = TypeAdapter(Position).validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from error
    if position.num_done != _begin(segment):
        raise DataError(f"{path}: it has step {position.num_done}, but its folder has {_begin(segment)}")
    return position


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
    """The stretches of a run that are in its weights, ordered by the time at which they ended. Invalid lines, such as
    the last one of a killed learner, are left out."""
    found = segments(seen)
    stretches: list[Stretch] = []
    for segment, end in zip(found, ends_of(found), strict=True):
        last = math.inf if end is None else end.next_ticket.step
        stretches += [each for each in _read_segment(segment) if each.step < last]
    return sorted(stretches, key=attrgetter("end"))


def _read_segment(segment: Path) -> Iterator[Stretch]:
    """The stretches of a segment. Learners start their own clocks; the time of day, usually read a moment later, aligns
    them."""
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
            yield Stretch(learner, end, end - begin, step, batches, examples, frames, summed, 0.0, *spent)


def _read_times(path: Path) -> Iterator[tuple[float, ...]]:
    if not path.stem.removeprefix("times-").isdecimal():
        return
    for _, line in _lines(path):
        with suppress(ValueError):
            row = tuple(map(float, line.split("\t")))
            if len(row) == len(TIMES) and all(map(math.isfinite, row[:6] + row[7:])):
                yield row
