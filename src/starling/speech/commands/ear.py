"""The recogniser with which `starling check` listens, and what its own training data mean for the findings."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from starling.checkpoint.manifest import MANIFEST
from starling.checkpoint.reader import load
from starling.errors import ConfigError
from starling.experiment.folder import ExperimentFolder, existing
from starling.speech.check.findings import Report, SetHeard
from starling.speech.commands.recognisers import load_recogniser
from starling.speech.data import DataConfig
from starling.speech.recipe import Recipe, load_resolved
from starling.speech.recogniser import Recogniser

_POOR = 0.5
"""Character errors above which a model finds little but swapped transcripts."""
_BY_HEART = 3.0
"""A model that makes so many times fewer errors in its training set than in others has learnt it by heart."""


@dataclass(frozen=True)
class Ear:
    """A recogniser, where it comes from, and the recipe that trained it, if that is known."""

    recogniser: Recogniser
    path: Path
    recipe: Recipe | None

    @classmethod
    def open(cls, path: Path) -> Self:
        """The newest model of an experiment, the model of a checkpoint, or a recogniser's folder.

        Raises CheckpointError if it cannot be loaded, and ConfigError if it is not a recogniser with CTC.
        """
        if (path / "config.json").is_file():
            recogniser, recipe = Recogniser.load(path), _recipe_of(path)
        elif (path / MANIFEST).is_file():
            recogniser, recipe = Recogniser.load(load(path).model_folder), _recipe_of(path)
        else:
            recipe = load_resolved(existing(path).config)
            recogniser = load_recogniser(path, recipe)
        if recogniser.states is not None:
            raise ConfigError(f"--model {path}: it was trained with loss: frames; give a model with CTC")
        return cls(recogniser, path, recipe)

    def remarks(self, report: Report, folder: Path, data: DataConfig | None) -> Iterator[str]:
        """What the error rates and the model's own training data mean for the findings about sets of a recipe's `data`,
        or of a prepared `folder` if that is None."""
        trained = {each.name: self._trained_on(each.name, folder, data) for each in report.heard}
        others = [each for each in report.heard if not trained[each.name] and each.heard]
        for each in report.heard:
            if each.skipped:
                name, reason = each.skipped[0]
                yield (
                    f"{each.name}: {len(each.skipped)} utterances could not be compared with the model; the first, "
                    f"{name!r}: {reason}"
                )
            if not each.heard:
                continue
            yield f"{each.name}: the model hears {each.errors:.1%} of the characters wrong; limit {each.limit:.2f}"
            if each.errors > _POOR:
                yield f"{each.name}: with so many errors it finds hardly more than swaps; use a better model"
            if trained[each.name]:
                yield self._of_training(each, others)

    def _of_training(self, heard: SetHeard, others: Sequence[SetHeard]) -> str:
        line = f"{heard.name}: the model was trained on these transcripts, and may have learnt wrong ones by heart"
        if others and (rate := _errors(others)) > _BY_HEART * heard.errors:
            line += f": it hears {rate:.1%} of the characters wrong in sets that it was not trained on"
        return f"{line}; check with an early checkpoint, or with models of folds (data.hold_out)"

    def _trained_on(self, name: str, folder: Path, data: DataConfig | None) -> bool:
        """Whether the model was trained on set `name`, or on a part of it."""
        if self.recipe is None:
            return False
        mixture = self.recipe.mixture
        used = list(mixture.sets) if mixture is not None else [self.recipe.data.train]
        if data is None:  # a prepared set
            return (folder / name).resolve() in [self.recipe.set_folder(each).resolve() for each in used]
        own = self.recipe.data
        if own.corpus != data.corpus:
            return False
        if own.hold_out == data.hold_out:
            return name in used
        return data.source(name) in [own.source(each) for each in used]


def _errors(sets: Sequence[SetHeard]) -> float:
    """Character errors of what is heard in several sets, divided by the characters of their transcripts."""
    return sum(each.errors * each.characters for each in sets) / sum(each.characters for each in sets)


def _recipe_of(path: Path) -> Recipe | None:
    """The recipe of the experiment that a model's folder or a checkpoint belongs to."""
    for folder in path.resolve().parents[:3]:
        config = ExperimentFolder(folder).config
        if config.is_file():
            return load_resolved(config)
    return None
