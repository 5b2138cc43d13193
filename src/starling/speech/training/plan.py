"""The utterances that a recipe trains on, and the plan of its mini-batches, which consist of whole utterances or
sub-sequences of frames. A plan is a pure function, so that all processes agree on it. This module does not load
torch."""

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from starling.chance import derive_seed
from starling.errors import DataError
from starling.experiment.folder import ExperimentFolder
from starling.experiment.task import MiniBatches
from starling.speech.batch_plan import (
    BatchConfig,
    Bucket,
    Dealing,
    MiniBatch,
    MixedWindows,
    ShardWindows,
    describe_parts,
    divide,
    divided_by,
    fill_buckets,
    in_similar_groups,
)
from starling.speech.hybrid import AlignedFrames, SequencesConfig
from starling.speech.recipe import Recipe
from starling.speech.store import Member, SpeechSets
from starling.speech.usable import kept_utterances
from starling.workload import Ticket

Pieces = NDArray[np.int64]
"""Sub-sequences `[n, 3]`: the utterance, the first frame, and the frame after the last."""
_WINDOWS_KEPT = 3  # the current window, the next, which is loaded ahead, and one for a slow learner
_EPOCHS_KEPT = 3


class RecipePlan(MiniBatches):
    """The mini-batches of a recipe, composed of `utterances`. They are a pure function of the recipe's seed and the
    ticket.

    If the recipe divides the utterances among learners, each mini-batch is drawn at random from the part of the ticket.
    An epoch is then only a number of mini-batches.
    """

    def __init__(self, recipe: Recipe, utterances: SpeechSets) -> None:
        self.recipe, self.utterances = recipe, utterances
        self.num_parts = 1 if recipe.partition == "identical" else recipe.num_workers

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_planner"}  # processes make their own

    @property
    def num_examples(self) -> int:
        """The number of utterances, or the number of sub-sequences in an epoch."""
        return self._planner.num_examples

    def num_batches(self, epoch: int) -> int:
        """The number of mini-batches of an epoch."""
        return self._planner.num_batches(epoch)

    def of(self, ticket: Ticket) -> MiniBatch:
        """The micro-batches of a ticket's mini-batch."""
        if self._parts is not None:
            return self._planner.draw(ticket.part, ticket.step, self._parts)
        return self._planner.batch(ticket.epoch, ticket.index)

    def ids(self, ticket: Ticket) -> Iterator[str]:
        """The names of a mini-batch's examples."""
        return (name for micro_batch in self.of(ticket) for name in self.names(micro_batch))

    @abstractmethod
    def names(self, micro_batch: NDArray[np.int64]) -> Sequence[str]:
        """The names of a micro-batch's examples."""

    def shares(self) -> list[str]:
        """Descriptions of the mixture (the passes over each domain in an epoch) and of the partition (the sizes of its
        parts).

        Raises DataError if a domain has no utterances, and ConfigError if the data are too few for the learners.
        """
        if self._parts is None:
            return []
        described = describe_parts(self._parts, self.utterances.durations, self._labels)
        kind = divided_by(self.recipe.partition)
        return [f"each learner draws at random from its own part of the data: {described} {kind}s"]

    @property
    @abstractmethod
    def _planner(self) -> "Planner | SequencePlanner": ...

    @cached_property
    def _parts(self) -> NDArray[np.int32] | None:
        """The part of each utterance, with one part for each worker; None if the data are not divided."""
        recipe = self.recipe
        if recipe.partition == "identical":
            return None
        return divide(self._labels, self.utterances.durations, recipe.num_workers, recipe.partition, recipe.seed)

    @property
    def _labels(self) -> NDArray[np.int32]:
        return self.utterances.labels(divided_by(self.recipe.partition))


class UtterancePlan(RecipePlan):
    """A plan of mini-batches of whole utterances. A micro-batch is an array of indices in `utterances`."""

    examples = "utterances"

    def names(self, micro_batch: NDArray[np.int64]) -> list[str]:
        """The ids of a micro-batch's utterances."""
        return [self.utterances.id(index) for index in micro_batch.tolist()]

    def shares(self) -> list[str]:
        if self._parts is not None or not isinstance(windows := self._planner.windows, MixedWindows):
            return super().shares()
        passes = ", ".join(f"{name} {number:.3g}" for name, number in windows.passes.items())
        return [f"passes over domains in an epoch: {passes}"]

    def passes(self, times: Counter[str]) -> str | None:
        """A description of the number of passes over each domain of a mixture, given how often each utterance was used.
        None without a mixture."""
        if self.recipe.mixture is None:
            return None
        lines, train = [], self.utterances
        for domain, (first, last) in zip(train.domains, pairwise(train.domain_bounds), strict=True):
            counts = [times[train.id(index)] for index in range(first, last)]
            passes = sum(counts) / len(counts)
            lines.append(f"{domain} {passes:.2f} passes (each utterance {min(counts)} to {max(counts)} times)")
        return ", ".join(lines)

    @cached_property
    def _planner(self) -> "Planner":
        recipe, train, seed = self.recipe, self.utterances, derive_seed(self.recipe.seed, "plan")
        windows: ShardWindows | MixedWindows = ShardWindows(train.shards, recipe.batches.window, seed)
        if recipe.mixture is not None:
            windows = MixedWindows(recipe.mixture, train, recipe.batches.window, seed)
        return Planner(train.durations, windows, recipe.batches, seed, derive_seed(recipe.seed, "draws"))


class Planner:
    """Plans the epochs of a set, as a pure function of the constructor's arguments.

    `durations` (`[N]`, seconds) are those of the set's utterances. `windows` determine which utterances an epoch
    contains, and which utterances are shuffled together. `draws_seed` is the seed for drawing from parts.

    In a window, utterances are sorted by duration into buckets, and the utterances of a bucket are assigned to
    micro-batches at random. A micro-batch with its padding is at most `max_duration` long, unless it consists of one
    longer utterance, or the window has too few utterances to fill `accumulate` without merging. Each mini-batch has
    `accumulate` micro-batches (fewer if the window has fewer utterances). Groups of `similar` mini-batches are in
    random order, and mini-batches that do not fill a group come last. In the first epoch, mini-batches can instead be
    in order of duration (`shortest_first`).

    If the data are divided, mini-batches are drawn at random from parts instead. The utterances of a part are sorted
    into buckets. For each mini-batch, they are divided into micro-batches at random, and `accumulate` of these are
    drawn. All utterances are thus equally likely. Raises DataError for a set without utterances.
    """

    def __init__(
        self,
        durations: NDArray[np.float32],
        windows: ShardWindows | MixedWindows,
        config: BatchConfig,
        seed: int,
        draws_seed: int,
    ) -> None:
        if not len(durations):
            raise DataError("there are no utterances to train on; check the training set")
        self._durations, self._config, self._seed, self._draws_seed = durations, config, seed, draws_seed
        self.windows, self.num_examples = windows, len(durations)
        self._grouped: dict[int, tuple[NDArray[np.int64], list[Bucket]]] = {}
        self.window = lru_cache(_WINDOWS_KEPT)(self._plan)
        """A cached function that returns the mini-batches of a window of an epoch, in order."""
        self._ends_of_windows = lru_cache(_EPOCHS_KEPT)(self._count)

    def num_batches(self, epoch: int) -> int:
        """The number of mini-batches of an epoch."""
        return int(self._ends_of_windows(epoch)[-1])

    def batch(self, epoch: int, index: int) -> MiniBatch:
        """A mini-batch of an epoch; its window is planned when it is first needed."""
        ends = self._ends_of_windows(epoch)
        if not 0 <= index < ends[-1]:
            raise IndexError(f"mini-batch {index} of epoch {epoch}, which has {ends[-1]}")
        window = int(np.searchsorted(ends, index, side="right"))
        return self.window(epoch, window)[index - (int(ends[window - 1]) if window else 0)]

    def draw(self, part: int, step: int, parts: NDArray[np.int32]) -> MiniBatch:
        """Draw the mini-batch of a part for ticket number `step`. `parts` `[N]` are the parts of all utterances."""
        if part not in self._grouped:
            members = np.flatnonzero(parts == part)
            self._grouped[part] = members, fill_buckets(self._durations[members], self._config)
        members, buckets = self._grouped[part]
        generator = np.random.default_rng(derive_seed(self._draws_seed, "part", part, step))
        firsts = np.cumsum([0, *(bucket.groups for bucket in buckets)])
        size = min(self._config.accumulate, int(firsts[-1]))
        drawn = np.sort(generator.choice(int(firsts[-1]), size, replace=False))
        mini_batch: MiniBatch = []
        for bucket, first, end in zip(buckets, firsts[:-1], firsts[1:], strict=True):
            if len(own := drawn[(first <= drawn) & (drawn < end)]):
                groups = np.array_split(generator.permutation(bucket.members), bucket.groups)
                mini_batch += [members[groups[number]] for number in (own - first).tolist()]
        return mini_batch

    def _count(self, epoch: int) -> NDArray[np.int64]:
        """The number of mini-batches up to the end of each window."""
        members = (self.windows.members(epoch, window) for window in range(self.windows.num_windows))
        return np.cumsum([Dealing(self._durations[each], self._config).num_batches for each in members])

    def _plan(self, epoch: int, window: int) -> list[MiniBatch]:
        members = self.windows.members(epoch, window)
        generator = np.random.default_rng(derive_seed(self._seed, "window", epoch, window))
        dealt = Dealing(self._durations[members], self._config).deal(generator)
        order: Iterable[int] = in_similar_groups(len(dealt), self._config.similar, generator)
        if epoch == 0 and self._config.shortest_first:
            order = range(len(dealt))
        return [[members[micro] for micro in dealt[number]] for number in order]


class FramePlan(RecipePlan):
    """A plan of mini-batches of sub-sequences, cut from `frames`, the aligned utterances of `train`."""

    examples = "sub-sequences"

    def __init__(self, recipe: Recipe, train: SpeechSets, frames: AlignedFrames) -> None:
        super().__init__(recipe, train.only(frames.utterances))
        self.frames = frames

    @cached_property
    def _planner(self) -> "SequencePlanner":
        recipe, seed = self.recipe, derive_seed(self.recipe.seed, "plan")
        config = recipe.sequences or SequencesConfig()
        return SequencePlanner(self.frames.lengths, config, recipe.batches.accumulate, seed)

    def names(self, micro_batch: NDArray[np.int64]) -> tuple[str, ...]:
        """The name of each sub-sequence: `utterance[first:end]`, or `utterance@speed[first:end]` if the speed was
        changed."""
        return tuple(f"{self._name(utterance)}[{first}:{end}]" for utterance, first, end in micro_batch.tolist())

    def _name(self, utterance: int) -> str:
        name, speed = self.utterances.id(utterance), float(self.frames.speeds[utterance])
        return name if speed == 1.0 else f"{name}@{speed:g}"


class SequencePlanner:
    """Cuts utterances of `lengths` `[U]` frames into sub-sequences, and distributes these at random among mini-batches.

    Each frame is in exactly one sub-sequence of an epoch. If an utterance's length is not a multiple of the length of a
    sub-sequence, its first sub-sequence, its last, or both are shorter. Their lengths are drawn for each epoch. A
    mini-batch has at most `batch * accumulate` sub-sequences, and the mini-batches of an epoch differ in size by at
    most one. The order of an epoch takes 8 bytes of memory for each sub-sequence. Raises DataError for a set without
    frames.
    """

    def __init__(self, lengths: NDArray[np.int64], config: SequencesConfig, accumulate: int, seed: int) -> None:
        self._lengths, self._config, self._accumulate, self._seed = lengths, config, accumulate, seed
        counts = -(-lengths // config.frames)
        self._ends = np.cumsum(counts)
        if not len(lengths) or not self._ends[-1]:
            raise DataError("there are no frames to train on; check the training set")
        self.num_examples = int(self._ends[-1])
        """The number of sub-sequences in an epoch."""
        self._num_batches = -(-self.num_examples // (config.batch * accumulate))
        self._spare = counts * config.frames - lengths
        self._dealt = lru_cache(_EPOCHS_KEPT)(self._deal)

    def num_batches(self, epoch: int) -> int:
        """The number of mini-batches, which is the same for all epochs."""
        return self._num_batches

    def batch(self, epoch: int, index: int) -> MiniBatch:
        """The micro-batches of a mini-batch."""
        if not 0 <= index < self._num_batches:
            raise IndexError(f"mini-batch {index} of epoch {epoch}, which has {self._num_batches}")
        order, offsets = self._dealt(epoch)
        first, end = (each * self.num_examples // self._num_batches for each in (index, index + 1))
        return self._split(self._pieces(order[first:end], offsets))

    def draw(self, part: int, step: int, parts: NDArray[np.int32]) -> MiniBatch:
        """Draw the mini-batch of sub-sequences of a part for ticket number `step`. `parts` `[U]` are the parts of all
        utterances."""
        generator = np.random.default_rng(derive_seed(self._seed, "draw", part, step))
        numbers = np.flatnonzero(np.repeat(parts == part, np.diff(self._ends, prepend=0)))
        size = self._config.batch * self._accumulate
        chosen = generator.choice(numbers, size, replace=len(numbers) < size)
        return self._split(self._pieces(chosen, generator.integers(self._spare + 1)))

    def _deal(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The order of the sub-sequences, and the number of frames by which each utterance's first sub-sequence is
        shortened."""
        generator = np.random.default_rng(derive_seed(self._seed, "sub-sequences", epoch))
        offsets = generator.integers(self._spare + 1)
        return generator.permutation(self.num_examples), offsets

    def _pieces(self, numbers: NDArray[np.int64], offsets: NDArray[np.int64]) -> Pieces:
        utterance = np.searchsorted(self._ends, numbers, side="right")
        before = np.where(utterance > 0, self._ends[utterance - 1], 0)
        first = (numbers - before) * self._config.frames - offsets[utterance]
        end = np.minimum(first + self._config.frames, self._lengths[utterance])
        return np.stack([utterance, np.maximum(first, 0), end], axis=1)

    def _split(self, pieces: Pieces) -> MiniBatch:
        return [part for part in np.array_split(pieces, self._accumulate) if len(part)]


def load_plan(recipe: Recipe, folder: ExperimentFolder) -> UtterancePlan | FramePlan:
    """The plan of a recipe whose `folder` is set up. Raises DataError if the data are not prepared or not aligned."""
    train = open_training_set(recipe)
    if recipe.loss == "ctc":
        return UtterancePlan(recipe, kept_utterances(train, folder.too_short))
    frames = AlignedFrames(folder.frames, recipe.features.mels_at(recipe.data.sampling_rate))
    return FramePlan(recipe, train, frames)


def open_training_set(recipe: Recipe) -> SpeechSets:
    """Open the recipe's prepared training set or mixture.

    Raises DataError if it cannot be opened, or if the sampling rate of a mixture is not the recipe's.
    """
    opened = SpeechSets([Member(domain, recipe.set_folder(name)) for domain, name in recipe.training_sets])
    if recipe.mixture is not None and opened.sampling_rate != recipe.data.sampling_rate:
        raise DataError(
            f"the sets of the mixture are at {opened.sampling_rate} Hz, and data.sampling_rate is "
            f"{recipe.data.sampling_rate}: prepare them again, or change data.sampling_rate"
        )
    return opened
