"""The record in the experiment's folder of the utterances that each learner saw.

    exp/<name>/seen/from-00000000/start.json      the data position at which the segment starts
    exp/<name>/seen/from-00000000/learner-0.tsv   epoch, batch, step, and the utterances of every mini-batch
    exp/<name>/seen/from-00000000/skipped-0.tsv   utterances that could not be used, with the reason
    exp/<name>/seen/from-00000480/...             the next segment, after a resume or a new membership at step 480

A mini-batch is recorded before its gradient is computed: if its learner is lost while gradients are averaged, the
others may still complete the mean. Mini-batches after the position at which the next segment starts are not in the
weights. Readers of the record ignore them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from pydantic import ValidationError

from starling.checkpoint.manifest import SavedPosition
from starling.checkpoint.state import LearnerState
from starling.errors import DataError
from starling.workload import Position, Ticket

if TYPE_CHECKING:
    from starling.training.job import ClaimReport, EpochReport, StepReport

_HEADER = "epoch\tbatch\tstep\tutterances\n"
_SKIPPED_HEADER = "epoch\tid\treason\n"


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


class Seen:
    """An observer that records the utterances of every mini-batch.

    Skipped utterances are listed, and counted over all learners: `count(name, number)` adds to a shared counter and
    returns the sum. More than `max_skipped` in one epoch raise a DataError.
    """

    def __init__(
        self, segment: Path, count: Callable[[str, int], int], max_skipped: int, say: Callable[[str], None]
    ) -> None:
        self._segment = segment
        self._count = count
        self._max_skipped = max_skipped
        self._say = say
        self._files: dict[str, TextIO] = {}
        self._num_skipped: dict[tuple[int, int], int] = {}
        self._earlier: dict[int, set[str]] | None = None

    saves = False

    def on_claim(self, report: ClaimReport) -> None:
        ticket = report.ticket
        row = (ticket.epoch + 1, ticket.index + 1, ticket.step, *report.ids)
        self._file(f"learner-{report.rank}.tsv", _HEADER).write("\t".join(map(str, row)) + "\n")
        if report.skipped:
            self._skip(report)

    def on_step(self, report: StepReport) -> None: ...

    def on_epoch(self, report: EpochReport, state: LearnerState) -> None:
        self._flush()
        if num_skipped := self._num_skipped.pop((report.rank, report.epoch), 0):
            listed = self._segment / f"skipped-{report.rank}.tsv"
            self._say(f"learner {report.rank} skipped {num_skipped} utterances of epoch {report.epoch + 1}: {listed}")

    def on_barrier(self, state: LearnerState) -> None:
        self._flush()

    def continue_in(self, segment: Path) -> None:
        """Continue the record in another segment."""
        self.close()
        self._segment = segment
        self._num_skipped.clear()
        self._earlier = None

    def close(self) -> None:
        """Flush and close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _skip(self, report: ClaimReport) -> None:
        rank, epoch = report.rank, report.ticket.epoch
        file = self._file(f"skipped-{rank}.tsv", _SKIPPED_HEADER)
        for name, reason in report.skipped:
            file.write("\t".join((str(epoch + 1), name, " ".join(reason.split()))) + "\n")
        file.flush()
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

    def _file(self, name: str, header: str) -> TextIO:
        if name not in self._files:
            self._files[name] = (self._segment / name).open("w", buffering=1, encoding="utf-8")  # line buffering
            self._files[name].write(header)
        return self._files[name]

    def _flush(self) -> None:
        """Flush the files before a checkpoint is written, so that the record covers what is in its weights."""
        for file in self._files.values():
            file.flush()


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
    ends = [*(start_of(segment) for segment in found[1:]), end]
    for segment, until in zip(found, ends, strict=True):
        for path in sorted(segment.glob("learner-*.tsv")):
            yield from (batch for batch in _read(path) if _is_done(batch.ticket.step, until))


def count_lines(path: Path, until: Position | None = None) -> int:
    """The number of complete lines after the header; with `until`, without those of mini-batches that are not in the
    weights of a checkpoint there."""
    with path.open("rb") as file:
        next(file, None)
        return sum(line.endswith(b"\n") and (until is None or _is_kept(line, until)) for line in file)


def _is_kept(line: bytes, until: Position) -> bool:
    fields = line.split(b"\t", 3)
    step = fields[2].strip() if len(fields) > 2 else b""
    return step.isdigit() and _is_done(int(step), until)


def _is_done(step: int, until: Position) -> bool:
    """Whether a mini-batch is in the weights of a checkpoint at `until`."""
    return step < until.next_ticket.step and all(step != ticket.step for ticket in until.outstanding)


def read_skipped(found: Iterable[Path]) -> dict[int, set[str]]:
    """The utterances that were skipped in each epoch of these segments."""
    skipped: dict[int, set[str]] = {}
    for path in (path for segment in found for path in segment.glob("skipped-*.tsv")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines()[1:]:
            epoch, _, rest = line.partition("\t")
            if epoch.isdigit():
                skipped.setdefault(int(epoch) - 1, set()).add(rest.partition("\t")[0])
    return skipped


def start_of_record(folder: Path) -> Position:
    """The position at which the record starts."""
    return start_of(segments(folder)[0]) if segments(folder) else Position()


def start_of(segment: Path) -> Position:
    """The position at which a segment starts. Raises DataError if that is missing or damaged."""
    path = segment / "start.json"
    try:
        return SavedPosition.model_validate(json.loads(path.read_text(encoding="utf-8"))).position
    except (OSError, ValueError, ValidationError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from error


def _read(path: Path) -> Iterator[SeenBatch]:
    learner = int(path.stem.removeprefix("learner-"))
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file):
            if number == 0 or not line.endswith("\n"):  # the last line may be incomplete if the learner was killed
                continue
            try:
                epoch, batch, step, *utterances = line.rstrip("\n").split("\t")
                ticket = Ticket(int(epoch) - 1, int(batch) - 1, int(step))
            except ValueError:
                raise DataError(f"{path}:{number + 1}: {line[:80]!r} is not epoch, batch, step, utterances") from None
            yield SeenBatch(learner, ticket, tuple(utterances))
