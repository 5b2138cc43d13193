"""Plans the mini-batches of an epoch by a pure function, so that all processes agree.

An epoch is planned in windows of a few shards. Each window is planned independently, and a learner reads only a few
shards at a time, however large the set is.
"""

import heapq
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from starling.chance import derive_seed
from starling.configuration import Config
from starling.errors import DataError
from starling.speech.mixture import Mixture
from starling.workload import Weighting

MiniBatch = list[NDArray[np.int64]]  # its micro-batches, each an array of utterance indices

_MICRO_BATCHES_PER_BUCKET = 4  # with fewer, small sets would have needlessly small batches
_MAX_SPLIT = 0.1  # fraction of micro-batches that may be split to complete groups of similar mini-batches
_WINDOWS_KEPT = 3  # the current one, the next, which is loaded ahead, and one that a slow learner is still in
_EPOCHS_KEPT = 2

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class BatchConfig(Config):
    """How utterances are grouped; the `batches:` section of a recipe."""

    max_duration: float = Field(default=60.0, gt=0)
    """Maximum seconds of audio in a micro-batch, with padding; limits memory use."""
    accumulate: int = Field(default=1, ge=1)
    """Micro-batches per mini-batch, whose gradients are accumulated."""
    num_buckets: int = Field(default=20, ge=1)
    """Maximum number of groups of similar duration in a window."""
    window: int = Field(default=10, ge=1)
    """Shards that are open and shuffled together."""
    similar: int = Field(default=8, ge=1)
    """Consecutive mini-batches of similar duration, so that up to this many learners can step together and hardly wait
    for each other."""
    weighting: Weighting = "batches"
    """How mini-batches are weighted when learners average gradients: batches, equally; utterances or frames, in
    proportion to their number."""
    num_workers: Literal["auto"] | Annotated[int, Field(ge=0)] = "auto"
    """Loading processes per learner, which load batches ahead; 0: the learner loads them; auto: depends on the cores,
    the learners on this machine, the location of the data and the budget."""


class ShardWindows:
    """The parts of an epoch, each shuffled separately; a pure function of epoch and number. Here, all shards of a set
    in random order, in windows of at most `most_shards`; each utterance once per epoch.

    `shards` (`[N]`, ascending) is the shard of each utterance.
    """

    def __init__(self, shards: NDArray[np.int32], most_shards: int, seed: int) -> None:
        self._bounds = shard_bounds(shards)
        self.num_windows = -(-(len(self._bounds) - 1) // most_shards)
        self._seed = seed

    def members(self, epoch: int, number: int) -> NDArray[np.int64]:
        """The utterances of a window, in any order; with a mixture, one that is drawn twice occurs twice."""
        num_shards = len(self._bounds) - 1
        order = np.random.default_rng(derive_seed(self._seed, "shards", epoch)).permutation(num_shards)
        first, end = (part * num_shards // self.num_windows for part in (number, number + 1))
        return np.concatenate([np.arange(*self._bounds[shard : shard + 2]) for shard in order[first:end]])


def shard_bounds(shards: NDArray[np.int32]) -> NDArray[np.int64]:
    """The first utterance of each shard, and the number of utterances: `[S + 1]`, from `shards` `[N]`, ascending."""
    changes = np.diff(shards)
    if len(changes) and changes.min() < 0:
        raise DataError("the utterances of a set are not in the order of their shards; prepare it again")
    return np.concatenate([[0], np.flatnonzero(changes) + 1, [len(shards)]])


class Planner:
    """Plans the epochs of a set; a pure function of the constructor's arguments.

    `durations` (`[N]`, seconds) and `shards` (`[N]`, ascending: the shard of each utterance) describe the set. Without
    a mixture, each utterance is in exactly one micro-batch per epoch, and a window has at most `config.window` shards.
    With a mixture, an epoch contains the data that it draws (see `starling.speech.mixture`).

    In a window, utterances are sorted by duration into buckets, and those of a bucket are assigned to micro-batches at
    random. A micro-batch with its padding is at most `max_duration` long, unless it consists of one longer utterance,
    or the window has too few utterances to fill `accumulate` without merging. Each mini-batch has `accumulate`
    micro-batches (fewer if the window has fewer utterances). Groups of `similar` mini-batches are in random order;
    mini-batches that do not fill a group come last. Raises DataError for a set without utterances.
    """

    def __init__(
        self,
        durations: NDArray[np.float32],
        shards: NDArray[np.int32],
        config: BatchConfig,
        seed: int,
        mixture: Mixture | None = None,
    ) -> None:
        if not len(durations):
            raise DataError("there are no utterances to plan an epoch with; check the training set")
        self._durations = durations
        self._config = config
        self._seed = seed
        self.windows = (
            ShardWindows(shards, config.window, seed)
            if mixture is None
            else mixture.windows(durations, shard_bounds(shards), config.window, seed)
        )
        self._epochs: dict[int, EpochPlan] = {}
        self._plans: dict[tuple[int, int], list[MiniBatch]] = {}

    def epoch(self, epoch: int) -> "EpochPlan":
        """The plan of an epoch; each window is planned when it is first needed."""
        return _recent(self._epochs, _EPOCHS_KEPT, epoch, lambda: EpochPlan(self, epoch))

    def count(self, epoch: int, window: int) -> int:
        """The number of mini-batches in a window."""
        members = self.windows.members(epoch, window)
        return _Dealing(self._durations[members], self._config).num_batches

    def window(self, epoch: int, window: int) -> list[MiniBatch]:
        """The mini-batches of a window, in order."""
        return _recent(self._plans, _WINDOWS_KEPT, (epoch, window), lambda: self._plan(epoch, window))

    def _plan(self, epoch: int, window: int) -> list[MiniBatch]:
        members = self.windows.members(epoch, window)
        generator = np.random.default_rng(derive_seed(self._seed, "window", epoch, window))
        dealt = _Dealing(self._durations[members], self._config).deal(generator)
        order = in_similar_groups(len(dealt), self._config.similar, generator)
        return [[members[micro] for micro in dealt[number]] for number in order]


class EpochPlan:
    """The mini-batches of one epoch, in order."""

    def __init__(self, planner: Planner, epoch: int) -> None:
        self._planner, self._epoch = planner, epoch
        counts = [planner.count(epoch, window) for window in range(planner.windows.num_windows)]
        self._ends = np.cumsum(counts)

    @property
    def num_batches(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> MiniBatch:
        if not 0 <= index < self.num_batches:
            raise IndexError(f"mini-batch {index} of epoch {self._epoch}, which has {self.num_batches}")
        window = int(np.searchsorted(self._ends, index, side="right"))
        first = int(self._ends[window - 1]) if window else 0
        return self._planner.window(self._epoch, window)[index - first]

    def __iter__(self) -> Iterator[MiniBatch]:
        return (self[index] for index in range(self.num_batches))


@dataclass
class Bucket:
    """Utterances of similar duration, and the number of micro-batches they are divided into."""

    members: NDArray[np.int64]
    longest: float
    groups: int

    def duration_of_a_group(self) -> float:
        return self.longest * len(self.members) / self.groups


class _Dealing:
    """The sizes of a window's micro-batches, which depend on `durations` (`[n]`, seconds) only, and their random
    division into mini-batches."""

    def __init__(self, durations: NDArray[np.float32], config: BatchConfig) -> None:
        self.accumulate = max(1, min(config.accumulate, len(durations)))
        self.buckets: list[Bucket] = []
        if not len(durations):  # a window of a mixture may be shorter than its only utterance
            return
        buckets = fill_buckets(durations, config)
        groups = sum(bucket.groups for bucket in buckets)
        whole = _next_multiple(groups, self.accumulate * config.similar)
        if whole > min(len(durations), groups * (1 + _MAX_SPLIT)):
            whole = _next_multiple(groups, self.accumulate)
        if whole > len(durations):
            longest, groups = buckets[-1].longest, len(durations) // self.accumulate * self.accumulate
            self.buckets = [Bucket(np.concatenate([bucket.members for bucket in buckets]), longest, groups)]
        else:
            self.buckets = buckets
            _split_longest(buckets, whole - groups)

    @property
    def num_batches(self) -> int:
        return sum(bucket.groups for bucket in self.buckets) // self.accumulate

    def deal(self, generator: np.random.Generator) -> list[MiniBatch]:
        """Random mini-batches, ordered from the shortest to the longest utterances."""
        micro_batches: MiniBatch = []
        for bucket in self.buckets:
            micro_batches += np.array_split(generator.permutation(bucket.members), bucket.groups)
        return [micro_batches[k : k + self.accumulate] for k in range(0, len(micro_batches), self.accumulate)]


def fill_buckets(durations: NDArray[np.float32], config: BatchConfig) -> list[Bucket]:
    """Buckets of about equal total duration, shortest utterances first, each with the number of groups it needs."""
    order = np.argsort(durations, kind="stable")
    ends = np.cumsum(durations[order], dtype=np.float64)
    total = float(ends[-1])
    wanted = int(total / (_MICRO_BATCHES_PER_BUCKET * config.max_duration))
    num_buckets = max(1, min(config.num_buckets, wanted))
    numbers = np.minimum((ends / total * num_buckets).astype(np.int64), num_buckets - 1) if total else ends.astype(int)
    buckets = []
    for members in np.split(order, np.flatnonzero(np.diff(numbers)) + 1):
        longest = float(durations[members[-1]])
        size = max(1, int(config.max_duration / longest)) if longest else len(members)
        buckets.append(Bucket(members, longest, groups=-(-len(members) // size)))
    return buckets


def _split_longest(buckets: list[Bucket], times: int) -> None:
    """Split the longest group `times` times."""
    splittable = [
        (-bucket.duration_of_a_group(), number)
        for number, bucket in enumerate(buckets)
        if bucket.groups < len(bucket.members)
    ]
    heapq.heapify(splittable)
    for _ in range(times):
        _, number = heapq.heappop(splittable)
        bucket = buckets[number]
        bucket.groups += 1
        if bucket.groups < len(bucket.members):
            heapq.heappush(splittable, (-bucket.duration_of_a_group(), number))


def in_similar_groups(count: int, size: int, generator: np.random.Generator) -> list[int]:
    """Numbers below `count` in random order, in which groups of `size` neighbours stay together. The remainder comes
    last; it is chosen at random, so that a window does not always end with its longest utterances."""
    whole, over = divmod(count, size)
    cut = int(generator.integers(whole + 1)) * size
    groups = np.delete(np.arange(count), np.s_[cut : cut + over]).reshape(whole, size)
    shuffled = generator.permuted(generator.permutation(groups), axis=1)
    return [*shuffled.ravel().tolist(), *generator.permutation(np.arange(cut, cut + over)).tolist()]


def _next_multiple(number: int, of: int) -> int:
    return -(-number // of) * of


def _recent(cache: dict[K, V], most: int, key: K, make: Callable[[], V]) -> V:
    """The value of a key, from a cache of the `most` recently used ones or made now."""
    value = cache.pop(key) if key in cache else make()
    cache[key] = value
    if len(cache) > most:
        del cache[next(iter(cache))]
    return value
