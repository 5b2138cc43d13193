"""From the reports of single gradients to what people read: means over a stretch of training."""

from dataclasses import dataclass

from starling.engines.job import EpochReport, Spent, StepReport

Seconds = float


@dataclass(frozen=True)
class Snapshot:
    """One learner's training since its last snapshot."""

    rank: int
    world: int
    epoch: int
    batch: int
    """The mini-batch of the epoch that was computed last, from 0, counted over all learners."""
    num_batches: int
    """Mini-batches in the epoch."""
    step: int
    """Mini-batches before that one since the beginning of the run, of all learners."""
    loss: float
    """Mean over the stretch, by frames."""
    num_frames: int
    """Frames in the stretch."""
    running_loss: float
    """Mean over the epoch so far, by frames."""
    learning_rate: float
    audio_rate: float
    """Seconds of audio trained on per second of the engine's clock; 0 when no time has passed."""
    fraction: float
    """The share of the budget that is spent."""
    minutes: float
    """Time since the beginning of the run, on the engine's clock."""

    @property
    def minutes_left(self) -> float | None:
        """What the rest of the budget takes if it goes on like this; None as long as nobody can say."""
        if self.fraction <= 0.0 or self.minutes <= 0.0:
            return None
        return self.minutes * (1.0 - self.fraction) / self.fraction


@dataclass(frozen=True)
class EpochEnd:
    """One learner's part of an epoch, as it is reported to people."""

    rank: int
    world: int
    epoch: int
    num_steps: int
    seconds: Seconds
    computing: Seconds
    waiting_for_data: Seconds
    waiting_for_peers: Seconds

    @classmethod
    def of(cls, report: EpochReport, world: int) -> "EpochEnd":
        spent: Spent = report.spent
        return cls(
            report.rank,
            world,
            report.epoch,
            report.num_steps,
            report.seconds,
            spent.computing,
            spent.waiting_for_data,
            spent.waiting_for_peers,
        )

    def share(self, seconds: Seconds) -> float:
        """`seconds` in per cent of the learner's time in the epoch."""
        return 100.0 * seconds / self.seconds if self.seconds > 0.0 else 0.0


class Meter:
    """Sums up one learner's steps between snapshots."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._last: StepReport | None = None
        self._sum, self._frames, self._audio = 0.0, 0, 0.0
        self._epoch_sum, self._epoch_frames = 0.0, 0
        self._since_minutes: float | None = None

    def add(self, report: StepReport) -> None:
        """Count one gradient."""
        if self._last is None or self._last.ticket.epoch != report.ticket.epoch:
            self._epoch_sum, self._epoch_frames = 0.0, 0
        frames = max(1, report.num_frames)
        self._sum += report.loss * frames
        self._frames += frames
        self._epoch_sum += report.loss * frames
        self._epoch_frames += frames
        if self._since_minutes is None:
            self._since_minutes = report.minutes  # nobody knows when the first batch began: its audio is left out
        else:
            self._audio += report.audio_seconds
        self._last = report

    def take(self) -> Snapshot | None:
        """A snapshot of what was added since the last one; None if nothing was."""
        last = self._last
        if last is None or self._frames == 0:
            return None
        seconds = 60.0 * (last.minutes - (self._since_minutes or 0.0))
        snapshot = Snapshot(
            rank=last.rank,
            world=self._world,
            epoch=last.ticket.epoch,
            batch=last.ticket.index,
            num_batches=last.num_batches,
            step=last.ticket.step,
            loss=self._sum / self._frames,
            num_frames=self._frames,
            running_loss=self._epoch_sum / self._epoch_frames,
            learning_rate=last.learning_rate,
            audio_rate=self._audio / seconds if seconds > 0.0 else 0.0,
            fraction=last.fraction,
            minutes=last.minutes,
        )
        self._sum, self._frames, self._audio = 0.0, 0, 0.0
        self._since_minutes = last.minutes
        return snapshot
