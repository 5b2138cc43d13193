"""Writes curves for TensorBoard, in one folder per learner."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from starling.launch.messages import EpochEnd, Snapshot
from starling.reporting.lines import rounds_per_gradient, share

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class Curves:
    """A listener that writes what learners report as event files, each learner's in a folder of its own inside
    `folder`. Steps count the mini-batches of the whole run.

    Writes nothing if TensorBoard is not installed; the extra `speech` installs it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writers: dict[str, SummaryWriter] = {}

    def __call__(self, message: Snapshot | EpochEnd) -> None:
        """Add loss, learning rate and throughput; or an epoch's time and averaging statistics by epoch (counted from
        1), and the consensus distance, if known, by step."""
        name = f"learner-{message.learner_id}"
        if isinstance(message, Snapshot):
            values = {
                "train/loss": message.loss,
                "train/running_loss": message.running_loss,
                "train/learning_rate": message.learning_rate,
                "train/audio_seconds_per_second": message.audio_rate,
            }
            self.add(name, values, message.step)
            return
        values = {
            "time/computing": share(message, "computing"),
            "time/waiting_for_data": share(message, "waiting_for_data"),
            "time/waiting_for_peers": share(message, "waiting_for_peers"),
            "averaging/rounds_per_gradient": rounds_per_gradient(message),
            "averaging/megabytes_sent": message.bytes_sent / 1e6,
            "averaging/mean_staleness": message.mean_staleness,
        }
        self.add(name, values, message.epoch + 1)
        if any(counts := message.staleness) and (writer := self._writer(name)) is not None:
            present = [value for value, count in enumerate(counts) if count]
            writer.add_histogram_raw(
                "averaging/staleness",
                min=present[0] - 0.5,
                max=present[-1] + 0.5,
                num=sum(counts),
                sum=sum(value * count for value, count in enumerate(counts)),
                sum_squares=sum(value * value * count for value, count in enumerate(counts)),
                bucket_limits=[value + 0.5 for value in range(len(counts))],  # each of width 1, around an integer
                bucket_counts=list(counts),
                global_step=message.epoch + 1,
            )
        if message.consensus_distance is not None:
            self.add(name, {"consensus/distance": message.consensus_distance}, message.step)

    def add(self, name: str, values: Mapping[str, float], step: int) -> None:
        """Add a point to each of the curves in the folder `name`."""
        if (writer := self._writer(name)) is not None:
            for curve, value in values.items():
                writer.add_scalar(curve, value, step)

    def close(self) -> None:
        """Flush and close the files."""
        for writer in self._writers.values():
            writer.close()

    def _writer(self, name: str) -> "SummaryWriter | None":
        if name not in self._writers:
            try:
                from torch.utils import tensorboard  # imported here, because it takes 0.3 s
            except ModuleNotFoundError:
                return None
            self._writers[name] = tensorboard.SummaryWriter(str(self._folder / name))
        return self._writers[name]
