"""The record, in the experiment's folder, of what each learner saw and when it computed (docs/events.md); and
`starling audit`, which tells from it whether each epoch saw every utterance exactly once.

    exp/<name>/seen/from-00000000/start.json       the data position at which the segment starts
    exp/<name>/seen/from-00000000/config.yaml      the resolved recipe of the run up to there, if another one follows
    exp/<name>/seen/from-00000000/learner-0.jsonl  learner 0's stream of events: mini-batches, skips, stretches of time
    exp/<name>/seen/from-00000480/...              the next segment, after a resume or a new membership at step 480
    exp/<name>/seen/from-00000480.1/...            another one that starts at step 480

A mini-batch is recorded before its gradient is computed: if its learner is lost while gradients are averaged, the
others may still complete the mean. Mini-batches after the position at which the next segment starts are not in the
weights. Readers of the record ignore them.

A stretch is a mini-batch at first. Later it lasts a thousandth of the time since its stream began, so that the stream
grows with the logarithm of that time.

Earlier versions wrote tables: learner-0.tsv, skipped-0.tsv and times-0.tsv.
"""

import math
import shutil
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import dropwhile
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import TypeAdapter
from rich.console import Console
from rich.table import Table

from starling.checkpoint.files import read_manifest
from starling.checkpoint.reader import latest
from starling.errors import DataError, some
from starling.events import Event, read_stream
from starling.experiment.folder import ExperimentFolder, existing
from starling.experiment.task import MiniBatches, task_of
from starling.launch.messages import Stretch
from starling.recipe import read_recipe
from starling.reporting.epochs import SPENT
from starling.reporting.progress import Say
from starling.workload import Position, Ticket

Seconds = float
RECIPE = "config.yaml"
"""Name of the file with the recipe in the last segment of a run that was resumed."""
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


def begin_record(folder: Path, position: Position, earlier: ExperimentFolder | None = None) -> None:
    """Create the folder of the first segment of a run that starts at `position`. Segments that start later are removed,
    and so are segments of an earlier resume from this position. A membership that started at this position is kept,
    because it belongs to the run whose state is resumed.

    If the run resumes, `earlier` is the experiment with its checkpoint. If that is a different experiment, its record
    is copied.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if earlier is not None and earlier.seen.resolve() != folder.resolve():
        for old in segments(folder):
            shutil.rmtree(old)
        for old in segments(earlier.seen):
            shutil.copytree(old, folder / old.name)

    def is_before(old: Path) -> bool:
        return _begin(old)[0] < position.num_done or (start_of(old) == position and _membership(old) > 0)

    for old in dropwhile(is_before, segments(folder)):
        shutil.rmtree(old)
    found = segments(folder)
    if earlier is not None and earlier.config.is_file() and found and not (found[-1] / RECIPE).exists():
        shutil.copyfile(earlier.config, found[-1] / RECIPE)
    begin_segment(folder, position)


def begin_segment(folder: Path, position: Position) -> Path:
    """Create the folder of a segment that starts at `position`, where others may have started."""
    name = f"from-{position.num_done:08d}"
    num_before = sum(_begin(old)[0] == position.num_done for old in segments(folder))
    segment = folder / (f"{name}.{num_before}" if num_before else name)
    segment.mkdir(parents=True)
    (segment / "start.json").write_bytes(TypeAdapter(Position).dump_json(position, indent=2) + b"\n")
    return segment


def segments(folder: Path) -> list[Path]:
    """The segments of a record, in order."""
    return sorted((path for path in folder.glob("from-*") if path.is_dir()), key=_begin)


def _membership(segment: Path) -> int:
    """The number of the membership in a segment; 0 if it is not recorded."""
    events = (event for _, _, event in events_in(segment) if event is not None)
    return next((int(event["number"]) for event in events if event["kind"] == "membership"), 0)


def _begin(segment: Path) -> tuple[int, int]:
    """Number of mini-batches that were done when a segment started, and number of segments before it that started
    there. It is the sort key, because names with more than eight digits do not sort correctly as text."""
    number, _, place = segment.name.removeprefix("from-").partition(".")
    return int(number) if number.isdecimal() else 0, int(place) if place.isdecimal() else 0


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
        missing = set() if end is None else {each.step for each in end.outstanding}
        for learner, place, event in events_in(segment):
            if event is None:
                raise DataError(f"{place}: damaged: not an event, or not as it was written")
            if event["kind"] == "batch":
                try:
                    ticket = Ticket(int(event["epoch"]) - 1, int(event["batch"]) - 1, int(event["step"]))
                    batch = SeenBatch(learner, ticket, tuple(event["ids"]))
                except (KeyError, TypeError, ValueError):
                    raise DataError(f"{place}: {str(event)[:80]!r} is not a mini-batch") from None
                if end is None or (ticket.step < end.next_ticket.step and ticket.step not in missing):
                    yield batch


def read_skipped(found: Iterable[Path]) -> dict[int, set[str]]:
    """The utterances that were skipped in each epoch of these segments."""
    skipped: dict[int, set[str]] = {}
    for _, _, event in (each for segment in found for each in events_in(segment)):
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
    if position.num_done != _begin(segment)[0]:
        raise DataError(f"{path}: it has step {position.num_done}, but its folder has {_begin(segment)[0]}")
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
    for learner, _, event in events_in(segment):
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


def events_in(segment: Path) -> Iterator[tuple[int, str, Event | None]]:
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


@dataclass
class EpochAudit:
    """The record of what learners saw in one epoch. Mini-batches are identified by their index in the epoch, from 0."""

    epoch: int
    num_batches: int
    """Number of mini-batches in the epoch's plan."""
    batches: Counter[int] = field(default_factory=Counter)
    """Number of times that each mini-batch was computed."""
    by_learner: Counter[int] = field(default_factory=Counter)
    """Number of mini-batches that each learner computed."""
    examples: Counter[str] = field(default_factory=Counter)
    """Number of times that each example was seen."""
    num_skipped: int = 0
    """Number of planned examples that could not be used."""
    mismatched: list[int] = field(default_factory=list)
    """Mini-batches whose examples differ from the plan."""

    def add(self, batch: SeenBatch, planned: Iterable[str] | None, skipped: Collection[str]) -> None:
        """Count a mini-batch, and compare it with the plan, if there is one; `skipped` are the utterances that were
        skipped in the epoch."""
        self.batches[batch.ticket.index] += 1
        self.by_learner[batch.learner] += 1
        self.examples.update(batch.utterances)
        found = Counter(batch.utterances)
        expected = found if planned is None else Counter(planned)
        missing = expected - found
        num_skipped = sum(number for name, number in missing.items() if name in skipped)
        self.num_skipped += num_skipped
        if found - expected or num_skipped < missing.total():
            self.mismatched.append(batch.ticket.index)

    def problems(self, due: set[int]) -> Iterator[str]:
        """Describe mini-batches that are `due` and missing, were computed twice, or differ from the plan."""
        twice = [index for index, times in self.batches.items() if times > 1]
        for indices, what in (
            (due - self.batches.keys(), "were not computed"),
            (twice, "were computed more than once"),
            (self.mismatched, "did not contain the utterances of the plan"),
        ):
            if indices:
                yield f"mini-batches {some([index + 1 for index in sorted(indices)])} of epoch {self.epoch + 1} {what}"


class _Recorded(MiniBatches):
    """The mini-batches of a job of `starling.train`, which is not in the experiment's folder. Their numbers follow from
    the tickets that were `seen` before the position `end`. The examples that each should contain are not known."""

    num_parts = 0

    def __init__(self, seen: Iterable[SeenBatch], end: Position) -> None:
        tickets = [*(each.ticket for each in seen), end.next_ticket]
        begins = {ticket.epoch: ticket.step - ticket.index for ticket in tickets}
        self._sizes = {epoch: begins[epoch + 1] - begin for epoch, begin in begins.items() if epoch + 1 in begins}
        self._least = 1 + end.next_ticket.index  # the epoch of the checkpoint is not complete

    def num_batches(self, epoch: int) -> int:
        return self._sizes.get(epoch, max([*self._sizes.values(), self._least]))

    def passes(self, times: Counter[str]) -> str:
        if not times:
            return "no example with a name was seen"
        least, most = min(times.values()), max(times.values())
        return f"each of {len(times)} examples was seen {least}{f' to {most}' * (most > least)} times"


def audit(experiment: Path, tell: Say, output: Console) -> None:
    """Print what learners saw in each epoch, up to the newest checkpoint, and check it against the plan.

    Of a job of `starling.train`, only the numbers of its mini-batches are known, and the record is checked for these.

    Raises DataError if a mini-batch was computed twice, did not contain the utterances of the plan, or is missing
    although it is due at the position of the checkpoint.
    """
    folder = existing(experiment)
    tree, record, end = read_recipe(folder.config), segments(folder.seen), read_manifest(latest(experiment)).position
    if "trains" in tree:
        plan: MiniBatches = _Recorded(read_seen(folder.seen, end), end)
    else:
        task = task_of(tree)
        plan = task.mini_batches(task.check_resolved(tree, str(folder.config)), folder)
    skipped, begin = read_skipped(record), start_of(record[0]) if record else Position()
    found: dict[int, EpochAudit] = {}
    for batch in read_seen(folder.seen, end):
        number = batch.ticket.epoch
        if number not in found:
            found[number] = EpochAudit(number, plan.num_batches(number))
        is_planned = plan.num_parts == 1 and batch.ticket.index < found[number].num_batches
        found[number].add(batch, plan.ids(batch.ticket) if is_planned else None, skipped.get(number, ()))
    epochs = [found[number] for number in sorted(found)]
    output.print(_table(epochs))
    problems: list[str] = []
    for number in range(begin.next_ticket.epoch, end.next_ticket.epoch + 1):
        problems += found.get(number, EpochAudit(number, 0)).problems(_due(plan, number, begin, end))
    if begin.num_done:
        tell(
            f"the record begins at step {begin.num_done}: earlier mini-batches are in the record of the run from which "
            "this one was resumed"
        )
    if problems:
        raise DataError(f"{experiment}: " + "; ".join(problems))
    line = f"every mini-batch before number {end.next_ticket.step + 1} was computed once"
    if end.outstanding:
        line += f", except {len(end.outstanding)} that a resumed run computes first"
    tell(f"{line}; {_expected(plan, epochs)}")


def _due(plan: MiniBatches, epoch: int, begin: Position, end: Position) -> set[int]:
    """The mini-batches of an epoch that should have been computed between two positions."""
    before, outstanding = (
        {ticket.index for ticket in position.outstanding if ticket.epoch == epoch} for position in (begin, end)
    )
    first = begin.next_ticket.index if epoch == begin.next_ticket.epoch else 0
    last = end.next_ticket.index if epoch == end.next_ticket.epoch else plan.num_batches(epoch)
    return (before | set(range(first, last))) - outstanding


def _table(epochs: list[EpochAudit]) -> Table:
    learners = sorted({learner for each in epochs for learner in each.by_learner})
    table = Table("epoch", "batches", "seen", "once", "more")
    for learner in learners[:16]:
        table.add_column(f"by {learner}", justify="right")
    for each in epochs:
        times = Counter(each.examples.values())
        table.add_row(
            str(each.epoch + 1),
            f"{len(each.batches)}/{each.num_batches}",
            str(len(each.examples)),
            str(times[1]),
            str(len(each.examples) - times[1]),
            *(str(each.by_learner[learner]) for learner in learners[:16]),
        )
    return table


def _expected(plan: MiniBatches, epochs: list[EpochAudit]) -> str:
    """A sentence that compares how often examples were seen with how often they should have been."""
    if plan.num_parts > 1:
        return f"learners drew {plan.examples} at random from their parts"
    complete = [each for each in epochs if len(each.batches) == each.num_batches]
    times = sum((each.examples for each in complete), Counter[str]())
    if (passes := plan.passes(times)) is not None:
        return f"in {len(complete)} complete epochs: {passes}"
    if not complete:
        return "no epoch is complete yet"
    expected = plan.num_examples
    once = [each for each in complete if len(each.examples) == expected and set(each.examples.values()) == {1}]
    line = f"{len(once)} of {len(complete)} complete epochs saw each of {expected} {plan.examples} exactly once"
    if num_skipped := sum(each.num_skipped for each in complete):
        line += f"; {num_skipped} could not be used and were skipped"
    return line
