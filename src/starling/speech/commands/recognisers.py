"""The recogniser of an experiment: its newest model, the mean of several, or the best."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch

from starling.checkpoint.reader import checkpoints_in, latest, load
from starling.errors import CheckpointError
from starling.experiment.cores import cores_here
from starling.experiment.folder import ExperimentFolder, best_model, existing
from starling.recipe.file import read_recipe
from starling.speech.recogniser import Recogniser

if TYPE_CHECKING:
    from starling.speech.recipe import Recipe


def open_experiment(experiment: Path) -> tuple[ExperimentFolder, "Recipe"]:
    """The folder of an experiment, and its recipe. Raises ConfigError if it is none."""
    from starling.speech.recipe import load_resolved

    folder = existing(experiment)
    return folder, load_resolved(folder.config)


@dataclass(frozen=True)
class Use:
    """What a recipe says about using its model."""

    loss: str
    average: int
    device: str
    threads: int | None

    @classmethod
    def of(cls, recipe: "Recipe") -> Self:
        """That of a checked recipe."""
        return cls(recipe.loss, recipe.average, recipe.engine.device, recipe.engine.threads)

    @classmethod
    def read(cls, experiment: Path) -> Self:
        """That of an experiment. The rest of its recipe is not checked, which would take a quarter of a second.

        Raises ConfigError if it is no experiment.
        """
        earlier = {"loss": "ctc", "average": 1}  # keys that the first recipes of this format did not have
        match earlier | read_recipe(existing(experiment).config):
            case {
                "format": int(),
                "loss": str(loss),
                "average": int(average),
                "engine": {"device": str(device), "threads": int() | None as threads},
            }:
                return cls(loss, average, device, threads)
        return cls.of(open_experiment(experiment)[1])


def load_recogniser(
    experiment: Path, recipe: "Recipe | Use", is_best: bool = False, average: int | None = None
) -> Recogniser:
    """The newest consensus model of an experiment, the mean of its `average` newest ones (None: the recipe's number),
    or the best on the validation set; on the recipe's device. Raises CheckpointError if there is none."""
    use = recipe if isinstance(recipe, Use) else Use.of(recipe)
    torch.set_num_threads(use.threads or cores_here())
    best = best_model(ExperimentFolder(experiment))
    if is_best and best is None:
        raise CheckpointError(
            f"{experiment / 'best'}: no model was scored during training; set data.valid and train again, or use the "
            "newest model, without --best"
        )
    if is_best and best is not None:
        recogniser = Recogniser.load(best)
    else:
        recogniser = _mean(experiment, use.average if average is None else average)
    if use.device != "cpu" and torch.cuda.is_available():
        recogniser.model.to("cuda")
    return recogniser


def _mean(experiment: Path, number: int) -> Recogniser:
    """The recogniser whose weights are the mean of those of the newest checkpoints; of fewer, if there are fewer."""
    newest = latest(experiment)
    folders = [path for path in checkpoints_in(newest.parent) if path != newest][1 - number :] if number > 1 else []
    recogniser = Recogniser.load(load(newest).model_folder)
    state = recogniser.model.state_dict()
    others = [Recogniser.load(load(path).model_folder).model.state_dict() for path in folders]
    for name, values in state.items():
        if others and values.is_floating_point():
            values.copy_(torch.stack([values, *(other[name] for other in others)]).double().mean(0))
    return recogniser
