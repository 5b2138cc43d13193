"""What learners keep of the end of an epoch: a checkpoint, a model for the launcher to score, or nothing."""

from collections.abc import Callable

from starling.checkpoint.writer import CheckpointWriter, WriteModel
from starling.runs.experiment.folder import ExperimentFolder
from starling.runs.observers import Keep
from starling.training.job import EpochReport


class Choice:
    """What learners keep of the end of an epoch: a checkpoint after every `checkpoints` epochs and when the run ends;
    otherwise a model to score after every `validate` epochs, if the launcher waits for one; None for never.

    The first learner there looks whether it does; `agree` tells its answer to the others.
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
    """Writes models to be scored, which stay until the launcher has done so."""
    return CheckpointWriter(folder.validation, arrive, write_model, {}, keep=1000, sync_group_size=sync_group_size)
