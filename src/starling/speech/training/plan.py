"""The utterances that a recipe trains on, and the plan of its mini-batches. Does not load torch."""

import csv
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from starling.chance import derive_seed
from starling.errors import DataError
from starling.speech.batch_plan import EpochPlan, MiniBatch, Planner
from starling.speech.mixture import Mixture
from starling.speech.partition import PartDraws, divide, labels_are_domains
from starling.speech.recipe import Recipe
from starling.speech.union import Member, SpeechSets
from starling.workload import Ticket


class TrainingPlan:
    """The mini-batches of a recipe, as a pure function of its seed and the ticket.

    `utterances` are the indices in `speech_set` to train on, in ascending order. If the recipe divides the data among
    learners, each mini-batch is drawn at random from the ticket's part; an epoch is then only a number of mini-batches.
    """

    examples = "utterances"

    def __init__(self, recipe: Recipe, speech_set: SpeechSets, utterances: NDArray[np.int32]) -> None:
        self.recipe = recipe
        self.speech_set = speech_set
        self.utterances = utterances
        self.num_parts = 1 if recipe.partition == "identical" else recipe.num_workers

    def epoch(self, epoch: int) -> EpochPlan:
        """The plan of an epoch, as positions in `utterances`; with divided data, only its `num_batches` is used."""
        return self._planner.epoch(epoch)

    def num_batches(self, epoch: int) -> int:
        """Mini-batches of an epoch."""
        return self.epoch(epoch).num_batches

    def of(self, ticket: Ticket) -> MiniBatch:
        """A ticket's mini-batch, as positions in `utterances`."""
        if self._draws is not None:
            return self._draws.draw(ticket.part, ticket.step)
        return self.epoch(ticket.epoch)[ticket.index]

    def ids(self, ticket: Ticket) -> Iterator[str]:
        """The ids of a mini-batch's utterances; only for data that are not divided."""
        for micro_batch in self.epoch(ticket.epoch)[ticket.index]:
            yield from (self.speech_set.id(int(self.utterances[index])) for index in micro_batch)

    @property
    def num_examples(self) -> int:
        """Utterances to train on."""
        return len(self.utterances)

    def passes(self, times: Counter[str]) -> str | None:
        """How many passes over each domain of a mixture were made, in words, from how often each utterance was seen;
        None without a mixture."""
        if self.recipe.mixture is None:
            return None
        lines = []
        train = self.speech_set
        for domain, (first, last) in zip(train.domains, pairwise(train.domain_bounds), strict=True):
            own = self.utterances[(first <= self.utterances) & (self.utterances < last)]
            counts = [times[train.id(int(index))] for index in own]
            passes = sum(counts) / len(counts)
            lines.append(f"{domain} {passes:.2f} passes (each utterance {min(counts)} to {max(counts)} times)")
        return ", ".join(lines)

    @cached_property
    def _planner(self) -> Planner:
        mixture = make_mixture(self.recipe, self.speech_set, self.utterances)
        seed = derive_seed(self.recipe.seed, "plan")
        return Planner(self._durations, self._of_kept(self.speech_set.shards), self.recipe.batches, seed, mixture)

    @cached_property
    def _draws(self) -> PartDraws | None:
        parts = divide_utterances(self.recipe, self.speech_set, self.utterances)
        if parts is None:
            return None
        return PartDraws(self._durations, parts, self.recipe.batches, derive_seed(self.recipe.seed, "draws"))

    @property
    def _durations(self) -> NDArray[np.float32]:
        return self._of_kept(self.speech_set.durations)

    def _of_kept(self, values: NDArray[Any]) -> NDArray[Any]:
        """The values of the utterances to train on; not copied if these are all utterances."""
        return values if len(self.utterances) == len(values) else values[self.utterances]


def load_plan(recipe: Recipe, too_short: Path) -> TrainingPlan:
    """The plan of a recipe whose data are prepared; `too_short` lists the utterances that CTC cannot align."""
    train = open_training_set(recipe)
    return TrainingPlan(recipe, train, kept_utterances(train, too_short))


def open_training_set(recipe: Recipe) -> SpeechSets:
    """Open the recipe's prepared training set or mixture.

    Raises DataError if it cannot be opened, or if the sampling rate of a mixture is not the recipe's.
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
            f"{recipe.data.sampling_rate}: prepare them again, or change data.sampling_rate"
        )
    return opened


def make_mixture(recipe: Recipe, train: SpeechSets, utterances: NDArray[np.int32]) -> Mixture | None:
    """The recipe's mixture, restricted to `utterances`; None without one.

    Raises DataError if a domain has no utterances.
    """
    if recipe.mixture is None:
        return None
    return Mixture(recipe.mixture, np.searchsorted(utterances, train.domain_bounds).tolist())


def divide_utterances(recipe: Recipe, train: SpeechSets, utterances: NDArray[np.int32]) -> NDArray[np.int32] | None:
    """The part that each of `utterances` belongs to, with one part for each worker; None if the data are not divided.

    Raises ConfigError if the data are too few for the number of workers.
    """
    if recipe.partition == "identical":
        return None
    seconds = train.durations[utterances]
    return divide(part_labels(recipe, train, utterances), seconds, recipe.num_workers, recipe.partition, recipe.seed)


def part_labels(recipe: Recipe, train: SpeechSets, utterances: NDArray[np.int32]) -> NDArray[np.int32]:
    labels = train.domain_labels() if labels_are_domains(recipe.partition) else train.speaker_labels()
    return labels[utterances]


def kept_utterances(train: SpeechSets, path: Path) -> NDArray[np.int32]:
    """The indices of the utterances to train on: all except those listed by `list_too_short`."""
    everything = np.arange(len(train), dtype=np.int32)
    if not path.is_file():
        return everything
    with path.open(encoding="utf-8", newline="") as file:
        rows = [(row["id"], int(row["number"])) for row in csv.DictReader(file, dialect="excel-tab")]
    for name, number in rows:
        if number >= len(train) or train.id(number) != name:
            raise DataError(f"{path}: {name} is not utterance {number} of {train.name}; train again without resume")
    return np.delete(everything, [number for _, number in rows])
