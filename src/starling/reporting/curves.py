"""Writes curves for TensorBoard, in one folder per learner."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from starling.launch.messages import Progress
from starling.reporting.epochs import by_staleness
from starling.reporting.lines import mean_staleness, share

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

    def __call__(self, progress: Progress) -> None:
        """Add loss, learning rate and throughput; and at the end of an epoch, its time and averaging statistics by
        epoch (counted from 1), and the consensus distance, if known, by step."""
        name, new, work = f"learner-{progress.learner_id}", progress.new, progress.so_far
        if new.frames and progress.learning_rate is not None:
            values = {
                "train/loss": new.loss,
                "train/running_loss": work.loss,
                "train/learning_rate": progress.learning_rate,
                "train/audio_seconds_per_second": new.audio_rate,
            }
            self.add(name, values, new.step)
        if progress.ended_at is None:
            return
        values = {
            "time/computing": share(work, "computing"),
            "time/waiting_for_data": share(work, "waiting_for_data"),
            "time/waiting_for_peers": share(work, "waiting_for_peers"),
            "averaging/rounds_per_gradient": work.rounds / work.batches if work.batches else 0.0,
            "averaging/megabytes_sent": work.bytes_sent / 1e6,
            "averaging/mean_staleness": mean_staleness(work.staleness),
        }
        self.add(name, values, progress.epoch + 1)
        if any(counts := by_staleness(work.staleness)) and (writer := self._writer(name)) is not None:
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
                global_step=progress.epoch + 1,
            )
        if progress.consensus_distance is not None:
            self.add(name, {"consensus/distance": progress.consensus_distance}, progress.ended_at)

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
