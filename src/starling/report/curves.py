"""Curves for TensorBoard, one folder for each learner."""

from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from starling.report.meter import EpochEnd, Snapshot


class Curves:
    """Writes one learner's snapshots as event files; the step is that of the whole run."""

    def __init__(self, folder: Path) -> None:
        self._writer = SummaryWriter(str(folder))

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
        """Add where the time went, by epoch (counted from 1)."""
        for name, seconds in (
            ("time/computing", end.computing),
            ("time/waiting_for_data", end.waiting_for_data),
            ("time/waiting_for_peers", end.waiting_for_peers),
        ):
            self._writer.add_scalar(name, end.share(seconds), end.epoch + 1)

    def word_error_rate(self, rate: float, step: int) -> None:
        """Add a word error rate, in per cent, after `step` mini-batches of the run."""
        self._writer.add_scalar("valid/wer", rate, step)

    def close(self) -> None:
        """Write what is still in memory."""
        self._writer.close()
