"""Loads trained models from an experiment, a checkpoint, or a recogniser's folder."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from starling.checkpoint.files import MANIFEST
from starling.checkpoint.reader import checkpoints_in, latest, load
from starling.engines.processes.place import cores_here
from starling.errors import CheckpointError
from starling.experiment.folder import ExperimentFolder, best_model, existing
from starling.recipe import read_recipe
from starling.speech.recogniser import Recogniser
from starling.speech.store import SpeechSet

if TYPE_CHECKING:
    from starling.speech.recipe import Recipe
    from starling.speech.scoring import ErrorRates


def open_experiment(experiment: Path) -> tuple[ExperimentFolder, "Recipe"]:
    """The folder of an experiment, and its recipe. Raises ConfigError for any other folder."""
    from starling.speech.recipe import load_resolved

    folder = existing(experiment)
    return folder, load_resolved(folder.config)


def is_model(path: Path) -> bool:
    """Whether a path is a recogniser's folder or a checkpoint, which have one model, rather than an experiment."""
    return (path / "config.json").is_file() or (path / MANIFEST).is_file()


def load_newest(source: Path) -> Recogniser:
    """The newest model of an experiment, or the model of a checkpoint or a recogniser's folder. Raises CheckpointError
    if there is none."""
    return Recogniser.load(source if (source / "config.json").is_file() else load(latest(source)).model_folder)


def recipe_around(path: Path) -> "Recipe | None":
    """The recipe of the experiment that contains a path; None if there is none."""
    from starling.speech.recipe import load_resolved

    for folder in (path.resolve(), *path.resolve().parents[:3]):
        if (config := ExperimentFolder(folder).config).is_file():
            return load_resolved(config)
    return None


def load_recogniser(experiment: Path, is_best: bool = False, average: int | None = None) -> Recogniser:
    """Load a recogniser to the recipe's device: the mean of an experiment's `average` newest models (None: the number
    in the recipe) or, with `is_best`, the best model on the validation set. If `experiment` is a checkpoint or a
    recogniser's folder, its model is loaded. Raises CheckpointError if there is no model."""
    if is_model(experiment):
        return load_newest(experiment)
    # checking the whole recipe would take a quarter of a second; the first recipes of this format have no `average`
    match {"average": 1} | read_recipe(existing(experiment).config):
        case {
            "format": int(),
            "average": int(number),
            "engine": {"device": str(device), "threads": int() | None as threads},
        }:
            pass
        case _:
            _, recipe = open_experiment(experiment)
            number, device, threads = recipe.average, recipe.engine.device, recipe.engine.threads
    torch.set_num_threads(threads or cores_here())
    if not is_best:
        recogniser = _mean(experiment, number if average is None else average)
    elif (best := best_model(ExperimentFolder(experiment))) is not None:
        recogniser = Recogniser.load(best)
    else:
        raise CheckpointError(
            f"{experiment / 'best'}: no model was scored during training; set data.valid and train again, or use the "
            "newest model, without --best"
        )
    if device != "cpu" and torch.cuda.is_available():
        recogniser.model.to("cuda")
    return recogniser


def _mean(experiment: Path, number: int) -> Recogniser:
    """The recogniser whose weights are the mean over the `number` newest checkpoints, or over fewer if there are
    fewer."""
    newest = latest(experiment)
    folders = [path for path in checkpoints_in(newest.parent) if path != newest][1 - number :] if number > 1 else []
    recogniser = load_newest(newest)
    others = [load_newest(path).model.state_dict() for path in folders]
    for name, values in recogniser.model.state_dict().items():
        if others and values.is_floating_point():
            values.copy_(torch.stack([values, *(other[name] for other in others)]).double().mean(0))
    return recogniser


def recognised(recogniser: Recogniser, folder: Path) -> "ErrorRates":
    """The error rates of a recogniser on the prepared set in a folder."""
    speech_set = SpeechSet.open(folder)
    from starling.speech.scoring import error_rates, references_of

    return error_rates(references_of(speech_set), recogniser.recognise(speech_set))
