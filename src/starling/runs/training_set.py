"""What a recipe trains on: one prepared set, or a mixture of several, without what CTC cannot align."""

import csv
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from starling.errors import DataError
from starling.runs.recipe.recipe import Recipe
from starling.speech.losses import TooShort
from starling.speech.mixture import Mixture
from starling.speech.partition import describe_parts, divide, labels_are_domains
from starling.speech.prepare import Progress, describe, prepare
from starling.speech.preparing.executors import Executor
from starling.speech.union import Member, SpeechSets


def prepare_all(
    recipe: Recipe, progress: Progress | None = None, executor: Executor | None = None, overwrite: bool = False
) -> str:
    """Prepare the sets of `data`, and those that only the mixture names; what is there, in words. Raises ConfigError
    and DataError as `prepare` does."""
    lines = [describe(prepare(recipe.data, progress, executor, overwrite))]
    for name in recipe.mixture.sets if recipe.mixture else ():
        if name in recipe.data.corpus.sets and name not in recipe.data.used_sets:
            alone = recipe.data.model_copy(update={"train": name, "valid": None, "test": ()})
            lines.append(describe(prepare(alone, progress, executor, overwrite)))
    return "\n".join(lines)


def open_training_set(recipe: Recipe) -> SpeechSets:
    """What the recipe trains on, prepared before.

    Raises DataError if it cannot be opened, or has not the recipe's sampling rate.
    """
    if recipe.mixture is None:
        return SpeechSets([Member("", recipe.data.set_folder(recipe.data.train))])
    opened = SpeechSets(
        [
            Member(name, recipe.set_folder(each))
            for name, domain in recipe.mixture.domains.items()
            for each in domain.sets
        ]
    )
    if opened.sampling_rate != recipe.data.sampling_rate:
        raise DataError(
            f"the sets of the mixture are at {opened.sampling_rate} Hz, and data.sampling_rate is "
            f"{recipe.data.sampling_rate}: prepare them anew, or change the rate"
        )
    return opened


def make_mixture(recipe: Recipe, train: SpeechSets, utterances: NDArray[np.int32]) -> Mixture | None:
    """The recipe's mixture of those `utterances` of the training set that are trained on.

    Raises DataError when a domain has none.
    """
    if recipe.mixture is None:
        return None
    return Mixture(recipe.mixture, np.searchsorted(utterances, train.domain_bounds).tolist())


def divide_utterances(recipe: Recipe, train: SpeechSets, utterances: NDArray[np.int32]) -> NDArray[np.int32] | None:
    """The part of each of `utterances`, one part for each learner that computes; None where all see the same.

    Raises ConfigError when there is not enough for so many learners.
    """
    if recipe.partition == "identical":
        return None
    seconds = train.durations[utterances]
    return divide(_labels(recipe, train, utterances), seconds, recipe.num_workers, recipe.partition, recipe.seed)


def describe_shares(recipe: Recipe, train: SpeechSets, utterances: NDArray[np.int32]) -> list[str]:
    """What there is to say about mixture and partition: passes over each domain in an epoch, sizes of the parts."""
    lines = []
    mixture = make_mixture(recipe, train, utterances)
    if mixture is not None and recipe.partition == "identical":
        passes = mixture.passes(train.durations[utterances])
        lines.append("passes over domains in an epoch: " + ", ".join(f"{name} {n:.3g}" for name, n in passes.items()))
    parts = divide_utterances(recipe, train, utterances)
    if parts is not None:
        kind = "domains" if labels_are_domains(recipe.partition) else "speakers"
        labels = _labels(recipe, train, utterances)
        described = describe_parts(parts, train.durations[utterances], labels)
        lines.append(f"each learner draws at random from a part of its own: {described} {kind}")
    return lines


def _labels(recipe: Recipe, train: SpeechSets, utterances: NDArray[np.int32]) -> NDArray[np.int32]:
    labels = train.domain_labels() if labels_are_domains(recipe.partition) else train.speaker_labels()
    return labels[utterances]


def list_too_short(found: Iterable[TooShort], train: SpeechSets, path: Path) -> None:
    """Write down the utterances that CTC cannot align, for people and for `kept_utterances`."""
    rows = {each.id: each for each in found}
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, dialect="excel-tab")
        table.writerow(["id", "frames", "needed", "number"])
        for number in range(len(train)):
            if (each := rows.get(train.id(number))) is not None:
                table.writerow([each.id, each.frames, each.needed, number])


def kept_utterances(train: SpeechSets, path: Path) -> NDArray[np.int32]:
    """Numbers of the utterances to train on: all that `list_too_short` has not written down."""
    everything = np.arange(len(train), dtype=np.int32)
    if not path.is_file():
        return everything
    with path.open(encoding="utf-8", newline="") as file:
        rows = [(row["id"], int(row["number"])) for row in csv.DictReader(file, dialect="excel-tab")]
    for name, number in rows:
        if number >= len(train) or train.id(number) != name:
            raise DataError(f"{path}: {name} is not utterance {number} of {train.name}; train anew without resume")
    return np.delete(everything, [number for _, number in rows])
