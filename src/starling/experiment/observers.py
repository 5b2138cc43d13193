"""Observers that pass a learner's reports to its log, its curves, its record, its checkpoints, and the launcher."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, TextIO

from starling.checkpoint.reader import Checkpoint
from starling.checkpoint.state import LearnerState
from starling.checkpoint.writer import BackgroundWriter, CheckpointWriter
from starling.errors import DataError
from starling.experiment.folder import ExperimentFolder
from starling.experiment.seen import TIMES, read_skipped, segments
from starling.launch.messages import LearnerMessage, ModelSaved, Progress, Saved, Stretch
from starling.reporting.epochs import SPENT, Tally
from starling.reporting.events import Warn, once
from starling.reporting.lines import Advice, epoch_line, progress_line
from starling.reporting.metrics import Curves
from starling.training.job import ClaimReport, EpochReport, Observer, StepReport
from starling.workload import Position

Listener = Callable[[Progress], None]
Seconds = float
EXACT = 1000
"""Number of stretches of a learner that hold one mini-batch each, before stretches grow."""
_EVEN_OF_MANY = 50
"""Smallest number of such stretches of a learner, however many learners share its process."""
_ALL_LEARNERS = 16_000
"""Largest number of such stretches of all learners of one process together, if each has more than `_EVEN_OF_MANY`."""


class Metered(Observer):
    """An observer that adds up the work of learners, with one addition for each gradient, and shows the sums to readers
    after each gradient and at the end of each epoch."""

    def __init__(self, *readers: Callable[[Tally], None]) -> None:
        self._readers = readers
        self._tallies = defaultdict[int, Tally](Tally)

    def on_step(self, report: StepReport) -> None:
        tally = self._tallies[report.rank]
        tally.add(report)
        for reader in self._readers:
            reader(tally)

    def on_epoch(self, report: EpochReport, state: LearnerState) -> None:
        tally = self._tallies[report.rank]
        tally.end_epoch(report, state.position.num_done)
        for reader in self._readers:
            reader(tally)


class Paced:
    """A reader that passes a learner's progress to a listener, at most once in `every` seconds, and at the end of each
    epoch."""

    def __init__(self, listener: Listener, every: Seconds, clock: Callable[[], Seconds] = time.monotonic) -> None:
        self._listener, self._every, self._clock = listener, every, clock
        self._told = defaultdict[int, Stretch](Stretch)
        self._due: dict[int, Seconds] = {}

    def __call__(self, tally: Tally) -> None:
        now, learner = self._clock(), tally.all.learner
        told = self._told[learner]
        if tally.ended or (now >= self._due.get(learner, now) and tally.all.frames > told.frames):
            self._listener(tally.progress(told))
            self._told[learner], self._due[learner] = replace(tally.all), now + self._every


class Log:
    """A listener that writes lines about some of `world` learners to a text stream, and each piece of advice once."""

    def __init__(self, stream: TextIO, world: int) -> None:
        self._stream, self._world = stream, world
        self._advice = Advice(world)

    def __call__(self, progress: Progress) -> None:
        who = f"({progress.learner_id}/{self._world})"
        lines: list[str] = []
        if progress.new.frames:
            lines.append(f"{who} {progress_line(progress)}")
        if progress.ended_at is not None:
            lines.append(f"{who} {epoch_line(progress)}")
            lines += filter(None, [self._advice.line(progress)])
        self._stream.writelines(f"{line}\n" for line in lines)
        self._stream.flush()


class Record:
    """Writes tables into the segment of the present membership."""

    def __init__(self, segment: Path) -> None:
        self._segment = segment
        self._files: dict[str, TextIO] = {}

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
        """Add a row to a table. It is in the file at once, so that a kill loses no row."""
        if name not in self._files:
            self._files[name] = (self._segment / name).open("w", buffering=1, encoding="utf-8")
            self._files[name].write("\t".join(columns) + "\n")
        self._files[name].write("\t".join(map(str, row)) + "\n")


class Seen(Record, Observer):
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
        vars(self).pop("_earlier", None)  # what is earlier has changed

    def _skip(self, report: ClaimReport) -> None:
        rank, epoch = report.rank, report.ticket.epoch
        for name, reason in report.skipped:
            row = (epoch + 1, name, " ".join(reason.split()))
            self._write(f"skipped-{rank}.tsv", ("epoch", "id", "reason"), row)
        self._num_skipped[rank, epoch] = self._num_skipped.get((rank, epoch), 0) + len(report.skipped)
        total = self._count(f"skipped/{epoch}", len(report.skipped)) + len(self._earlier.get(epoch, ()))
        if total > self._max_skipped:
            name, reason = report.skipped[-1]
            raise DataError(
                f"learner {rank}: {total} utterances of epoch {epoch + 1} could not be used, the last one {name} "
                f"({reason}); data.filter.max_skipped allows {self._max_skipped}: see {self._segment}/skipped-*.tsv, "
                "and prepare the data again"
            )

    @cached_property
    def _earlier(self) -> Mapping[int, set[str]]:
        """The utterances of each epoch that were skipped in earlier segments."""
        found = segments(self._segment.parent)
        return read_skipped(found[: found.index(self._segment)])


@dataclass
class _Open:
    """A learner's table, and its stretch that is not yet in the table."""

    tally: Tally
    begin: Seconds
    written: Stretch
    """Copy of the sums at the last written line."""
    num_written: int = 0


class Timeline(Record):
    """A reader that records when each of `world` learners computed and when it waited.

    `clock` gives the time of day, by which the clocks of learners are aligned; None on a simulated clock, which all
    share. If a file cannot be written, only the record is lost, and `warn` is called once.
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

    def __call__(self, tally: Tally) -> None:
        now, learner = tally.all.end, tally.all.learner
        if (own := self._open.get(learner)) is None:
            own = self._open[learner] = _Open(tally, now, Stretch())
        if own.num_written < self._exact or now - own.written.end >= (now - own.begin) / self._exact:
            self._end(own)

    def close(self) -> None:
        """Write the stretches that are still in memory."""
        for own in self._open.values():
            self._end(own)
            own.begin, own.num_written = own.written.end, 0
        super().close()

    def _end(self, own: _Open) -> None:
        """Write a learner's stretch, and begin the next."""
        each = own.tally.all.since(own.written)
        if not each.batches:
            return
        name, counts = f"times-{each.learner}.tsv", (each.step, each.batches, each.examples, each.frames)
        spent = (f"{getattr(each, kind):.4f}" for kind in SPENT)
        at = each.end if self._clock is None else self._clock()
        try:
            self._write(name, TIMES, (f"{at:.4f}", f"{each.end:.4f}", *counts, f"{each.loss:.6g}", *spent))
        except OSError as error:
            self._warn(self._segment / name, error)
        own.written, own.num_written = replace(own.tally.all), own.num_written + 1


Keep = Literal["checkpoint", "model", ""]
"""Kind of save at the end of an epoch; `""` saves nothing."""
Moment = Literal["epoch", "barrier", "end"]


class Saver(Observer, AbstractContextManager["Saver"]):
    """An observer that saves in a background thread.

    It saves a checkpoint at every checkpoint barrier. At the end of an epoch, `choose` selects what is saved, the same
    on all learners; for `model`, `model_writer` saves only what the consensus model is computed from. The learner that
    completes either one reports it with `tell`, and adds the consensus distance to the curve `consensus` in the folder
    `curves`. Each point is a new file, because any learner may be the one that completes.

    The context manager waits for unfinished saves when it exits, even if training has failed.
    """

    def __init__(
        self,
        writer: CheckpointWriter,
        tell: Callable[[LearnerMessage], None],
        curves: Path,
        choose: Callable[[EpochReport], Keep] = lambda report: "checkpoint",
        model_writer: CheckpointWriter | None = None,
    ) -> None:
        self._background = BackgroundWriter(writer)
        self._choose = choose
        self._model_writer = model_writer
        self._tell = tell
        self._curves = curves
        self._last: Position | None = None
        self._chosen = defaultdict[Position, list[tuple[Keep, Moment]]](list)
        """Pending saves at the ends of epochs whose states are not complete yet."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except Exception as own:
            if error is None:
                raise
            error.add_note(f"the last checkpoint was not written either: {own}")

    def close(self) -> None:
        """Wait for unfinished saves. Raises CheckpointError if one failed."""
        self._last = None  # the next membership may save at the same position, as partial checkpoints are dropped
        self._chosen.clear()
        self._background.close()

    def on_step(self, report: StepReport) -> None:
        self._background.check()

    def on_epoch(self, report: EpochReport, state: LearnerState) -> None:
        kept = self._choose(report)
        moment: Moment = "end" if report.is_last else "epoch"
        if state.is_complete:
            self._save(state, kept, moment)
        else:  # `on_barrier` gets the complete state
            self._chosen[state.position].append((kept, moment))

    def on_barrier(self, state: LearnerState) -> None:
        if state.epochs_ended is None:
            self._save(state, "checkpoint", "barrier")
            return
        for kept, moment in self._chosen.pop(state.position, ()):
            self._save(state, kept, moment)

    def _save(self, state: LearnerState, kept: Keep, moment: Moment) -> None:
        if not kept or state.position == self._last:
            return  # several epochs ended at this position
        self._last = state.position
        is_model = kept == "model"
        if is_model:
            shards = tuple(replace(shard, optimizer={}) for shard in state.shards)
            state = replace(state, optimizer={}, shards=shards)

        def completed(checkpoint: Checkpoint) -> None:
            folder, manifest = str(checkpoint.folder), checkpoint.manifest
            distance = manifest.consensus_distance
            self._tell(ModelSaved(folder) if is_model else Saved(folder, moment, distance))
            if distance is not None:
                with closing(Curves(self._curves)) as curves:
                    curves.add("consensus", {"consensus/distance": distance}, manifest.position.num_done)

        self._background.save(state, completed, self._model_writer if is_model else None)


class Together(Observer):
    """Calls several observers in order."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers
        # at each mini-batch, only those that do something
        self._on_claim = [each.on_claim for each in observers if type(each).on_claim is not Observer.on_claim]
        self._on_step = [each.on_step for each in observers if type(each).on_step is not Observer.on_step]

    @property
    def saves(self) -> bool:
        return any(observer.saves for observer in self._observers)

    def on_claim(self, report: ClaimReport) -> None:
        for on_claim in self._on_claim:
            on_claim(report)

    def on_step(self, report: StepReport) -> None:
        for on_step in self._on_step:
            on_step(report)

    def on_epoch(self, report: EpochReport, state: LearnerState) -> None:
        for observer in self._observers:
            observer.on_epoch(report, state)

    def on_barrier(self, state: LearnerState) -> None:
        for observer in self._observers:
            observer.on_barrier(state)


def save_choice(
    checkpoints: int | None, validate: int | None, folder: ExperimentFolder, agree: Callable[[str, str], str]
) -> Callable[[EpochReport], Keep]:
    """The function that chooses what learners save at the end of an epoch.

    A checkpoint every `checkpoints` epochs and at the end of the run; otherwise a model to score every `validate`
    epochs, if the launcher is waiting for one. None means never. The first learner to reach the end of the epoch checks
    whether the launcher is waiting; `agree` passes its answer to the others.
    """

    def choose(report: EpochReport) -> Keep:
        num_ended = report.epoch + 1
        if report.is_last or (checkpoints is not None and num_ended % checkpoints == 0):
            return "checkpoint"
        if validate is None or num_ended % validate != 0:
            return ""
        is_busy = folder.validation.is_dir() and any(folder.validation.iterdir())
        return "model" if agree(f"validate/{num_ended}", "no" if is_busy else "yes") == "yes" else ""

    return choose
