"""Observers that pass a learner's reports to its log, its curves, its checkpoints, and the launcher."""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, TextIO

from starling.checkpoint.reader import Checkpoint
from starling.checkpoint.state import LearnerState
from starling.checkpoint.writer import BackgroundWriter, CheckpointWriter
from starling.experiment.folder import ExperimentFolder
from starling.experiment.seen import Record
from starling.launch.messages import EpochEnd, LearnerMessage, ModelSaved, Said, Saved, Snapshot
from starling.reporting.curves import Curves
from starling.reporting.epochs import Meter
from starling.reporting.lines import Advice, epoch_line, progress_line
from starling.reporting.progress import Display
from starling.training.job import ClaimReport, EpochReport, Observer, Silence, StepReport
from starling.workload import Position

Listener = Callable[[Snapshot | EpochEnd], None]
Seconds = float


class Metered(Silence):
    """An observer that sends a listener statistics of each epoch, and between them, of each learner, at most one
    snapshot in `every` seconds."""

    def __init__(
        self, listener: Listener, every: Seconds, world: int, clock: Callable[[], Seconds] = time.monotonic
    ) -> None:
        self._listener, self._every, self._clock = listener, every, clock
        self._meters = defaultdict[int, Meter](partial(Meter, world))
        self._due: dict[int, Seconds] = {}

    def on_step(self, report: StepReport) -> None:
        self._meters[report.rank].add(report)
        now = self._clock()
        if now >= self._due.get(report.rank, now):
            self._pass_on(report.rank)

    def on_epoch(self, report: EpochReport, state: LearnerState) -> None:
        self._pass_on(report.rank)
        self._listener(self._meters[report.rank].end_epoch(report, state.position.num_done))

    def _pass_on(self, rank: int) -> None:
        if (snapshot := self._meters[rank].take()) is not None:
            self._listener(snapshot)
            self._due[rank] = self._clock() + self._every


class Log:
    """A listener that writes lines to a text stream, and each piece of advice once."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._advice = Advice()

    def __call__(self, message: Snapshot | EpochEnd) -> None:
        if isinstance(message, Snapshot):
            self._write(progress_line(message))
            return
        self._write(epoch_line(message))
        if line := self._advice.line(message):
            self._write(line)

    def _write(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()


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


class Saver(Silence):
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
        """What is saved at the ends of epochs whose states are not complete yet."""

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
                curves = Curves(self._curves)
                curves.add("consensus", {"consensus/distance": distance}, manifest.position.num_done)
                curves.close()

        self._background.save(state, completed, self._model_writer if is_model else None)


class Together(Silence):
    """Calls several observers in order."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers
        # at each mini-batch, only those that do something
        silent = (Silence.on_claim, Silence.on_step, Record.on_claim, Record.on_step)
        self._on_claim = [each.on_claim for each in observers if type(each).on_claim not in silent]
        self._on_step = [each.on_step for each in observers if type(each).on_step not in silent]

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
    """Makes the function that chooses what learners save at the end of an epoch.

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
