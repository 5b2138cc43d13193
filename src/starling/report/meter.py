"""From the reports of single gradients to what people read: means over a stretch of training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starling.training.job import EpochReport, StepReport


Seconds = float
FAR = 255
"""Staleness from here on is counted together, in the last place of `EpochEnd.staleness`."""


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
    """One learner's part of an epoch, as it is reported to people; all of it can be sent as JSON."""

    rank: int
    world: int
    epoch: int
    num_steps: int
    seconds: Seconds
    computing: Seconds
    waiting_for_data: Seconds
    waiting_for_peers: Seconds
    step: int = 0
    """Mini-batches of the run before the epoch's end, of all learners."""
    num_rounds: int = 0
    """Averaging rounds of the epoch."""
    bytes_sent: int = 0
    """To other learners."""
    staleness: Sequence[int] = ()
    """How many gradients had a staleness of 0, 1, 2, …; the place `FAR` counts all of at least that."""
    mean_staleness: float = 0.0
    largest_staleness: int = 0
    consensus_distance: float | None = None
    """(1/L) sum_l |w_l - mean|^2 at the epoch's end, where it is known."""
    num_not_finite: int = 0
    """Gradients that were left out because they were not finite."""

    @classmethod
    def of(cls, report: EpochReport, world: int, step: int) -> EpochEnd:
        """Of a report at the end of an epoch, `step` mini-batches of all learners after the beginning of the run."""
        spent, averaging = report.spent, report.averaging
        num_gradients = averaging.staleness.total()
        summed = sum(staleness * count for staleness, count in averaging.staleness.items())
        return cls(
            rank=report.rank,
            world=world,
            epoch=report.epoch,
            num_steps=report.num_steps,
            seconds=report.seconds,
            computing=spent.computing,
            waiting_for_data=spent.waiting_for_data,
            waiting_for_peers=spent.waiting_for_peers,
            step=step,
            num_rounds=averaging.rounds,
            bytes_sent=averaging.bytes_sent,
            staleness=_counts(averaging.staleness),
            mean_staleness=summed / num_gradients if num_gradients else 0.0,
            largest_staleness=max(averaging.staleness, default=0),
            consensus_distance=report.consensus_distance,
            num_not_finite=report.num_not_finite,
        )

    @property
    def rounds_per_gradient(self) -> float:
        """Averaging rounds for each gradient; 0 without a gradient."""
        return self.num_rounds / self.num_steps if self.num_steps else 0.0

    def share(self, seconds: Seconds) -> float:
        """`seconds` in per cent of the learner's time in the epoch."""
        return 100.0 * seconds / self.seconds if self.seconds > 0.0 else 0.0


def _counts(staleness: Mapping[int, int]) -> list[int]:
    """Counts in places 0, 1, 2, … up to the last that is not 0, at most `FAR`."""
    counts = [0] * (1 + min(FAR, max(staleness, default=-1)))
    for value, count in staleness.items():
        counts[min(value, FAR)] += count
    return counts


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
        frames = max(1, report.num_frames) if math.isfinite(report.loss) else 0
        loss = report.loss if frames else 0.0  # what is not finite does nothing, and is counted by itself
        self._sum += loss * frames
        self._frames += frames
        self._epoch_sum += loss * frames
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
