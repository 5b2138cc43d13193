"""The folder of an experiment.

exp/<name>/config.yaml, env.txt     the resolved recipe; versions and machine
exp/<name>/auto.yaml                what `strategy: auto` measured, predicted and chose
exp/<name>/initial/                 tokens, features, and the untrained model
exp/<name>/frames/                  features and alignment of a run whose loss is `frames`
exp/<name>/too_short.tsv            the utterances that CTC cannot align
exp/<name>/log/, tensorboard/       logs and curves of each learner
exp/<name>/checkpoints/             see starling.checkpoint
exp/<name>/best/                    the model that scored best on the validation set, and its score
exp/<name>/validation/              models to be scored during training
exp/<name>/decode/                  hypotheses and errors of scored utterances
exp/<name>/decode/beam/             the same for the beam search, and its language models; see
                                    starling.speech.commands.beam_search
exp/<name>/status.json              the state of the run, for `starling status`
exp/<name>/seen/                    which learner saw which utterance, and when it computed; see
                                    starling.experiment.record
exp/<name>/replay/                  curves of `starling replay --curves`
exp/<name>/report.html              the page of `starling report`
exp/<name>/joins/                   requests for more learners; see starling.launch.joiners
"""

import shutil
from pathlib import Path

from starling.checkpoint.files import sort_key
from starling.errors import ConfigError

SCORE = "score.json"
"""Name of the file beside a model in `best/` that holds its score."""


class ExperimentFolder:
    """The paths inside an experiment's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.environment = path / "env.txt"
        self.auto = path / "auto.yaml"
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
        self.replay = path / "replay"
        self.joins = path / "joins"
        self.status = path / "status.json"
        self.report = path / "report.html"

    def clear(self) -> None:
        """Remove the files of an earlier run; other files in the folder stay, as does a file in place of a folder."""
        for path in {*vars(self).values()} - {self.path}:
            if path.is_dir():
                shutil.rmtree(path)
            elif path.suffix:
                path.unlink(missing_ok=True)


def existing(experiment: Path) -> ExperimentFolder:
    """The folder of an existing experiment. Raises ConfigError if it has no config.yaml."""
    folder = ExperimentFolder(experiment)
    if not folder.config.is_file():
        raise ConfigError(f"{experiment}: no config.yaml here; give an experiment that `starling train` has written")
    return folder


def best_model(folder: ExperimentFolder) -> Path | None:
    """The folder of the model that scored best on the validation set; None if none was scored."""
    found = [path for path in folder.best.glob("step-*") if (path / SCORE).is_file()]
    return max(found, key=lambda path: sort_key(path.name), default=None)
