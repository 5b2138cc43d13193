"""What learners save at the end of an epoch: a checkpoint, a model for the launcher to score, or nothing."""

from collections.abc import Callable

from starling.checkpoint.writer import CheckpointWriter, WriteModel
from starling.experiment.folder import ExperimentFolder
from starling.experiment.observers import Keep
from starling.training.job import EpochReport


class SaveChoice:
    """Chooses what learners save at the end of an epoch.

    A checkpoint every `checkpoints` epochs and at the end of the run; otherwise a model to score every `validate`
    epochs, if the launcher is waiting for one. None means never. The first learner to reach the end of the epoch checks
    whether the launcher is waiting; `agree` passes its answer to the others.
    """

    def __init__(
        self,
        checkpoints: int | None,
        validate: int | None,
        folder: ExperimentFolder,
        agree: Callable[[str, str], str],
    ) -> None:
        self._checkpoints = checkpoints
        self._validate = validate
        self._folder = folder
        self._agree = agree

    def __call__(self, report: EpochReport) -> Keep:
        num_ended = report.epoch + 1
        if report.is_last or (self._checkpoints is not None and num_ended % self._checkpoints == 0):
            return "checkpoint"
        if self._validate is None or num_ended % self._validate != 0:
            return ""
        return "model" if self._agree(f"validate/{num_ended}", self._own_answer()) == "yes" else ""

    def _own_answer(self) -> str:
        folder = self._folder.validation
        return "no" if folder.is_dir() and any(folder.iterdir()) else "yes"


def model_writer(
    folder: ExperimentFolder, arrive: Callable[[str], int], write_model: WriteModel, sync_group_size: int
) -> CheckpointWriter:
    """Makes the writer of models for scoring. It removes none: the launcher does so after scoring."""
    return CheckpointWriter(folder.validation, arrive, write_model, {}, keep=1000, sync_group_size=sync_group_size)
