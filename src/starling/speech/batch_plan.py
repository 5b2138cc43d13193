"""Assigns utterances to mini-batches, and mini-batches to learners.

Utterances of similar duration are grouped, window by window (a window is a few shards of an epoch). Several domains are
mixed in proportions given by the recipe. For studies, the data can be divided among learners.

Each domain of a mixture has an endless stream of passes. A pass contains each utterance of the domain once, shard after
shard, with the shards in a new random order. Each epoch consists of the next segment of every stream. All utterances of
a domain are therefore drawn equally often: at the end of an epoch, some were drawn p times and the others p + 1 times.

Usually, all learners share one stream of mini-batches that contains each utterance once per epoch. With divided data,
each learner draws its mini-batches at random from its own part, and an epoch is only a number of mini-batches.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from starling.chance import derive_seed
from starling.configuration import Config
from starling.errors import ConfigError, DataError
from starling.speech.store import SpeechSets
from starling.workload import Weighting

MiniBatch = list[NDArray[np.int64]]  # the micro-batches of a mini-batch, each an array of utterance indices

_MICRO_BATCHES_PER_BUCKET = 4  # with fewer, small sets would have needlessly small batches
_MAX_SPLIT = 0.1  # fraction of micro-batches that may be split to complete groups of similar mini-batches


class BatchConfig(Config):
    """The grouping of utterances into mini-batches; the `batches:` section of a recipe."""

    max_duration: float = Field(default=60.0, gt=0)
    """Maximum seconds of audio in a micro-batch, including padding; it limits memory use."""
    accumulate: int = Field(default=1, ge=1)
    """Number of micro-batches per mini-batch, over which gradients are accumulated."""
    num_buckets: int = Field(default=20, ge=1)
    """Maximum number of groups of similar duration in a window."""
    window: int = Field(default=10, ge=1)
    """Number of shards that are open and shuffled together."""
    similar: int = Field(default=8, ge=1)
    """Number of consecutive mini-batches of similar duration. Up to this many learners can step together with little
    waiting."""
    shortest_first: bool = False
    """Whether the first epoch is sorted by duration (SortaGrad, Amodei et al. 2016), from the shortest to the longest
    utterance of each window. CTC learns sooner from short utterances."""
    weighting: Weighting = "batches"
    """How mini-batches are weighted when learners average gradients: `batches` weights them equally; `utterances` and
    `frames` weight them by their number of utterances or frames."""
    num_workers: Literal["auto"] | Annotated[int, Field(ge=0)] = "auto"
    """Number of processes per learner that load batches ahead. With 0, the learner loads batches itself. With auto, the
    number depends on the cores, the learners on this machine, the location of the data and the budget."""


class ShardWindows:
    """The windows of an epoch, which are shuffled separately. A window is a pure function of its epoch and number.

    This class arranges all shards of a set in random order, in windows of at most `most_shards` shards. Each utterance
    occurs once per epoch. `shards` (`[N]`, ascending) are the shards of the utterances.
    """

    def __init__(self, shards: NDArray[np.int32], most_shards: int, seed: int) -> None:
        self._bounds = shard_bounds(shards)
        self.num_windows = -(-(len(self._bounds) - 1) // most_shards)
        self._seed = seed

    def members(self, epoch: int, number: int) -> NDArray[np.int64]:
        """The utterances of a window, in any order. An utterance that a mixture draws twice occurs twice."""
        num_shards = len(self._bounds) - 1
        order = np.random.default_rng(derive_seed(self._seed, "shards", epoch)).permutation(num_shards)
        first, end = (part * num_shards // self.num_windows for part in (number, number + 1))
        return np.concatenate([np.arange(*self._bounds[shard : shard + 2]) for shard in order[first:end]])


def shard_bounds(shards: NDArray[np.int32]) -> NDArray[np.int64]:
    """The first utterance of each of S shards, followed by the number of utterances, `[S + 1]`. `shards` (`[N]`,
    ascending) are the shards of the utterances."""
    changes = np.diff(shards)
    if len(changes) and changes.min() < 0:
        raise DataError("the utterances of a set are not in the order of their shards; prepare it again")
    return np.concatenate([[0], np.flatnonzero(changes) + 1, [len(shards)]])


@dataclass
class Bucket:
    """A group of utterances of similar duration, and the number of micro-batches into which they are divided."""

    members: NDArray[np.int64]
    longest: float
    groups: int


class Dealing:
    """Divides a window's utterances into micro-batches, and these into mini-batches at random. The sizes of the
    micro-batches depend only on `durations` (`[n]`, seconds)."""

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
        """Draw random mini-batches, ordered from the shortest to the longest utterances."""
        micro_batches: MiniBatch = []
        for bucket in self.buckets:
            micro_batches += np.array_split(generator.permutation(bucket.members), bucket.groups)
        return [micro_batches[k : k + self.accumulate] for k in range(0, len(micro_batches), self.accumulate)]


def fill_buckets(durations: NDArray[np.float32], config: BatchConfig) -> list[Bucket]:
    """Divide utterances into buckets of about equal total duration, shortest utterances first. Each bucket has the
    number of groups that it needs."""
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
    """The numbers below `count` in random order, with groups of `size` neighbours kept together. The numbers that do
    not fill a group come last. They are chosen at random, so that a window does not always end with its longest
    utterances."""
    whole, over = divmod(count, size)
    cut = int(generator.integers(whole + 1)) * size
    groups = np.delete(np.arange(count), np.s_[cut : cut + over]).reshape(whole, size)
    shuffled = generator.permuted(generator.permutation(groups), axis=1)
    return [*shuffled.ravel().tolist(), *generator.permutation(np.arange(cut, cut + over)).tolist()]


def _next_multiple(number: int, of: int) -> int:
    return -(-number // of) * of


_PER_SECOND = 1000  # audio is counted in whole milliseconds, so that segments are exactly contiguous


SetNames = Annotated[tuple[str, ...], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]
"""Names of sets: a list, or a single name."""


class DomainConfig(Config):
    """One domain of a mixture."""

    sets: SetNames = Field(min_length=1)
    """Names of sets in `data.corpus`, or folders of prepared sets."""
    weight: float | None = Field(default=None, gt=0.0)
    """Weight of the domain, for `by: hand` only."""


DomainName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]


class MixtureConfig(Config):
    """The domains of the training data and their proportions; the `mixture:` section of a recipe.

    The share of domain d in the drawn data is p_d = w_d^temperature / sum over j of w_j^temperature.
    """

    domains: dict[DomainName, DomainConfig] = Field(min_length=1)
    """The domains, by name."""
    by: Literal["hours", "utterances", "hand"] = "hours"
    """The domain weights w_d: `hours` of audio, number of `utterances`, or, with `hand`, each domain's `weight`. With
    `utterances`, proportions are measured in utterances, and otherwise in seconds of audio."""
    temperature: float = Field(default=1.0, ge=0.0, le=1.0)
    """Exponent of the weights w_d: with 1, shares are proportional to the weights; with 0, they are equal."""
    exhausted: Literal["repeat", "stop"] = "repeat"
    """What happens if an epoch needs more data than a domain has: `repeat` begins the domain's next pass, and `stop`
    shortens the epoch for all domains."""

    @model_validator(mode="after")
    def _weights_where_they_count(self) -> Self:
        problems = []
        for name, domain in self.domains.items():
            if self.by == "hand" and domain.weight is None:
                problems.append(f"domains.{name}.weight is missing; by: hand needs one for each domain")
            if self.by != "hand" and domain.weight is not None:
                problems.append(f"domains.{name}.weight is only for by: hand; remove it, or set by to hand")
        named = [name for domain in self.domains.values() for name in domain.sets]
        problems += [
            f"the set {name!r} is named more than once" for name in dict.fromkeys(named) if named.count(name) > 1
        ]
        if problems:
            raise ValueError("; ".join(problems))
        return self


def quotas(config: MixtureConfig, amounts: Sequence[int]) -> list[int]:
    """The amount of each domain in an epoch, in the unit of `amounts` (milliseconds or utterances).

    Domain d contributes the amount p_d W, where W is the sum of `amounts`. With `exhausted: stop`, all contributions
    are scaled by the largest factor, at most 1, with which no domain contributes more than it has.
    """
    weights = [domain.weight for domain in config.domains.values()] if config.by == "hand" else amounts
    powers = np.asarray(weights, np.float64) ** config.temperature
    drawn = powers / powers.sum() * float(sum(amounts))
    if config.exhausted == "stop":
        drawn /= max(1.0, float((drawn / np.asarray(amounts, np.float64)).max()))
    return [max(1, round(float(each))) for each in drawn]


class MixedWindows:
    """The utterances of each epoch of a mixture, in windows of about `window` shards.

    Each window contains the same fraction of every domain's amount in the epoch. Raises DataError for a domain without
    utterances.
    """

    def __init__(self, config: MixtureConfig, utterances: SpeechSets, window: int, seed: int) -> None:
        bounds = shard_bounds(utterances.shards)
        self._streams = []
        for name, (first, end) in zip(config.domains, pairwise(utterances.domain_bounds), strict=True):
            if first == end:
                raise DataError(f"the domain {name} of the mixture has no utterances to train on; remove it")
            own = bounds[(bounds >= first) & (bounds <= end)]
            self._streams.append(_Stream(utterances.durations, own, config.by != "utterances", seed, name))
        self._drawn = quotas(config, [stream.amount for stream in self._streams])
        passes = [drawn / stream.amount for stream, drawn in zip(self._streams, self._drawn, strict=True)]
        self.passes = dict(zip(config.domains, passes, strict=True))
        """The number of passes over each domain in an epoch."""
        num_shards = sum(stream.num_shards * number for stream, number in zip(self._streams, passes, strict=True))
        self.num_windows = max(1, -(-round(num_shards) // window))

    def members(self, epoch: int, number: int) -> NDArray[np.int64]:
        parts = []
        for stream, drawn in zip(self._streams, self._drawn, strict=True):
            begin, end = (epoch * drawn + part * drawn // self.num_windows for part in (number, number + 1))
            parts += stream.between(begin, end)
        return np.concatenate([np.empty(0, np.int64), *parts])


class _Stream:
    """The consecutive passes over one domain. A position is the number of milliseconds of audio, or of utterances,
    since the beginning of the first pass."""

    def __init__(
        self, durations: NDArray[np.float32], bounds: NDArray[np.int64], by_seconds: bool, seed: int, name: str
    ) -> None:
        self._durations, self._bounds = durations, bounds
        self._by_seconds, self._seed, self._name = by_seconds, seed, name
        amounts = _amounts(durations[bounds[0] : bounds[-1]], by_seconds)
        self._shard_amounts = np.add.reduceat(amounts, bounds[:-1] - bounds[0])
        self.amount = int(self._shard_amounts.sum())
        """The amount of one pass, in milliseconds or utterances."""
        self.num_shards = len(bounds) - 1

    def between(self, begin: int, end: int) -> list[NDArray[np.int64]]:
        """The utterances that begin at positions `begin` to `end` of the stream. Each part of the result is at most a
        shard, or is a whole pass."""
        found = []
        for turn in range(begin // self.amount, -(-end // self.amount)):
            found += self._of_pass(turn, begin - turn * self.amount, end - turn * self.amount)
        return found

    def _of_pass(self, turn: int, begin: int, end: int) -> list[NDArray[np.int64]]:
        """The utterances that begin at positions `begin` to `end` of a pass."""
        if begin <= 0 and end >= self.amount:
            return [np.arange(self._bounds[0], self._bounds[-1])]
        order = self._generator(turn).permutation(self.num_shards)
        ends = np.cumsum(self._shard_amounts[order])
        starts = ends - self._shard_amounts[order]
        found = []
        for place in range(int(np.searchsorted(ends, begin, "right")), int(np.searchsorted(starts, end, "left"))):
            shard = int(order[place])
            first, behind = self._bounds[shard : shard + 2]
            members = np.arange(first, behind)
            if starts[place] < begin or ends[place] > end:  # the order within a shard matters only in a split shard
                members = self._generator(turn, shard).permutation(members)
                amounts = _amounts(self._durations[members], self._by_seconds)
                begins = starts[place] + np.cumsum(amounts) - amounts
                members = members[(begin <= begins) & (begins < end)]
            found.append(members)
        return found

    def _generator(self, *purpose: int) -> np.random.Generator:
        return np.random.default_rng(derive_seed(self._seed, "domain", self._name, *purpose))


def _amounts(durations: NDArray[np.float32], by_seconds: bool) -> NDArray[np.int64]:
    """The amount of each utterance: its length in milliseconds, at least 1, or 1 for every utterance."""
    if not by_seconds:
        return np.ones(len(durations), np.int64)
    return np.maximum(1, np.rint(np.asarray(durations, np.float64) * _PER_SECOND)).astype(np.int64)


class DirichletConfig(Config):
    """Parts in which speakers or domains have different frequencies. `alpha` determines how different they are."""

    kind: Literal["dirichlet"]
    alpha: float = Field(gt=0.0, le=1e6)
    """Concentration of the Dirichlet distribution. With a large value, each part resembles the whole set; with a value
    near 0, each part has only a few of the speakers or domains."""
    by: Literal["speaker", "domain"] = "speaker"
    """The labels that are divided among the parts: speakers, or the domains of the mixture."""


PartitionConfig = Literal["identical", "speaker", "domain"] | DirichletConfig
"""The utterances that a learner may see; the `partition:` key of a recipe."""


def divided_by(config: PartitionConfig) -> Literal["speaker", "domain"]:
    """The labels that a partition divides: the domains of a mixture, or otherwise speakers."""
    by = config.by if isinstance(config, DirichletConfig) else config
    return "domain" if by == "domain" else "speaker"


def divide(
    labels: NDArray[np.int32], seconds: NDArray[np.float32], num_parts: int, config: PartitionConfig, seed: int
) -> NDArray[np.int32]:
    """The part of each utterance, `[N]`, from 0 to num_parts - 1. No part is empty.

    `labels` (`[N]`) are the numbers of speakers or domains. Whole speakers, or whole domains if there are enough, are
    assigned in descending order of their amounts of audio, each to the part with the least audio so far. If there are
    fewer domains than parts, each domain gets a number of parts in proportion to its audio, and its utterances are
    divided among these parts at random.

    Raises ConfigError if there are too few utterances or speakers.
    """
    if len(labels) < num_parts:
        raise ConfigError(f"{len(labels)} utterances cannot be divided into {num_parts} parts: use fewer learners")
    labels = np.unique(labels, return_inverse=True)[1].astype(np.int32)
    generator = np.random.default_rng(derive_seed(seed, "partition"))
    if isinstance(config, DirichletConfig):
        return _dirichlet(labels, num_parts, config.alpha, generator)
    amounts = np.bincount(labels, weights=seconds).astype(np.float64)
    if len(amounts) >= num_parts:
        return _to_the_lightest(amounts, num_parts)[labels]
    if config == "speaker":
        raise ConfigError(
            f"{len(amounts)} speakers cannot be divided among {num_parts} learners: use at most {len(amounts)}, "
            "or another partition"
        )
    return _domains_among_more_parts(labels, amounts, num_parts, generator)


def _to_the_lightest(amounts: NDArray[np.float64], num_parts: int) -> NDArray[np.int32]:
    """The part of each label. Labels are assigned in descending order of their amounts of audio, each to the part with
    the least audio so far."""
    lightest = [(0.0, 0, part) for part in range(num_parts)]  # audio, number of labels, index of the part
    chosen = np.empty(len(amounts), np.int32)
    for label in np.argsort(-amounts, kind="stable").tolist():
        amount, count, part = lightest[0]
        chosen[label] = part
        heapq.heapreplace(lightest, (amount + float(amounts[label]), count + 1, part))
    return chosen


def _domains_among_more_parts(
    labels: NDArray[np.int32], amounts: NDArray[np.float64], num_parts: int, generator: np.random.Generator
) -> NDArray[np.int32]:
    """The part of each utterance. Each domain has one or more parts of its own: every additional part goes to the
    domain with the most audio per part."""
    counts = np.bincount(labels)
    owned = np.ones(len(amounts), np.int64)
    for _ in range(num_parts - len(amounts)):
        owned[int(np.argmax(np.where(owned < counts, amounts / owned, -1.0)))] += 1
    chosen = np.empty(len(labels), np.int32)
    for domain, first in enumerate(np.cumsum(owned) - owned):
        members = np.flatnonzero(labels == domain)
        chosen[generator.permutation(members)] = first + np.arange(len(members)) % owned[domain]
    return chosen


def _dirichlet(
    labels: NDArray[np.int32], num_parts: int, alpha: float, generator: np.random.Generator
) -> NDArray[np.int32]:
    """The part of each utterance. All parts have equal numbers of utterances, and the proportions of labels in a part
    are q ~ Dir(alpha p).

    p (`[L]`) are the proportions of the labels among all utterances. As in Hsu et al. 2019 (arXiv 1909.06335,
    section 3), utterances are drawn without replacement. When a label is used up, q is restricted to the other labels,
    and redrawn if it is then 0.
    """
    counts = np.bincount(labels)
    left = counts.copy()
    proportions = counts / counts.sum()
    by_label = np.split(np.argsort(labels, kind="stable"), np.cumsum(counts)[:-1])
    members = [generator.permutation(each) for each in by_label]
    chosen = np.empty(len(labels), np.int32)
    for part, size in enumerate(np.diff(np.arange(num_parts + 1) * len(labels) // num_parts).tolist()):
        wanted = generator.dirichlet(alpha * proportions)
        missing = size
        while missing:
            wanted = np.where(left > 0, wanted, 0.0)
            if wanted.sum() == 0:
                others = np.flatnonzero(left)
                wanted[others] = generator.dirichlet(alpha * proportions[others])
            taken = np.minimum(generator.multinomial(missing, wanted / wanted.sum()), left)
            for label in np.flatnonzero(taken).tolist():
                begin = counts[label] - left[label]
                chosen[members[label][begin : begin + taken[label]]] = part
            left -= taken
            missing -= int(taken.sum())
    return chosen


def describe_parts(parts: NDArray[np.int32], seconds: NDArray[np.float32], labels: NDArray[np.int32]) -> str:
    """A description of the smallest and largest amount of audio and number of labels in a part. All arguments are
    `[N]`."""
    amounts = np.bincount(parts, weights=seconds) / 3600
    numbers = np.bincount(np.unique(np.stack([parts, labels]), axis=1)[0])
    return (
        f"{amounts.min():.2f} to {amounts.max():.2f} h, "
        f"with {numbers.min()} to {numbers.max()} of {len(np.unique(labels))}"
    )
