"""Computes snapshots and epoch statistics from the reports of single gradients."""

import math
from collections.abc import Mapping

from starling.launch.messages import EpochEnd, Snapshot
from starling.training.job import EpochReport, StepReport

FAR = 255
"""The index of the last entry of `EpochEnd.staleness`, which counts this and any larger staleness."""


def _counts(staleness: Mapping[int, int]) -> tuple[int, ...]:
    """The number of gradients with a staleness of 0, 1, 2, … up to the largest one, at most `FAR`."""
    counts = [0] * (1 + min(FAR, max(staleness, default=-1)))
    for value, count in staleness.items():
        counts[min(value, FAR)] += count
    return tuple(counts)


class Meter:
    """Sums up one learner's steps between snapshots."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._last: StepReport | None = None
        self._sum, self._frames, self._audio = 0.0, 0, 0.0
        self._examples = 0
        self._epoch_sum, self._epoch_frames = 0.0, 0
        self._since_minutes: float | None = None

    def add(self, report: StepReport) -> None:
        """Count one gradient."""
        if self._last is None or self._last.ticket.epoch != report.ticket.epoch:
            self._epoch_sum, self._epoch_frames = 0.0, 0
        frames = max(1, report.num_frames) if math.isfinite(report.loss) else 0
        loss = report.loss if frames else 0.0  # a loss that is not finite is excluded, and counted elsewhere
        self._sum += loss * frames
        self._frames += frames
        self._examples += report.num_examples
        self._epoch_sum += loss * frames
        self._epoch_frames += frames
        if self._since_minutes is None:
            self._since_minutes = report.minutes  # the first batch has no known start: its audio is not counted
        else:
            self._audio += report.audio_seconds
        self._last = report

    def take(self) -> Snapshot | None:
        """A snapshot of the gradients since the previous one; None if there was no finite loss."""
        last = self._last
        if last is None or self._frames == 0:
            return None
        seconds = 60.0 * (last.minutes - (self._since_minutes or 0.0))
        snapshot = Snapshot(
            learner_id=last.rank,
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
            num_examples=self._examples,
            computing=last.spent.computing,
            waiting_for_data=last.spent.waiting_for_data,
            waiting_for_peers=last.spent.waiting_for_peers,
        )
        self._sum, self._frames, self._audio = 0.0, 0, 0.0
        self._examples = 0
        self._since_minutes = last.minutes
        return snapshot

    def end_epoch(self, report: EpochReport, step: int) -> EpochEnd:
        """The learner's statistics of an epoch that ended after `step` mini-batches of all learners."""
        spent, averaging, last = report.spent, report.averaging, self._last
        num_gradients = averaging.staleness.total()
        summed = sum(staleness * count for staleness, count in averaging.staleness.items())
        has_loss = last is not None and last.ticket.epoch == report.epoch and self._epoch_frames > 0
        return EpochEnd(
            learner_id=report.rank,
            world=self._world,
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
            loss=self._epoch_sum / self._epoch_frames if has_loss else None,
            num_frames=self._epoch_frames if has_loss else 0,
            learning_rate=last.learning_rate if last is not None else None,
        )
