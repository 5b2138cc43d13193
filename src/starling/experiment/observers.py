"""Observers that pass a learner's reports to its log, its curves, its checkpoints, and the launcher."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Literal, Protocol, Self, TextIO

from starling.checkpoint.background import BackgroundWriter
from starling.checkpoint.reader import Checkpoint
from starling.checkpoint.state import LearnerState
from starling.checkpoint.writer import CheckpointWriter
from starling.launch.messages import EpochEnd, LearnerMessage, ModelSaved, Said, Saved, Snapshot
from starling.reporting.curves import Curves
from starling.reporting.epochs import Meter
from starling.reporting.lines import advice, advice_line, epoch_line, progress_line
from starling.reporting.progress import Display
from starling.training.job import ClaimReport, EpochReport, Observer, Silence, StepReport
from starling.workload import Position


class Listener(Protocol):
    """Receives snapshots and epoch statistics of learners."""

    def progress(self, snapshot: Snapshot) -> None: ...

    def epoch(self, end: EpochEnd) -> None: ...


class Metered(Silence):
    """An observer that sends its listener at most one snapshot every `every` seconds, and statistics of each epoch."""

    def __init__(self, listener: Listener, world: int, every: float, clock: Callable[[], float] = time.monotonic):
        self._listener = listener
        self._world = world
        self._every = every
        self._clock = clock
        self._meters: dict[int, Meter] = {}
        self._passed_on: dict[int, float] = {}

    def on_step(self, report: StepReport) -> None:
        self._meter(report.rank).add(report)
        if self._clock() - self._passed_on.get(report.rank, -self._every) >= self._every:
            self._pass_on(report.rank)

    def on_epoch(self, report: EpochReport, state: LearnerState) -> None:
        self._pass_on(report.rank)
        self._listener.epoch(self._meter(report.rank).end_epoch(report, state.position.num_done))

    def _meter(self, rank: int) -> Meter:
        return self._meters.setdefault(rank, Meter(self._world))

    def _pass_on(self, rank: int) -> None:
        snapshot = self._meter(rank).take()
        if snapshot is not None:
            self._listener.progress(snapshot)
            self._passed_on[rank] = self._clock()


class Log:
    """A listener that writes lines to a text stream, and each piece of advice once."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._advised: set[str] = set()

    def progress(self, snapshot: Snapshot) -> None:
        self._write(progress_line(snapshot))

    def epoch(self, end: EpochEnd) -> None:
        self._write(epoch_line(end))
        what = advice(end)
        if what is not None and what not in self._advised:
            self._advised.add(what)
            self._write(advice_line(end, what))

    def _write(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()


class Messages:
    """A listener that sends everything to the launcher, which shows it with `show`."""

    def __init__(self, send: Callable[[LearnerMessage], None]) -> None:
        self._send = send

    def progress(self, snapshot: Snapshot) -> None:
        self._send(snapshot)

    def epoch(self, end: EpochEnd) -> None:
        self._send(end)


def show(message: LearnerMessage, display: Display) -> None:
    """Show a learner's message, if it is of a kind that is displayed."""
    match message:
        case Snapshot():
            display.progress(message)
        case EpochEnd():
            display.epoch(message)
        case Said():
            display.say(message.line)
        case Saved():
            display.saved(message)
        case _:
            pass


Keep = Literal["checkpoint", "model", ""]
"""What is saved at the end of an epoch; `""`: nothing."""
Moment = Literal["epoch", "barrier", "end"]


def keep_everything(report: EpochReport) -> Keep:
    """Choose a checkpoint at the end of every epoch."""
    return "checkpoint"


class Saver(Silence):
    """An observer that saves in a background thread.

    It saves a checkpoint at every checkpoint barrier. At the end of an epoch, `choose` selects what is saved, the same
    on all learners; for `model`, `model_writer` saves only what the consensus model is computed from. The learner that
    completes either one reports it with `tell`, and adds the consensus distance to curves of `make_curves`. Each point
    is a new file, because any learner may be the one that completes.

    The context manager waits for unfinished saves when it exits, even if training has failed.
    """

    def __init__(
        self,
        writer: CheckpointWriter,
        tell: Callable[[LearnerMessage], None],
        make_curves: Callable[[], Curves],
        choose: Callable[[EpochReport], Keep] = keep_everything,
        model_writer: CheckpointWriter | None = None,
    ) -> None:
        self._background = BackgroundWriter(writer)
        self._choose = choose
        self._model_writer = model_writer
        self._tell = tell
        self._make_curves = make_curves
        self._last: Position | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception as own:
            if error is None:
                raise
            error.add_note(f"the last checkpoint was not written either: {own}")

    def close(self) -> None:
        """Wait for unfinished saves. Raises CheckpointError if one failed."""
        self._last = None  # the next membership may save at the same position, as partial checkpoints are dropped
        self._background.close()

    def on_step(self, report: StepReport) -> None:
        self._background.check()

    def on_epoch(self, report: EpochReport, state: LearnerState) -> None:
        kept = self._choose(report)
        if kept == "checkpoint":
            self._save(state, "end" if report.is_last else "epoch")
        elif kept == "model":
            self._save_model(state)

    def on_barrier(self, state: LearnerState) -> None:
        self._save(state, "barrier")

    def _save(self, state: LearnerState, moment: Moment) -> None:
        if state.position == self._last:
            return  # several epochs ended at this position
        self._last = state.position
        self._background.save(state, lambda checkpoint: self._completed(checkpoint, moment))

    def _save_model(self, state: LearnerState) -> None:
        if state.position == self._last:
            return
        self._last = state.position
        shards = tuple(replace(shard, optimizer={}) for shard in state.shards)
        slim = replace(state, optimizer={}, shards=shards)
        self._background.save(slim, self._completed_model, self._model_writer)

    def _completed(self, checkpoint: Checkpoint, moment: Moment) -> None:
        self._tell(Saved(str(checkpoint.folder), moment, checkpoint.manifest.consensus_distance))
        self._draw(checkpoint)

    def _completed_model(self, checkpoint: Checkpoint) -> None:
        self._tell(ModelSaved(str(checkpoint.folder)))
        self._draw(checkpoint)

    def _draw(self, checkpoint: Checkpoint) -> None:
        distance = checkpoint.manifest.consensus_distance
        if distance is not None:
            curves = self._make_curves()
            curves.consensus_distance(distance, checkpoint.manifest.position.num_done)
            curves.close()


class CurvesByRank:
    """A listener that writes the curves of each learner."""

    def __init__(self, make: Callable[[int], Curves]) -> None:
        self._make = make
        self._curves: dict[int, Curves] = {}

    def progress(self, snapshot: Snapshot) -> None:
        self._of(snapshot.learner_id).progress(snapshot)

    def epoch(self, end: EpochEnd) -> None:
        self._of(end.learner_id).epoch(end)

    def close(self) -> None:
        """Flush and close the files."""
        for curves in self._curves.values():
            curves.close()

    def _of(self, learner_id: int) -> Curves:
        if learner_id not in self._curves:
            self._curves[learner_id] = self._make(learner_id)
        return self._curves[learner_id]


class Together(Silence):
    """Calls several observers in order."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers

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
