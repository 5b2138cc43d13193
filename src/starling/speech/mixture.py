"""Training on several domains at once, in proportions given by the recipe.

Each domain has an endless stream of passes. A pass contains each of its utterances once, shard after shard, with the
shards in a new random order. Each epoch takes the next segment of every stream. So all utterances of a domain are drawn
equally often: at the end of an epoch, some were drawn p times and the others p + 1 times.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from starling.chance import derive_seed
from starling.configuration import Config
from starling.errors import DataError
from starling.speech.batch_plan import shard_bounds
from starling.speech.store import SpeechSets

_PER_SECOND = 1000  # audio is counted in whole milliseconds, so that segments are exactly contiguous


SetNames = Annotated[tuple[str, ...], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]
"""Names of sets: a list, or a single name."""


class DomainConfig(Config):
    """One domain of a mixture."""

    sets: SetNames = Field(min_length=1)
    """Names of sets of `data.corpus`, or folders of prepared sets."""
    weight: float | None = Field(default=None, gt=0.0)
    """The weight of the domain; only for `by: hand`."""


DomainName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]


class MixtureConfig(Config):
    """The domains of the training data and their proportions; the `mixture:` section of a recipe.

    Domain d makes up the share p_d = w_d^temperature / sum over j of w_j^temperature of the drawn data.
    """

    domains: dict[DomainName, DomainConfig] = Field(min_length=1)
    """The domains, by name."""
    by: Literal["hours", "utterances", "hand"] = "hours"
    """The domain weights w_d: hours, number of utterances, or `weight` by hand. Proportions are measured in utterances
    with `utterances`, otherwise in seconds of audio."""
    temperature: float = Field(default=1.0, ge=0.0, le=1.0)
    """Exponent of the weights w_d: 1 gives proportions of w_d, 0 equal shares."""
    exhausted: Literal["repeat", "stop"] = "repeat"
    """What happens when an epoch needs more of a domain than it has: `repeat` begins its next pass, `stop` shortens the
    epoch for all domains."""

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

    Domain d contributes p_d W, with W the amount of all domains together. With `exhausted: stop` all amounts are scaled
    by the largest factor, at most 1, with which no domain contributes more than it has.
    """
    weights = [domain.weight for domain in config.domains.values()] if config.by == "hand" else amounts
    powers = np.asarray(weights, np.float64) ** config.temperature
    drawn = powers / powers.sum() * float(sum(amounts))
    if config.exhausted == "stop":
        drawn /= max(1.0, float((drawn / np.asarray(amounts, np.float64)).max()))
    return [max(1, round(float(each))) for each in drawn]


class MixedWindows:
    """The data of each epoch of a mixture, in windows of about `window` shards.

    Each window contains the same fraction of each domain's amount in the epoch. Raises DataError for a domain without
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
    """The consecutive passes of one domain. Positions count milliseconds of audio, or utterances, from the first
    pass."""

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
        """The utterances that begin at positions `begin` to `end`, in parts of at most a shard or a whole pass."""
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
            if starts[place] < begin or ends[place] > end:  # the order within a shard matters only if it is split
                members = self._generator(turn, shard).permutation(members)
                amounts = _amounts(self._durations[members], self._by_seconds)
                begins = starts[place] + np.cumsum(amounts) - amounts
                members = members[(begin <= begins) & (begins < end)]
            found.append(members)
        return found

    def _generator(self, *purpose: int) -> np.random.Generator:
        return np.random.default_rng(derive_seed(self._seed, "domain", self._name, *purpose))


def _amounts(durations: NDArray[np.float32], by_seconds: bool) -> NDArray[np.int64]:
    """The amount of each utterance: milliseconds, at least 1; or 1 for each utterance."""
    if not by_seconds:
        return np.ones(len(durations), np.int64)
    return np.maximum(1, np.rint(np.asarray(durations, np.float64) * _PER_SECOND)).astype(np.int64)
