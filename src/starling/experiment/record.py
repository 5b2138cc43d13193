"""The record, in the experiment's folder, of what each learner saw and when it computed; see docs/events.md.

    exp/<name>/seen/from-00000000/start.json       the data position at which the segment starts
    exp/<name>/seen/from-00000000/learner-0.jsonl  learner 0's stream of events: mini-batches, skips, stretches of time
    exp/<name>/seen/from-00000480/...              the next segment, after a resume or a new membership at step 480

A mini-batch is recorded before its gradient is computed: if its learner is lost while gradients are averaged, the
others may still complete the mean. Mini-batches after the position at which the next segment starts are not in the
weights. Readers of the record ignore them.

A stretch is a mini-batch at first. Later it lasts a thousandth of the time since its stream began, so that the stream
grows with the logarithm of that time.

Earlier versions wrote tables: learner-0.tsv, skipped-0.tsv and times-0.tsv.
"""

import math
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import TypeAdapter

from starling.errors import DataError
from starling.launch.messages import Stretch
from starling.reporting.epochs import SPENT
from starling.reporting.events import Event, read_stream
from starling.workload import Position, Ticket

Seconds = float
CLOCKS = ("time", "seconds")
COUNTS = ("step", "batches", "examples", "frames")
"""The fields of a stretch, beside its loss and the seconds of each kind in `SPENT`: the time of day and that of
training, and counts."""


_TABLES = {
    "learner": ("batch", ("epoch", "batch", "step")),
    "skipped": ("skip", ("epoch", "id", "reason")),
    "times": ("stretch", (*CLOCKS, *COUNTS, "loss", *SPENT)),
}
"""Tables of earlier versions: the kinds of their events, and their columns. All cells are text."""


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
        for learner, place, event in _events_in(segment):
            if event is None:
                raise DataError(f"{place}: damaged: not an event, or not as it was written")
            if event["kind"] == "batch":
                try:
                    ticket = Ticket(int(event["epoch"]) - 1, int(event["batch"]) - 1, int(event["step"]))
                    batch = SeenBatch(learner, ticket, tuple(event["ids"]))
                except (KeyError, TypeError, ValueError):
                    raise DataError(f"{place}: {str(event)[:80]!r} is not a mini-batch") from None
                if end is None or _is_done(ticket.step, end):
                    yield batch


def _is_done(step: int, until: Position) -> bool:
    """Whether a mini-batch is in the weights of a checkpoint at `until`."""
    return step < until.next_ticket.step and all(step != ticket.step for ticket in until.outstanding)


def read_skipped(found: Iterable[Path]) -> dict[int, set[str]]:
    """The utterances that were skipped in each epoch of these segments."""
    skipped: dict[int, set[str]] = {}
    for _, _, event in (each for segment in found for each in _events_in(segment)):
        if event is not None and event["kind"] == "skip":
            with suppress(KeyError, ValueError):
                skipped.setdefault(int(event["epoch"]) - 1, set()).add(event["id"])
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


def read_timeline(seen: Path) -> list[Stretch]:
    """The stretches of a run that are in its weights, by the time at which they ended. Damaged ones are left out."""
    found = segments(seen)
    stretches: list[Stretch] = []
    for segment, end in zip(found, ends_of(found), strict=True):
        last = math.inf if end is None else end.next_ticket.step
        stretches += [each for each in _stretches(segment) if each.step < last]
    return sorted(stretches, key=attrgetter("end"))


def _stretches(segment: Path) -> Iterator[Stretch]:
    """The stretches of a segment. Learners start their own clocks; the time of day, usually read a moment later, aligns
    them."""
    by_learner = defaultdict[int, list[dict[str, float]]](list)
    for learner, _, event in _events_in(segment):
        if event is not None and event["kind"] == "stretch":
            with suppress(KeyError, TypeError, ValueError):
                row = {name: float(event[name]) for name in (*CLOCKS, *COUNTS, *SPENT)}
                row["losses"] = float(event["loss"]) * row["frames"] if row["frames"] else 0.0
                if all(map(math.isfinite, row.values())):
                    by_learner[learner].append(row)
    started = {each: median(row["time"] - row["seconds"] for row in rows) for each, rows in by_learner.items()}
    for learner, rows in by_learner.items():
        late = started[learner] - min(started.values())
        before: Seconds | None = None
        for row in rows:
            end = row["seconds"] + late
            begin = end - sum(row[name] for name in SPENT) if before is None else min(before, end)
            before = end
            own: dict[str, Any] = {name: int(row[name]) for name in COUNTS} | {name: row[name] for name in SPENT}
            yield Stretch(learner, end, end - begin, losses=row["losses"], **own)


def _events_in(segment: Path) -> Iterator[tuple[int, str, Event | None]]:
    """The events of a segment: their learners, their places in words, and None for what is damaged."""
    for path in sorted(segment.glob("learner-[0-9]*.jsonl")):
        for number, event in read_stream(path):
            yield _learner_of(path), f"{path}:{number}", event
    for table, (kind, columns) in _TABLES.items():
        for path in sorted(segment.glob(f"{table}-[0-9]*.tsv")):
            lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
            for number, line in enumerate(lines[1:-1], start=2):  # the last was cut where its learner was killed
                cells = line.split("\t")
                event = {"kind": kind, "ids": cells[3:], **dict(zip(columns, cells, strict=False))}
                yield _learner_of(path), f"{path}:{number}", event


def _learner_of(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])
