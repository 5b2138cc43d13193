"""The folder of an experiment.

exp/<name>/config.yaml, env.txt     the resolved recipe, and on what it ran
exp/<name>/initial/                 tokens and features, and the model before training
exp/<name>/frames/                  features and alignment of a run whose loss is `frames`
exp/<name>/log/, tensorboard/       of each learner
exp/<name>/checkpoints/             see starling.checkpoint
exp/<name>/best/                    the model that scored best on the valid set, and its score
exp/<name>/validation/              models on their way to be scored, while a run trains
exp/<name>/decode/                  what was recognised, and its errors
exp/<name>/status.json              how it does, for `starling status`
exp/<name>/seen/                    which learner saw which utterance; see starling.runs.experiment.seen
exp/<name>/joins/                   requests for more learners; see starling.launch.requests
"""

from pathlib import Path

from starling.errors import ConfigError


class ExperimentFolder:
    """The places inside an experiment's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.environment = path / "env.txt"
        self.initial = path / "initial"
        self.too_short = path / "too_short.tsv"
        self.frames = path / "frames"
        self.log = path / "log"
        self.tensorboard = path / "tensorboard"
        self.checkpoints = path / "checkpoints"
        self.best = path / "best"
        self.validation = path / "validation"
        self.decode = path / "decode"
        self.seen = path / "seen"
        self.joins = path / "joins"
        self.status = path / "status.json"


def existing(experiment: Path) -> ExperimentFolder:
    """The folder of an experiment that has begun. Raises ConfigError when it holds no recipe."""
    folder = ExperimentFolder(experiment)
    if not folder.config.is_file():
        raise ConfigError(f"{experiment}: no config.yaml here; give an experiment that `starling train` has written")
    return folder
