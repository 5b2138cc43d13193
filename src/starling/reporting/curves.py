"""Writes curves for TensorBoard, in one folder per learner."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from starling.launch.messages import EpochEnd, Snapshot
from starling.reporting.lines import rounds_per_gradient, share

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class Curves:
    """Writes one learner's snapshots as event files. Steps count the mini-batches of the whole run.

    Writes nothing if TensorBoard is not installed; the extra `speech` installs it.
    """

    def __init__(self, folder: Path) -> None:
        self._writer: SummaryWriter | None = None
        try:
            from torch.utils import tensorboard  # imported here, because it takes 0.3 s
        except ModuleNotFoundError:
            return
        self._writer = tensorboard.SummaryWriter(str(folder))

    def progress(self, snapshot: Snapshot) -> None:
        """Add loss, learning rate and throughput."""
        values = {
            "train/loss": snapshot.loss,
            "train/running_loss": snapshot.running_loss,
            "train/learning_rate": snapshot.learning_rate,
            "train/audio_seconds_per_second": snapshot.audio_rate,
        }
        self._add(values, snapshot.step)

    def epoch(self, end: EpochEnd) -> None:
        """Add an epoch's time and averaging statistics by epoch (counted from 1), and the consensus distance, if known,
        by step."""
        values = {
            "time/computing": share(end, "computing"),
            "time/waiting_for_data": share(end, "waiting_for_data"),
            "time/waiting_for_peers": share(end, "waiting_for_peers"),
            "averaging/rounds_per_gradient": rounds_per_gradient(end),
            "averaging/megabytes_sent": end.bytes_sent / 1e6,
            "averaging/mean_staleness": end.mean_staleness,
        }
        self._add(values, end.epoch + 1)
        if any(end.staleness):
            self._staleness(end.staleness, end.epoch + 1)
        if end.consensus_distance is not None:
            self.consensus_distance(end.consensus_distance, end.step)

    def consensus_distance(self, distance: float, step: int) -> None:
        """Add a consensus distance after `step` mini-batches of the run."""
        self._add({"consensus/distance": distance}, step)

    def word_error_rate(self, rate: float, step: int) -> None:
        """Add a word error rate in per cent, after `step` mini-batches of the run."""
        self._add({"valid/wer": rate}, step)

    def _add(self, values: Mapping[str, float], step: int) -> None:
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)

    def _staleness(self, counts: Sequence[int], epoch: int) -> None:
        """Add a histogram with a bucket of width 1 around each integer."""
        if self._writer is None:
            return
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
        if self._writer is not None:
            self._writer.close()
