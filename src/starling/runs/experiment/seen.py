"""The record of which learner computed on which utterances, in the experiment's folder.

    exp/<name>/seen/from-00000000/start.json      where the run began: nothing, or the checkpoint that it continues from
    exp/<name>/seen/from-00000000/learner-0.tsv   epoch, batch, step, and the utterances of every mini-batch
    exp/<name>/seen/from-00000000/skipped-0.tsv   what could not be used, and why
    exp/<name>/seen/from-00000480/...             the same after a resume at step 480

A resume drops what was computed after its checkpoint, which is not in the weights; so does the reading of these files.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from pydantic import ValidationError

from starling.checkpoint.manifest import TicketRecord
from starling.checkpoint.state import LearnerState
from starling.configuration import Config
from starling.errors import DataError
from starling.workload import Position, Ticket

if TYPE_CHECKING:
    from starling.training.job import EpochReport, StepReport

_HEADER = "epoch\tbatch\tstep\tutterances\n"
_SKIPPED_HEADER = "epoch\tid\treason\n"


class _Start(Config):
    next_ticket: TicketRecord
    outstanding: tuple[TicketRecord, ...] = ()


def begin_segment(folder: Path, position: Position, earlier: Path | None = None) -> Path:
    """The folder for what learners see from `position` on; what an earlier run saw after it is dropped.

    `earlier` is the record of the experiment that is continued, if it is another: it is copied.
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
    start = _Start(
        next_ticket=TicketRecord.of(position.next_ticket), outstanding=tuple(map(TicketRecord.of, position.outstanding))
    )
    (segment / "start.json").write_text(start.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return segment


def segments(folder: Path) -> list[Path]:
    """What was recorded since each start of the run, the first one first."""
    return sorted((path for path in folder.glob("from-*") if path.is_dir()), key=_begin)


def _begin(segment: Path) -> int:
    """How many mini-batches were done when a segment began; as text, numbers sort wrongly beyond eight digits."""
    number = segment.name.removeprefix("from-")
    return int(number) if number.isdecimal() else 0


def counter() -> Callable[[str, int], int]:
    """Counts by name, where all learners are in one process."""
    counts: dict[str, int] = {}

    def add(name: str, number: int) -> int:
        counts[name] = counts.get(name, 0) + number
        return counts[name]

    return add


class Seen:
    """An observer that records the utterances of every mini-batch of the learners it is told of.

    Utterances that were skipped are listed and counted over all learners: `count` adds to the number of an epoch, by
    its name, and gives the sum. Above `most` in one epoch the run fails with a DataError.
    """

    def __init__(self, segment: Path, count: Callable[[str, int], int], most: int, say: Callable[[str], None]) -> None:
        self._segment = segment
        self._count = count
        self._most = most
        self._say = say
        self._files: dict[str, TextIO] = {}
        self._num_skipped: dict[tuple[int, int], int] = {}
        self._earlier: dict[int, set[str]] | None = None

    def on_step(self, report: StepReport) -> None:
        ticket = report.ticket
        row = (ticket.epoch + 1, ticket.index + 1, ticket.step, *report.ids)
        self._file(f"learner-{report.rank}.tsv", _HEADER).write("\t".join(map(str, row)) + "\n")
        if report.skipped:
            self._skip(report)

    def on_epoch(self, report: EpochReport, state: LearnerState) -> None:
        self._flush()
        if num_skipped := self._num_skipped.pop((report.rank, report.epoch), 0):
            listed = self._segment / f"skipped-{report.rank}.tsv"
            self._say(f"learner {report.rank} skipped {num_skipped} utterances of epoch {report.epoch + 1}: {listed}")

    def on_barrier(self, state: LearnerState) -> None:
        self._flush()

    def go_on_in(self, segment: Path) -> None:
        """What follows belongs to another start of the run."""
        self.close()
        self._segment = segment
        self._num_skipped.clear()
        self._earlier = None

    def close(self) -> None:
        """Write what is still in memory."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _skip(self, report: StepReport) -> None:
        rank, epoch = report.rank, report.ticket.epoch
        file = self._file(f"skipped-{rank}.tsv", _SKIPPED_HEADER)
        for name, reason in report.skipped:
            file.write("\t".join((str(epoch + 1), name, " ".join(reason.split()))) + "\n")
        file.flush()
        self._num_skipped[rank, epoch] = self._num_skipped.get((rank, epoch), 0) + len(report.skipped)
        if (total := self._count(f"skipped/{epoch}", len(report.skipped)) + self._before(epoch)) > self._most:
            name, reason = report.skipped[-1]
            raise DataError(
                f"learner {rank}: {total} utterances of epoch {epoch + 1} could not be used, the last one {name} "
                f"({reason}); data.filter.max_skipped allows {self._most}: see {self._segment}/skipped-*.tsv, and "
                "prepare the data again"
            )

    def _before(self, epoch: int) -> int:
        """How many utterances of an epoch were skipped before this start of the run."""
        if self._earlier is None:
            older = [each for each in segments(self._segment.parent) if _begin(each) < _begin(self._segment)]
            self._earlier = _skipped_in(older)
        return len(self._earlier.get(epoch, ()))

    def _file(self, name: str, header: str) -> TextIO:
        if name not in self._files:
            self._files[name] = (self._segment / name).open("w", buffering=1, encoding="utf-8")  # a kill loses no line
            self._files[name].write(header)
        return self._files[name]

    def _flush(self) -> None:
        """Before a checkpoint is written: what it holds is then on record."""
        for file in self._files.values():
            file.flush()


@dataclass(frozen=True)
class Sight:
    """One mini-batch, and the learner that computed it."""

    learner: int
    ticket: Ticket
    utterances: tuple[str, ...]


def read_seen(folder: Path, end: Position) -> Iterator[Sight]:
    """What is in the weights of a checkpoint at `end`: every mini-batch that learners of all starts of the run
    computed, without those that a later start dropped.

    Raises DataError for a record that is missing or damaged.
    """
    found = segments(folder)
    if not found:
        raise DataError(
            f"{folder}: no record of what learners saw; `starling train` and `simulate` write one, but older versions "
            "did not"
        )
    ends = [*(start_of(segment) for segment in found[1:]), end]
    for segment, until in zip(found, ends, strict=True):
        open_steps = {ticket.step for ticket in until.outstanding}
        for path in sorted(segment.glob("learner-*.tsv")):
            for sight in _read(path):
                if sight.ticket.step < until.next_ticket.step and sight.ticket.step not in open_steps:
                    yield sight


def read_skipped(folder: Path) -> dict[int, set[str]]:
    """The utterances that were skipped in each epoch."""
    return _skipped_in(segments(folder))


def _skipped_in(found: Iterable[Path]) -> dict[int, set[str]]:
    skipped: dict[int, set[str]] = {}
    for path in (path for segment in found for path in segment.glob("skipped-*.tsv")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines()[1:]:
            epoch, _, rest = line.partition("\t")
            if epoch.isdigit():
                skipped.setdefault(int(epoch) - 1, set()).add(rest.partition("\t")[0])
    return skipped


def start_of_record(folder: Path) -> Position:
    """Where the record begins."""
    return start_of(segments(folder)[0]) if segments(folder) else Position()


def start_of(segment: Path) -> Position:
    """Where one start of the run began. Raises DataError for a record that is missing or damaged."""
    path = segment / "start.json"
    try:
        start = _Start.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, ValidationError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from error
    return Position(start.next_ticket.ticket, tuple(each.ticket for each in start.outstanding))


def _read(path: Path) -> Iterator[Sight]:
    learner = int(path.stem.removeprefix("learner-"))
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file):
            if number == 0 or not line.endswith("\n"):  # a line may be cut where its learner was killed
                continue
            try:
                epoch, batch, step, *utterances = line.rstrip("\n").split("\t")
                ticket = Ticket(int(epoch) - 1, int(batch) - 1, int(step))
            except ValueError:
                raise DataError(f"{path}:{number + 1}: {line[:80]!r} is not epoch, batch, step, utterances") from None
            yield Sight(learner, ticket, tuple(utterances))
