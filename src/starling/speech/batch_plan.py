"""Groups utterances of similar duration into mini-batches, window by window; a window is a few shards of an epoch."""

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from starling.chance import derive_seed
from starling.configuration import Config
from starling.errors import DataError
from starling.workload import Weighting

MiniBatch = list[NDArray[np.int64]]  # its micro-batches, each an array of utterance indices

_MICRO_BATCHES_PER_BUCKET = 4  # with fewer, small sets would have needlessly small batches
_MAX_SPLIT = 0.1  # fraction of micro-batches that may be split to complete groups of similar mini-batches


class BatchConfig(Config):
    """How utterances are grouped; the `batches:` section of a recipe."""

    max_duration: float = Field(default=60.0, gt=0)
    """Maximum seconds of audio in a micro-batch, including padding; it limits memory use."""
    accumulate: int = Field(default=1, ge=1)
    """Micro-batches per mini-batch, over which gradients are accumulated."""
    num_buckets: int = Field(default=20, ge=1)
    """Maximum number of groups of similar duration in a window."""
    window: int = Field(default=10, ge=1)
    """Number of shards that are open and shuffled together."""
    similar: int = Field(default=8, ge=1)
    """Number of consecutive mini-batches of similar duration: up to this many learners can step together with little
    waiting."""
    shortest_first: bool = False
    """Whether the first epoch is sorted by duration (SortaGrad, Amodei et al. 2016), from the shortest to the longest
    utterance of each window. CTC learns sooner from short utterances."""
    weighting: Weighting = "batches"
    """How mini-batches are weighted when learners average gradients: `batches` weights them equally, `utterances` and
    `frames` in proportion to their number."""
    num_workers: Literal["auto"] | Annotated[int, Field(ge=0)] = "auto"
    """Loading processes per learner, which load batches ahead. 0 makes the learner load them itself; auto depends on
    the cores, the learners on this machine, the location of the data and the budget."""


class ShardWindows:
    """The parts of an epoch, each shuffled separately; a pure function of epoch and number. This class puts all shards
    of a set in random order, in windows of at most `most_shards`; each utterance occurs once per epoch.

    `shards` (`[N]`, ascending) is the shard of each utterance.
    """

    def __init__(self, shards: NDArray[np.int32], most_shards: int, seed: int) -> None:
        self._bounds = shard_bounds(shards)
        self.num_windows = -(-(len(self._bounds) - 1) // most_shards)
        self._seed = seed

    def members(self, epoch: int, number: int) -> NDArray[np.int64]:
        """The utterances of a window, in any order; an utterance that a mixture draws twice occurs twice."""
        num_shards = len(self._bounds) - 1
        order = np.random.default_rng(derive_seed(self._seed, "shards", epoch)).permutation(num_shards)
        first, end = (part * num_shards // self.num_windows for part in (number, number + 1))
        return np.concatenate([np.arange(*self._bounds[shard : shard + 2]) for shard in order[first:end]])


def shard_bounds(shards: NDArray[np.int32]) -> NDArray[np.int64]:
    """The first utterance of each shard, followed by the number of utterances: `[S + 1]`, from `shards` `[N]`,
    ascending."""
    changes = np.diff(shards)
    if len(changes) and changes.min() < 0:
        raise DataError("the utterances of a set are not in the order of their shards; prepare it again")
    return np.concatenate([[0], np.flatnonzero(changes) + 1, [len(shards)]])


@dataclass
class Bucket:
    """Utterances of similar duration, and the number of micro-batches into which they are divided."""

    members: NDArray[np.int64]
    longest: float
    groups: int


class Dealing:
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
    for _ in range(times):
        splittable = (bucket for bucket in buckets if bucket.groups < len(bucket.members))
        max(splittable, key=lambda bucket: bucket.longest * len(bucket.members) / bucket.groups).groups += 1


def in_similar_groups(count: int, size: int, generator: np.random.Generator) -> list[int]:
    """Numbers below `count` in random order, with groups of `size` neighbours kept together. The remainder comes last;
    it is chosen at random, so that a window does not always end with its longest utterances."""
    whole, over = divmod(count, size)
    cut = int(generator.integers(whole + 1)) * size
    groups = np.delete(np.arange(count), np.s_[cut : cut + over]).reshape(whole, size)
    shuffled = generator.permuted(generator.permutation(groups), axis=1)
    return [*shuffled.ravel().tolist(), *generator.permutation(np.arange(cut, cut + over)).tolist()]


def _next_multiple(number: int, of: int) -> int:
    return -(-number // of) * of
