"""Topologies, and the built-in patterns: rings, pairs, exponential and complete graphs, and super-learners."""
# ruff: noqa: A002 - `round` is the name of an averaging round, as on the learner

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from starling.chance import derive_seed
from starling.errors import ConfigError

Matrix = NDArray[np.float64]


class Topology(ABC):
    """Which learners mix whose models in each round: the T_k of W <- W T_k, as each learner's sources and targets.

    The methods are pure functions of round and rank, so learners agree without communication, and may ask for rounds in
    any order.

    Args:
        world: L, the number of learners, at least 1.

    Raises:
        ConfigError: `world` is below 1.
        ValueError: Raised by the methods for a round below 0 or a rank outside [0, world).
    """

    period: int | None = None
    """The number of rounds after which the pattern repeats; None: it never repeats, or the period is unknown."""

    def __init__(self, world: int) -> None:
        if world < 1:
            raise ConfigError(f"topology: {world} learners; a topology needs at least 1")
        self.world = world
        """L, the number of learners."""

    @abstractmethod
    def sources(self, round: int, rank: int) -> Mapping[int, float]:
        """The learners whose models `rank` mixes into its own in `round`, each with its weight, ascending by rank.

        Its own weight is 1 minus their sum. Empty: it does not take part in the round.
        """

    @abstractmethod
    def targets(self, round: int, rank: int) -> Sequence[int]:
        """The learners that mix the model of `rank` into their own in `round`, ascending."""

    def kept(self, round: int, rank: int) -> float:
        """The share of its own model that `rank` keeps in `round`: 1 minus the weights with which others mix it. Where
        averaging conserves the mean, it is also its own weight."""
        return max(0.0, 1.0 - sum(self.sources(round, peer)[rank] for peer in self.targets(round, rank)))

    def matrix(self, round: int) -> Matrix:
        """The matrix T of `round`, `[L, L]`: column l holds the weights with which learner l mixes all models."""
        mixing = np.zeros((self.world, self.world))
        for rank in range(self.world):
            taken = self.sources(round, rank)
            mixing[list(taken), rank] = list(taken.values())
            mixing[rank, rank] = max(0.0, 1.0 - sum(taken.values()))
        return mixing

    def _check(self, round: int, rank: int) -> None:
        if round < 0 or not 0 <= rank < self.world:
            raise ValueError(
                f"round {round}, learner {rank}: rounds are numbered from 0, and learners are 0 to {self.world - 1}"
            )


_ROUNDS_KEPT = 2048  # 2 KB each for 128 learners; an evicted permutation is drawn again, with the same result


@lru_cache(maxsize=_ROUNDS_KEPT)
def _permutation(world: int, seed: int, purpose: str, round: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A uniform permutation for one round: the learner at each place, and the place of each learner.

    It sorts by `random.random()`, whose sequence Python guarantees for a given seed, so learners agree across versions.
    """
    generator = random.Random(derive_seed(seed, "topology", purpose, round))
    keys = [generator.random() for _ in range(world)]
    order = sorted(range(world), key=keys.__getitem__)
    places = [0] * world
    for place, rank in enumerate(order):
        places[rank] = place
    return tuple(order), tuple(places)


class Mutual(Topology):
    """Neighbours mix each other, with equal weights: those of a learner are `neighbours(round, rank, world, seed)`,
    itself included or not."""

    def __init__(
        self,
        world: int,
        neighbours: Callable[[int, int, int, int], Iterable[int]],
        seed: int = 0,
        period: int | None = None,
    ) -> None:
        super().__init__(world)
        self.period = period
        self._neighbours, self._seed = neighbours, seed

    def sources(self, round: int, rank: int) -> Mapping[int, float]:
        neighbours = self.targets(round, rank)
        return dict.fromkeys(neighbours, 1.0 / (len(neighbours) + 1))

    def targets(self, round: int, rank: int) -> Sequence[int]:
        self._check(round, rank)
        return sorted({*self._neighbours(round, rank, self.world, self._seed)} - {rank})


def _beside(round: int, rank: int, world: int, seed: int) -> Iterable[int]:
    return (rank - 1) % world, (rank + 1) % world


def _beside_in_random_order(round: int, rank: int, world: int, seed: int) -> Iterable[int]:
    order, places = _permutation(world, seed, "random ring", round)
    return order[places[rank] - 1], order[(places[rank] + 1) % world]


def _partner(round: int, rank: int, world: int, seed: int) -> Iterable[int]:
    order, places = _permutation(world, seed, "pairs", round)
    place = places[rank] ^ 1
    return order[place : place + 1]


def _everyone(round: int, rank: int, world: int, seed: int) -> Iterable[int]:
    return range(world)


class _Exponential(Topology):
    def __init__(self, world: int) -> None:
        super().__init__(world)
        self._hops = max(1, (world - 1).bit_length())
        self.period = self._hops

    def sources(self, round: int, rank: int) -> Mapping[int, float]:
        self._check(round, rank)
        return {} if self.world == 1 else {(rank - 2 ** (round % self._hops)) % self.world: 0.5}

    def targets(self, round: int, rank: int) -> Sequence[int]:
        self._check(round, rank)
        return [] if self.world == 1 else [(rank + 2 ** (round % self._hops)) % self.world]


class _Hierarchical(Topology):
    def __init__(self, outer: Topology, per_node: int) -> None:
        if per_node < 1:
            raise ConfigError(f"topology: {per_node} learners per super-learner; it needs at least 1")
        super().__init__(outer.world * per_node)
        self.period = outer.period
        self._outer = outer
        self._per_node = per_node

    def sources(self, round: int, rank: int) -> Mapping[int, float]:
        self._check(round, rank)
        node = rank // self._per_node
        taken = dict(self._outer.sources(round, node))
        taken[node] = max(0.0, 1.0 - sum(taken.values()))
        return {
            peer: taken[other] / self._per_node
            for other in sorted(taken)
            for peer in self._members(other)
            if peer != rank and taken[other] > 0.0
        }

    def targets(self, round: int, rank: int) -> Sequence[int]:
        self._check(round, rank)
        node = rank // self._per_node
        takers = set(self._outer.targets(round, node))
        if sum(self._outer.sources(round, node).values()) < 1.0:
            takers.add(node)
        return [peer for other in sorted(takers) for peer in self._members(other) if peer != rank]

    def matrix(self, round: int) -> Matrix:
        inside = np.full((self._per_node, self._per_node), 1.0 / self._per_node)
        return np.kron(self._outer.matrix(round), inside)

    def _members(self, node: int) -> range:
        return range(node * self._per_node, (node + 1) * self._per_node)


class _Lazy(Topology):
    def __init__(self, topology: Topology) -> None:
        super().__init__(topology.world)
        self.period = topology.period
        self._topology = topology

    def sources(self, round: int, rank: int) -> Mapping[int, float]:
        return {peer: 0.5 * weight for peer, weight in self._topology.sources(round, rank).items()}

    def targets(self, round: int, rank: int) -> Sequence[int]:
        return self._topology.targets(round, rank)


def lazy(topology: Topology) -> Topology:
    """Half of each change: (I + T_k) / 2, which has no negative eigenvalue if T_k is symmetric."""
    return _Lazy(topology)


def ring(world: int) -> Topology:
    """A fixed ring: each learner averages with its left and right neighbours.

    Equation, with l counted modulo L >= 3::

        w_l <- (w_(l-1) + w_l + w_(l+1)) / 3

    Two learners average as a pair, 1/2 each.
    """
    return Mutual(world, _beside, period=1)


def random_ring(world: int, seed: int) -> Topology:
    """A ring in a new random order each round.

    Equation, with R the matrix of `ring`::

        T_k = P_k^T R P_k

    and P_k a uniform permutation, drawn from `seed` and k and therefore the same on every learner.

    References:
        Zhang et al. 2020, "Improving Efficiency in Large-Scale Decentralized Distributed Training", arXiv 2002.01119.
    """
    return Mutual(world, _beside_in_random_order, seed)


def pairs(world: int, seed: int) -> Topology:
    """A uniform perfect matching each round, drawn from `seed` and the round.

    Equation, for two learners l and j that are matched::

        w_l, w_j <- (w_l + w_j) / 2

    If the number of learners is odd, one of them does not take part in the round.

    References:
        Lian et al. 2018, "Asynchronous Decentralized Parallel Stochastic Gradient Descent", arXiv 1710.06952.
    """
    return Mutual(world, _partner, seed)


def exponential(world: int) -> Topology:
    """The one-peer exponential graph: a learner's source is at distance 1, then 2, 4, and so on.

    Equation, with l counted modulo L and m = ceil(log2 L)::

        w_l <- (w_l + w_(l - 2^(k mod m))) / 2

    The graph is directed: in general a learner's source is not its target. If L is a power of two, any log2 L
    successive rounds average exactly.

    References:
        Ying et al. 2021, "Exponential Graph is Provably Efficient for Decentralized Deep Training", arXiv 2110.13363.
        Assran et al. 2019, "Stochastic Gradient Push for Distributed Deep Learning", arXiv 1811.10792.
    """
    return _Exponential(world)


def complete_graph(world: int) -> Topology:
    """All learners average with equal weights: w_l <- (1/L) sum_j w_j."""
    return Mutual(world, _everyone, period=1)


def hierarchical(outer: Topology, per_node: int) -> Topology:
    """Super-learners of G learners, mixed by the pattern `outer`.

    Equation, with T_k the matrix of `outer` and 1 the vector of G ones::

        T_k (x) 1 1^T / G

    Args:
        outer: The pattern of the super-learners.
        per_node: G. Learner r is number r % G of super-learner r // G.

    References:
        Zhang et al. 2019, "A Highly Efficient Distributed Deep Learning System for Automatic Speech Recognition",
        arXiv 1907.05701.
    """
    return _Hierarchical(outer, per_node)


PATTERNS: dict[str, Callable[[int, int], Topology]] = {
    "ring": lambda world, seed: ring(world),
    "random": random_ring,
    "pairs": pairs,
    "exponential": lambda world, seed: exponential(world),
    "complete": lambda world, seed: complete_graph(world),
}
"""Patterns by their names in recipes; each is created from the number of learners and the seed of the run."""
