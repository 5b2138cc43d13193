"""Custom patterns, checked before training begins, and the lookup of all patterns by name."""
# ruff: noqa: A002 - `round` is the name of an averaging round, as on the learner

import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeGuard

import numpy as np

from starling.errors import ConfigError
from starling.registry import Registry
from starling.topology.analysis import TOLERANCE, is_connected
from starling.topology.patterns import PATTERNS, Matrix, Topology

Function = Callable[[int, int, int], Mapping[int, float]]
"""`function(round, rank, world)`: the learners that `rank` mixes in `round`, each with its weight."""

_ROUNDS_KEPT = 512


@dataclass(frozen=True)
class _Plan:
    """One round, by rank."""

    sources: list[dict[int, float]]
    targets: list[list[int]]


class _Custom(Topology):
    def __init__(self, world: int, function: Function, rounds: int, is_balanced: bool) -> None:
        super().__init__(world)
        self._is_balanced = is_balanced
        self._function = function
        self._name = getattr(function, "__name__", repr(function))
        self._plan = lru_cache(maxsize=_ROUNDS_KEPT)(self._draw)
        for k in range(rounds):
            if self._draw(k) != self._plan(k):
                raise ConfigError(
                    f"pattern {self._name}, round {k}: two calls gave different results, so learners would disagree; "
                    "derive its randomness from the round and a fixed seed alone"
                )
        if not is_connected(self, rounds):
            raise ConfigError(
                f"pattern {self._name}: not connected within {rounds} rounds, so some learners would never mix; "
                "add edges, or check more rounds"
            )

    def sources(self, round: int, rank: int) -> Mapping[int, float]:
        self._check(round, rank)
        return self._plan(round).sources[rank]

    def targets(self, round: int, rank: int) -> Sequence[int]:
        self._check(round, rank)
        return self._plan(round).targets[rank]

    def matrix(self, round: int) -> Matrix:
        mixing = super().matrix(round)
        if not self._is_balanced:
            mixing[np.diag_indices(self.world)] = [self.kept(round, rank) for rank in range(self.world)]
        return mixing

    def _draw(self, round: int) -> _Plan:
        """The checked result of the function for all learners in one round."""
        sources = [self._ask(round, rank) for rank in range(self.world)]
        given: defaultdict[int, float] = defaultdict(float)
        targets: list[list[int]] = [[] for _ in sources]
        for rank, taken in enumerate(sources):
            for peer, weight in taken.items():
                given[peer] += weight
                targets[peer].append(rank)
        for rank, taken in enumerate(sources):
            if not self._is_balanced and given[rank] > 1.0 - TOLERANCE:
                raise ConfigError(
                    f"pattern {self._name}, round {round}, learner {rank}: others' weights for it sum to "
                    f"{given[rank]:.6g}, so that nothing of its model would stay with it; make their sum less than 1"
                )
            if self._is_balanced and abs(given[rank] - sum(taken.values())) > TOLERANCE:
                raise ConfigError(
                    f"pattern {self._name}, round {round}, learner {rank}: not doubly stochastic, so averaging would "
                    f"change the mean: its weights for others sum to {sum(taken.values()):.6g}, others' weights for it "
                    f"to {given[rank]:.6g}; make the two sums equal"
                )
        return _Plan(sources, targets)

    def _ask(self, round: int, rank: int) -> dict[int, float]:
        where = f"pattern {self._name}, round {round}, learner {rank}"
        answer = self._function(round, rank, self.world)
        if not isinstance(answer, Mapping):
            raise ConfigError(f"{where}: returned {answer!r}; return a mapping from peers to weights")
        taken: dict[int, float] = {}
        for peer, weight in answer.items():
            try:
                number, share = operator.index(peer), float(weight)
            except (TypeError, ValueError):
                raise ConfigError(f"{where}: {peer!r}: {weight!r} is not a rank and a weight") from None
            if not 0 <= number < self.world:
                raise ConfigError(f"{where}: mixes learner {number}; peers are 0 to {self.world - 1}")
            if number == rank:
                raise ConfigError(
                    f"{where}: mixes itself; leave it out: its own weight is 1 minus the sum of the others"
                )
            if not 0.0 <= share <= 1.0:
                raise ConfigError(f"{where}: mixes learner {number} with weight {share}; weights are between 0 and 1")
            if share > 0.0:
                taken[number] = share
        if self._is_balanced and sum(taken.values()) > 1.0 + TOLERANCE:
            raise ConfigError(
                f"{where}: the weights of its peers sum to {sum(taken.values()):.6g}; its own weight is 1 minus their "
                "sum, so make it at most 1"
            )
        return dict(sorted(taken.items()))


def custom(world: int, function: Function, rounds: int | None = None, is_balanced: bool = True) -> Topology:
    """A topology from a function: `function(round, rank, world)` returns the learners that `rank` mixes, with weights.

    A learner's own weight is 1 minus those of its peers; peers of weight 0 count as absent. The function must be pure:
    each learner calls it for all ranks. The matrix of every round is checked to be doubly stochastic when it is first
    needed. The first `rounds` (default: 64, or 2 L if that is more) are checked immediately, and must connect all
    learners.

    If it is not `is_balanced`, for push-sum, only the sum is conserved: others' weights for a learner must sum to less
    than 1, and what is left is its own weight. Directions count: from each learner a path must lead to every other.

    Raises:
        ConfigError: The pattern is not doubly stochastic, not connected or not pure; the message names the function.
    """
    return _Custom(world, function, max(64, 2 * world) if rounds is None else rounds, is_balanced)


def _is_pattern(found: object) -> TypeGuard[Any]:
    return issubclass(found, Topology) if isinstance(found, type) else callable(found)


_REGISTRY: Registry[Any] = Registry(
    PATTERNS,
    "starling.topologies",
    accepts=_is_pattern,
    wanted="a function of (round, rank, world) or a class of starling.Topology",
    prefix="pattern ",
    outside="module:function",
)


def check_pattern(pattern: str) -> str:
    """Check that `find_topology` knows a pattern, and return it.

    Raises:
        ValueError: The pattern is unknown. Pydantic collects these errors.
    """
    try:
        _REGISTRY.find(pattern)
    except ConfigError as error:
        raise ValueError(str(error)) from error
    return pattern


def find_topology(pattern: str, world: int, seed: int, is_balanced: bool = True) -> Topology:
    """Find a topology: a name in `PATTERNS`, an entry point of the group `starling.topologies`, or `module:name`.

    A custom pattern is a function of (round, rank, world), see `custom`, or a subclass of `Topology` that is created
    from `world` and `seed`; its `sources` are checked like those of a function, whether they are balanced or not.

    Raises:
        ConfigError: No pattern has this name, or it is not valid for this number of learners.
    """
    found = _REGISTRY.find(pattern)
    if pattern in PATTERNS:
        return PATTERNS[pattern](world, seed)
    function = _sources_of(found(world, seed)) if isinstance(found, type) else found
    return custom(world, function, is_balanced=is_balanced)


def _sources_of(topology: Topology) -> Function:
    def sources(round: int, rank: int, world: int) -> Mapping[int, float]:
        return topology.sources(round, rank)

    sources.__name__ = type(topology).__name__
    return sources
