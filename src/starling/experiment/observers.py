"""Observers that pass a learner's reports to its log, its curves, its record, its checkpoints, and the launcher."""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TextIO

from starling.checkpoint.reader import Checkpoint
from starling.checkpoint.state import LearnerState
from starling.checkpoint.writer import BackgroundWriter, CheckpointWriter
from starling.errors import DataError
from starling.events import VERSION, Stream, Warn, once
from starling.experiment.folder import ExperimentFolder
from starling.experiment.record import COUNTS, read_skipped, segments
from starling.launch.messages import LearnerMessage, ModelSaved, Progress, Saved, Stretch
from starling.reporting.epochs import SPENT, Advice, Tally, epoch_line, progress_line
from starling.reporting.metrics import Curves
from starling.reporting.progress import Say
from starling.training.job import ClaimReport, EpochReport, Observer, StepReport, Unshared
from starling.workload import Position

Listener = Callable[[Progress], None]
Seconds = float
EXACT = 1000
"""Number of stretches of a learner that hold one mini-batch each, before stretches grow."""
_EVEN_OF_MANY = 50
"""Smallest number of such stretches of a learner, however many learners share its process."""
_ALL_LEARNERS = 16_000
"""Largest number of such stretches of all learners of one process together, if each has more than `_EVEN_OF_MANY`."""


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


@dataclass
class _Own:
    """A learner's sums, its stream in the present segment, and its stretch that is not in it yet."""

    tally: Tally = field(default_factory=Tally)
    stream: Stream | None = None
    begin: Seconds | None = None
    """Time at which the learner's first stretch in the segment began."""
    written: Stretch = field(default_factory=Stretch)
    """The learner's sums at the end of its last stretch."""
    num_written: int = 0
    unshared: Unshared | None = None
    """The learner's counter of steps that no other learner has received."""


class Recorder(Observer):
    """Records what learners do in the segment of the present membership, and adds it up for readers.

    A mini-batch that cannot be recorded raises OSError. A stretch that cannot costs that stretch, and `warn` is called
    once.

    Args:
        segment: The folder of the segment.
        skips: The limit of skipped utterances; by default, none may be skipped.
        world: The number of learners of this process.
        clock: The time of day, by which learners are brought in line; None on a simulated clock, where all have one.
    """

    def __init__(
        self,
        segment: Path,
        skips: "Skips | None" = None,
        world: int = 1,
        clock: Callable[[], float] | None = time.time,
        warn: Warn = lambda path, error: None,
    ) -> None:
        self._segment, self._skips, self._clock = segment, skips or Skips(), clock
        self.readers: Sequence[Callable[[Tally], None]] = ()
        """They are shown a learner's sums after each gradient, and at the end of each epoch."""
        self._warn = once(warn)
        self._exact = max(_EVEN_OF_MANY, min(EXACT, _ALL_LEARNERS // world))
        self._learners = defaultdict[int, _Own](_Own)
        self._opening = threading.Lock()

    @property
    def num_steps(self) -> int:
        """The number of mini-batches so far."""
        return sum(own.tally.all.batches for own in list(self._learners.values()))  # heartbeats ask from another thread

    def num_unshared(self, learner: int) -> float:
        """Return the number of steps that would now be lost with a learner."""
        counter = self._learners[learner].unshared if learner in self._learners else None
        return counter.count if counter is not None else 0.0

    @property
    def records(self) -> bool:
        return True

    def on_event(self, rank: int, kind: str, **fields: Any) -> None:
        self._stream_of(rank).append(kind, **fields)

    def on_claim(self, report: ClaimReport) -> None:
        ticket = report.ticket
        stream = self._stream_of(report.rank)
        at = {} if report.minutes is None else {"minutes": report.minutes}
        stream.append("batch", epoch=ticket.epoch + 1, batch=ticket.index + 1, step=ticket.step, ids=report.ids, **at)
        for name, reason in report.skipped:
            stream.append("skip", epoch=ticket.epoch + 1, id=name, reason=" ".join(reason.split()))
        if report.skipped:
            self._skips.add(report, self._segment)

    def on_step(self, report: StepReport) -> None:
        own = self._learners[report.rank]
        own.tally.add(report)
        own.unshared = report.unshared
        now = own.tally.all.end
        own.begin = now if own.begin is None else own.begin
        if own.num_written < self._exact or now - own.written.end >= (now - own.begin) / self._exact:
            self._end_stretch(report.rank, own)
        for reader in self.readers:
            reader(own.tally)

    def on_epoch(self, report: EpochReport, state: LearnerState) -> None:
        tally = self._learners[report.rank].tally
        tally.end_epoch(report, state.position.num_done)
        for reader in self.readers:
            reader(tally)
        self._skips.end_epoch(report, self._segment)

    def continue_in(self, segment: Path) -> None:
        """Close the files, and continue the record in `segment`, the folder of the next membership."""
        self.close()
        self._segment = segment
        self._skips.forget()

    def close(self) -> None:
        """Write what is still in memory, and close the files."""
        for learner, own in self._learners.items():
            self._end_stretch(learner, own)
            if own.stream is not None:
                own.stream.close()
            own.stream, own.begin, own.num_written = None, own.written.end, 0

    def _stream_of(self, learner: int) -> Stream:
        own = self._learners[learner]
        with self._opening:
            if own.stream is None:
                stream = Stream(self._segment / f"learner-{learner}.jsonl")
                stream.append("begin", version=VERSION, learner=learner)
                own.stream = stream
            return own.stream

    def _end_stretch(self, learner: int, own: _Own) -> None:
        """Write a learner's stretch, and begin the next."""
        each = own.tally.all.since(own.written)
        if not each.batches:
            return
        at = each.end if self._clock is None else self._clock()
        clocks = {"time": round(at, 4), "seconds": round(each.end, 4)}
        counts = {name: getattr(each, name) for name in COUNTS}
        spent = {name: round(getattr(each, name), 4) for name in SPENT}
        try:
            self._stream_of(learner).append("stretch", **clocks, **counts, loss=float(f"{each.loss:.6g}"), **spent)
        except OSError as error:
            self._warn(self._segment, error)
        own.written, own.num_written = replace(own.tally.all), own.num_written + 1


class Skips:
    """Counts skipped utterances over all learners: `count(name, number)` adds to a shared counter and returns the sum.
    More than `most` in one epoch raise a DataError."""

    def __init__(
        self, count: Callable[[str, int], int] = lambda name, number: number, most: int = 0, say: Say = print
    ) -> None:
        self._count, self._most, self._say = count, most, say
        self._own = Counter[tuple[int, int]]()
        self._earlier: Mapping[int, set[str]] | None = None

    def add(self, report: ClaimReport, segment: Path) -> None:
        """Count the skipped utterances of a mini-batch."""
        rank, epoch = report.rank, report.ticket.epoch
        self._own[rank, epoch] += len(report.skipped)
        if self._earlier is None:
            found = segments(segment.parent)
            self._earlier = read_skipped(found[: found.index(segment)])
        total = self._count(f"skipped/{epoch}", len(report.skipped)) + len(self._earlier.get(epoch, ()))
        if total > self._most:
            name, reason = report.skipped[-1]
            raise DataError(
                f"learner {rank}: {total} utterances of epoch {epoch + 1} could not be used, the last one {name} "
                f"({reason}); data.filter.max_skipped allows {self._most}: see the skip events in "
                f"{segment}/learner-*.jsonl, and prepare the data again"
            )

    def end_epoch(self, report: EpochReport, segment: Path) -> None:
        """Say how many utterances a learner has skipped in an epoch."""
        if number := self._own.pop((report.rank, report.epoch), 0):
            listed = f"the skip events in {segment}/learner-{report.rank}.jsonl"
            self._say(f"learner {report.rank} skipped {number} utterances of epoch {report.epoch + 1}: {listed}")

    def forget(self) -> None:
        """Forget the counts of the segment and of the earlier ones, because another segment begins."""
        self._own.clear()
        self._earlier = None


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

    @property
    def saves(self) -> bool:
        return any(observer.saves for observer in self._observers)

    @property
    def records(self) -> bool:
        return any(observer.records for observer in self._observers)

    def on_event(self, rank: int, kind: str, **fields: Any) -> None:
        for observer in self._observers:
            observer.on_event(rank, kind, **fields)

    def on_claim(self, report: ClaimReport) -> None:
        for observer in self._observers:
            observer.on_claim(report)

    def on_step(self, report: StepReport) -> None:
        for observer in self._observers:
            observer.on_step(report)

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
