"""The utterances that a recipe trains on, and the plan of its mini-batches: of whole utterances, or of sub-sequences of
frames. Does not load torch."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from starling.chance import derive_seed
from starling.errors import DataError
from starling.speech.batch_plan import EpochPlan, MiniBatch, Planner
from starling.speech.corpora.lines import read_table, write_table
from starling.speech.hybrid.config import SequencesConfig
from starling.speech.hybrid.store import AlignedFrames
from starling.speech.mixture import Mixture
from starling.speech.partition import PartDraws, divide, labels_are_domains
from starling.speech.recipe import Recipe
from starling.speech.union import Member, SpeechSets
from starling.workload import Ticket

if TYPE_CHECKING:
    from starling.speech.losses import TooShort

Pieces = NDArray[np.int64]
"""Sub-sequences `[n, 3]`: utterance, first frame, the frame after the last."""
_EPOCHS_KEPT = 3
_TOO_SHORT = ("id", "frames", "needed", "number")
"""The columns of `too_short.tsv`."""


class RecipePlan:
    """The mini-batches of a recipe, as a pure function of its seed and the ticket.

    `utterances` are the indices in `speech_set` to train on, in ascending order. If the recipe divides the data among
    learners, each mini-batch is drawn at random from the ticket's part; an epoch is then only a number of mini-batches.
    """

    def __init__(self, recipe: Recipe, speech_set: SpeechSets, utterances: NDArray[np.int32]) -> None:
        self.recipe = recipe
        self.speech_set = speech_set
        self.utterances = utterances
        self.num_parts = 1 if recipe.partition == "identical" else recipe.num_workers

    @cached_property
    def _parts(self) -> NDArray[np.int32] | None:
        return divide_utterances(self.recipe, self.speech_set, self.utterances)


class UtterancePlan(RecipePlan):
    """Mini-batches of whole utterances."""

    examples = "utterances"

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
        if self._parts is None:
            return None
        return PartDraws(self._durations, self._parts, self.recipe.batches, derive_seed(self.recipe.seed, "draws"))

    @property
    def _durations(self) -> NDArray[np.float32]:
        return self._of_kept(self.speech_set.durations)

    def _of_kept(self, values: NDArray[Any]) -> NDArray[Any]:
        """The values of the utterances to train on; not copied if these are all utterances."""
        return values if len(self.utterances) == len(values) else values[self.utterances]


class FramePlan(RecipePlan):
    """Mini-batches of sub-sequences of `frames`, which are the aligned utterances of `speech_set`."""

    examples = "sub-sequences"

    def __init__(self, recipe: Recipe, speech_set: SpeechSets, frames: AlignedFrames) -> None:
        super().__init__(recipe, speech_set, frames.utterances)
        self.frames = frames
        seed = derive_seed(recipe.seed, "plan")
        config = recipe.sequences or SequencesConfig()
        self._planner = SequencePlanner(frames.lengths, config, recipe.batches.accumulate, seed)

    @property
    def num_examples(self) -> int:
        """Sub-sequences of an epoch."""
        return self._planner.num_sequences

    def num_batches(self, epoch: int) -> int:
        """Mini-batches of an epoch; all epochs have as many."""
        return self._planner.num_batches

    def passes(self, times: Counter[str]) -> None:
        """Each sub-sequence should be seen once in each epoch."""

    def of(self, ticket: Ticket) -> list[Pieces]:
        """The micro-batches of a ticket's mini-batch."""
        if self._parts is not None:
            return self._planner.draw(ticket.part, ticket.step, self._parts)
        return self._planner.batch(ticket.epoch, ticket.index)

    def ids(self, ticket: Ticket) -> Iterator[str]:
        """The names of a mini-batch's sub-sequences."""
        for pieces in self.of(ticket):
            yield from self.names(pieces)

    def names(self, pieces: Pieces) -> tuple[str, ...]:
        """`utterance[first:end]` of each sub-sequence; `utterance@speed[first:end]` at another speed."""
        return tuple(f"{self._name(utterance)}[{first}:{end}]" for utterance, first, end in pieces.tolist())

    def _name(self, utterance: int) -> str:
        name, speed = self.speech_set.id(int(self.utterances[utterance])), float(self.frames.speeds[utterance])
        return name if speed == 1.0 else f"{name}@{speed:g}"


class SequencePlanner:
    """Cuts utterances of `lengths` `[U]` frames into sub-sequences, and deals these at random to mini-batches.

    Each frame is in exactly one sub-sequence of an epoch. If an utterance's length is not a multiple of a
    sub-sequence's, its first sub-sequence, its last, or both are shorter; by how much is drawn for each epoch. A
    mini-batch has at most `batch * accumulate` sub-sequences, and those of an epoch differ by at most one. The order of
    an epoch is kept in memory, 8 bytes for each sub-sequence. Raises DataError for a set without frames.
    """

    def __init__(self, lengths: NDArray[np.int64], config: SequencesConfig, accumulate: int, seed: int) -> None:
        self.lengths = lengths
        self.config = config
        self._accumulate = accumulate
        self._seed = seed
        counts = -(-lengths // config.frames)
        self._ends = np.cumsum(counts)
        if not len(lengths) or not self._ends[-1]:
            raise DataError("there are no frames to train on; check the training set")
        self.num_sequences = int(self._ends[-1])
        """In an epoch."""
        self.num_batches = -(-self.num_sequences // (config.batch * accumulate))
        """In an epoch."""
        self._spare = counts * config.frames - lengths
        self._epochs: OrderedDict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = OrderedDict()

    def batch(self, epoch: int, index: int) -> list[Pieces]:
        """The micro-batches of a mini-batch."""
        if not 0 <= index < self.num_batches:
            raise IndexError(f"mini-batch {index} of epoch {epoch}, which has {self.num_batches}")
        order, offsets = self._epoch(epoch)
        first, end = (each * self.num_sequences // self.num_batches for each in (index, index + 1))
        return self._split(self._pieces(order[first:end], offsets))

    def draw(self, part: int, step: int, parts: NDArray[np.int32]) -> list[Pieces]:
        """A mini-batch of sub-sequences drawn from the utterances of a part; `parts` `[U]` gives the part of each."""
        generator = np.random.default_rng(derive_seed(self._seed, "draw", part, step))
        own = np.flatnonzero(parts == part)
        counts = np.diff(self._ends, prepend=0)[own]
        numbers = np.repeat(self._ends[own] - counts, counts) + _ranges(counts)
        size = self.config.batch * self._accumulate
        chosen = generator.choice(numbers, size, replace=len(numbers) < size)
        return self._split(self._pieces(chosen, generator.integers(self._spare + 1)))

    def _epoch(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The order of the sub-sequences, and by how many frames each utterance's first one is shortened."""
        if epoch not in self._epochs:
            generator = np.random.default_rng(derive_seed(self._seed, "sub-sequences", epoch))
            offsets = generator.integers(self._spare + 1)
            self._epochs[epoch] = generator.permutation(self.num_sequences), offsets
            if len(self._epochs) > _EPOCHS_KEPT:
                self._epochs.popitem(last=False)
        self._epochs.move_to_end(epoch)
        return self._epochs[epoch]

    def _pieces(self, numbers: NDArray[np.int64], offsets: NDArray[np.int64]) -> Pieces:
        utterance = np.searchsorted(self._ends, numbers, side="right")
        before = np.where(utterance > 0, self._ends[utterance - 1], 0)
        first = (numbers - before) * self.config.frames - offsets[utterance]
        end = np.minimum(first + self.config.frames, self.lengths[utterance])
        return np.stack([utterance, np.maximum(first, 0), end], axis=1)

    def _split(self, pieces: Pieces) -> list[Pieces]:
        return [part for part in np.array_split(pieces, self._accumulate) if len(part)]


def _ranges(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """0, 1, …, count - 1 for each of `counts`, end to end."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)


def load_plan(recipe: Recipe, too_short: Path) -> UtterancePlan:
    """The plan of a recipe whose data are prepared; `too_short` lists the utterances that CTC cannot align."""
    train = open_training_set(recipe)
    return UtterancePlan(recipe, train, kept_utterances(train, too_short))


def load_frame_plan(recipe: Recipe, frames: Path) -> FramePlan:
    """The plan of a recipe whose training set is prepared and aligned. DataError where it is not."""
    train = open_training_set(recipe)
    return FramePlan(recipe, train, AlignedFrames(frames, recipe.features.mels_at(recipe.data.sampling_rate)))


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


def list_too_short(found: "Iterable[TooShort]", train: SpeechSets, path: Path) -> None:
    """Write the utterances that cannot be aligned to a table, which `kept_utterances` reads."""
    rows = {each.id: each for each in found}
    names = ((number, train.id(number)) for number in range(len(train)))
    write_table(path, _TOO_SHORT, ((*rows[name], number) for number, name in names if name in rows))


def kept_utterances(train: SpeechSets, path: Path) -> NDArray[np.int32]:
    """The indices of the utterances to train on: all except those listed by `list_too_short`."""
    everything = np.arange(len(train), dtype=np.int32)
    if not path.is_file():
        return everything
    listed = [(row["id"], int(row["number"])) for _, row in read_table(path, _TOO_SHORT)]
    for name, number in listed:
        if number >= len(train) or train.id(number) != name:
            raise DataError(f"{path}: {name} is not utterance {number} of {train.name}; train again without resume")
    return np.delete(everything, [number for _, number in listed])
