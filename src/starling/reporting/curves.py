"""Writes curves for TensorBoard, in one folder per learner."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from starling.launch.messages import EpochEnd, Snapshot

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class Curves:
    """Writes one learner's snapshots as event files. Steps count the mini-batches of the whole run.

    Writes nothing if TensorBoard is not installed; the extra `speech` installs it.
    """

    def __init__(self, folder: Path) -> None:
        self._writer = _writer(folder)

    def progress(self, snapshot: Snapshot) -> None:
        """Add loss, learning rate and throughput."""
        for name, value in (
            ("train/loss", snapshot.loss),
            ("train/running_loss", snapshot.running_loss),
            ("train/learning_rate", snapshot.learning_rate),
            ("train/audio_seconds_per_second", snapshot.audio_rate),
        ):
            self._writer.add_scalar(name, value, snapshot.step)

    def epoch(self, end: EpochEnd) -> None:
        """Add an epoch's time and averaging statistics by epoch (counted from 1), and the consensus distance, if known,
        by step."""
        for name, seconds in (
            ("time/computing", end.computing),
            ("time/waiting_for_data", end.waiting_for_data),
            ("time/waiting_for_peers", end.waiting_for_peers),
        ):
            self._writer.add_scalar(name, end.share(seconds), end.epoch + 1)
        for name, value in (
            ("averaging/rounds_per_gradient", end.rounds_per_gradient),
            ("averaging/megabytes_sent", end.bytes_sent / 1e6),
            ("averaging/mean_staleness", end.mean_staleness),
        ):
            self._writer.add_scalar(name, value, end.epoch + 1)
        if any(end.staleness):
            self._staleness(end.staleness, end.epoch + 1)
        if end.consensus_distance is not None:
            self.consensus_distance(end.consensus_distance, end.step)

    def consensus_distance(self, distance: float, step: int) -> None:
        """Add a consensus distance after `step` mini-batches of the run."""
        self._writer.add_scalar("consensus/distance", distance, step)

    def word_error_rate(self, rate: float, step: int) -> None:
        """Add a word error rate in per cent, after `step` mini-batches of the run."""
        self._writer.add_scalar("valid/wer", rate, step)

    def _staleness(self, counts: Sequence[int], epoch: int) -> None:
        """Add a histogram with a bucket of width 1 around each integer."""
        present = [value for value, count in enumerate(counts) if count]
        self._writer.add_histogram_raw(
            "averaging/staleness",
            min=present[0] - 0.5,
            max=present[-1] + 0.5,
            num=sum(counts),
            sum=sum(value * count for value, count in enumerate(counts)),
            sum_squares=sum(value * value * count for value, count in enumerate(counts)),
            bucket_limits=[value + 0.5 for value in range(len(counts))],
            bucket_counts=list(counts),
            global_step=epoch,
        )

    def close(self) -> None:
        """Flush and close the files."""
        self._writer.close()


class _NoWriter:
    """Replaces `SummaryWriter` if TensorBoard is not installed."""

    def add_scalar(self, *what: object) -> None: ...

    def add_histogram_raw(self, *what: object, **how: object) -> None: ...

    def close(self) -> None: ...


def _writer(folder: Path) -> SummaryWriter | _NoWriter:
    try:
        from torch.utils.tensorboard import SummaryWriter  # imported here, because it takes 0.3 s
    except ModuleNotFoundError:
        return _NoWriter()
    return SummaryWriter(str(folder))
