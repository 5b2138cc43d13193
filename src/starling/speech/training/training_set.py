"""Prepares and describes a recipe's training data: one set or a mixture, without utterances that CTC cannot align."""

import numpy as np
from numpy.typing import NDArray

from starling.speech.partition import describe_parts, labels_are_domains
from starling.speech.prepare import describe, prepare
from starling.speech.preparing.executors import Executor
from starling.speech.preparing.stages import OnProgress
from starling.speech.recipe import Recipe
from starling.speech.training.plan import divide_utterances, make_mixture, part_labels
from starling.speech.union import SpeechSets


def prepare_all(
    recipe: Recipe, progress: OnProgress | None = None, executor: Executor | None = None, overwrite: bool = False
) -> str:
    """Prepare the sets of `data` and the further ones of the mixture; return a description. Raises ConfigError and
    DataError as `prepare` does."""
    lines = [describe(prepare(recipe.data, progress, executor, overwrite))]
    for name in recipe.mixture.sets if recipe.mixture else ():
        if name in recipe.data.sets and name not in recipe.data.used_sets:
            alone = recipe.data.model_copy(update={"train": name, "valid": None, "test": ()})
            lines.append(describe(prepare(alone, progress, executor, overwrite)))
    return "\n".join(lines)


def describe_shares(recipe: Recipe, train: SpeechSets, utterances: NDArray[np.int32]) -> list[str]:
    """Lines about mixture and partition: the passes over each domain in an epoch, and the sizes of the parts."""
    lines = []
    mixture = make_mixture(recipe, train, utterances)
    if mixture is not None and recipe.partition == "identical":
        passes = mixture.passes(train.durations[utterances])
        lines.append("passes over domains in an epoch: " + ", ".join(f"{name} {n:.3g}" for name, n in passes.items()))
    parts = divide_utterances(recipe, train, utterances)
    if parts is not None:
        kind = "domains" if labels_are_domains(recipe.partition) else "speakers"
        labels = part_labels(recipe, train, utterances)
        described = describe_parts(parts, train.durations[utterances], labels)
        lines.append(f"each learner draws at random from its own part of the data: {described} {kind}")
    return lines
