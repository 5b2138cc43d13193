"""Who listens to a learner: its log, its curves, its checkpoints, and the launcher."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from types import TracebackType
from typing import Any, Literal, Protocol, Self, TextIO

from starling.checkpoint.background import BackgroundWriter
from starling.checkpoint.reader import Checkpoint
from starling.checkpoint.state import LearnerState
from starling.checkpoint.writer import CheckpointWriter
from starling.errors import ProtocolError
from starling.report.curves import Curves
from starling.report.lines import epoch_line, progress_line
from starling.report.meter import EpochEnd, Meter, Snapshot
from starling.report.progress import Display
from starling.training.job import EpochReport, Observer, StepReport
from starling.workload import Position

Message = dict[str, Any]
SEND_EVERY = 0.2  # seconds between two messages to the launcher
CURVES_EVERY = 1.0
LOG_EVERY = 5.0


class Listener(Protocol):
    """Who wants snapshots of a learner, now and then."""

    def progress(self, snapshot: Snapshot) -> None: ...

    def epoch(self, end: EpochEnd) -> None: ...


class Metered:
    """An observer that passes on snapshots at most every so many seconds, and at the end of an epoch."""

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
        self._listener.epoch(EpochEnd.of(report, self._world, state.position.num_done))

    def on_mark(self, state: LearnerState) -> None: ...

    def _meter(self, rank: int) -> Meter:
        return self._meters.setdefault(rank, Meter(self._world))

    def _pass_on(self, rank: int) -> None:
        snapshot = self._meter(rank).take()
        if snapshot is not None:
            self._listener.progress(snapshot)
            self._passed_on[rank] = self._clock()


class Log:
    """Writes lines to a text stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def progress(self, snapshot: Snapshot) -> None:
        self._write(progress_line(snapshot))

    def epoch(self, end: EpochEnd) -> None:
        self._write(epoch_line(end))

    def _write(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()


class Messages:
    """Sends what the launcher shows; `show` is its other end."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send

    def progress(self, snapshot: Snapshot) -> None:
        doing = f"computing batch {snapshot.batch + 1} of epoch {snapshot.epoch + 1}"
        self._send({"doing": doing, "progress": asdict(snapshot)})

    def epoch(self, end: EpochEnd) -> None:
        self._send({"doing": f"saving after epoch {end.epoch + 1}", "epoch": asdict(end)})


def show(message: Message, display: Display) -> None:
    """Show a message of a learner."""
    try:
        if "progress" in message:
            display.progress(Snapshot(**message["progress"]))
        if "epoch" in message:
            display.epoch(EpochEnd(**message["epoch"]))
        if "say" in message:
            display.say(message["say"])
        if "saved" in message:
            display.say(_saved_line(message["saved"], message.get("consensus_distance")))
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"a learner sent what this version does not understand: {error}") from error


def _saved_line(folder: str, distance: float | None) -> str:
    return f"saved {folder}" if distance is None else f"saved {folder}, consensus distance {distance:.3g}"


Keep = Literal["checkpoint", "model", ""]
"""What is kept of the end of an epoch."""


def keep_everything(report: EpochReport) -> Keep:
    """A checkpoint at every end of an epoch."""
    return "checkpoint"


class Saver:
    """Writes checkpoints behind the training: at every mark, and at the ends of epochs where `choose` says so, the same
    to all learners. Where it says `model`, `model_writer` writes what the consensus model is made from, and no more.
    Who completes either tells, and draws the consensus distance with the curves that `make_curves` makes: a new file
    for each point, for they may come from any learner. Both happen in a thread of their own.

    As a context manager it lets what was begun end, also when the training has failed.
    """

    def __init__(
        self,
        writer: CheckpointWriter,
        tell: Callable[[Message], None],
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
            error.add_note(f"and the last checkpoint was not written: {own}")

    def close(self) -> None:
        """Wait until all is written. Raises CheckpointError for what could not be."""
        self._last = None  # others may be there when it goes on, and a checkpoint that not all have written be gone
        self._background.close()

    def on_step(self, report: StepReport) -> None:
        self._background.check()

    def on_epoch(self, report: EpochReport, state: LearnerState) -> None:
        kept = self._choose(report)
        if kept == "checkpoint":
            self._save(state, "end" if report.is_last else "epoch")
        elif kept == "model":
            self._save_model(state)

    def on_mark(self, state: LearnerState) -> None:
        self._save(state, "mark")

    def _save(self, state: LearnerState, moment: str) -> None:
        if state.position == self._last:
            return  # several epochs ended at once
        self._last = state.position
        self._background.save(state, lambda checkpoint: self._completed(checkpoint, moment))

    def _save_model(self, state: LearnerState) -> None:
        if state.position == self._last:
            return
        self._last = state.position
        shards = tuple(replace(shard, optimizer={}) for shard in state.shards)
        slim = replace(state, optimizer={}, shards=shards)
        self._background.save(slim, self._completed_model, self._model_writer)

    def _completed(self, checkpoint: Checkpoint, moment: str) -> None:
        distance = checkpoint.manifest.consensus_distance
        self._tell({"saved": str(checkpoint.folder), "consensus_distance": distance, "moment": moment})
        self._draw(checkpoint)

    def _completed_model(self, checkpoint: Checkpoint) -> None:
        self._tell({"to_validate": str(checkpoint.folder)})
        self._draw(checkpoint)

    def _draw(self, checkpoint: Checkpoint) -> None:
        distance = checkpoint.manifest.consensus_distance
        if distance is not None:
            curves = self._make_curves()
            curves.consensus_distance(distance, checkpoint.manifest.position.num_done)
            curves.close()


class CurvesByRank:
    """A listener that writes the curves of every learner it hears of."""

    def __init__(self, make: Callable[[int], Curves]) -> None:
        self._make = make
        self._curves: dict[int, Curves] = {}

    def progress(self, snapshot: Snapshot) -> None:
        self._of(snapshot.rank).progress(snapshot)

    def epoch(self, end: EpochEnd) -> None:
        self._of(end.rank).epoch(end)

    def close(self) -> None:
        """Write what is still in memory."""
        for curves in self._curves.values():
            curves.close()

    def _of(self, rank: int) -> Curves:
        if rank not in self._curves:
            self._curves[rank] = self._make(rank)
        return self._curves[rank]


class Together:
    """Several observers, asked in their order."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers

    def on_step(self, report: StepReport) -> None:
        for observer in self._observers:
            observer.on_step(report)

    def on_epoch(self, report: EpochReport, state: LearnerState) -> None:
        for observer in self._observers:
            observer.on_epoch(report, state)

    def on_mark(self, state: LearnerState) -> None:
        for observer in self._observers:
            observer.on_mark(state)
