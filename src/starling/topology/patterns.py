"""Built-in patterns: rings, random rings, pairs, exponential and complete graphs, and these with super-learners."""
# ruff: noqa: A002 - `round` is the name of an averaging round, as on the learner

import random
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import numpy as np

from starling.chance import derive_seed
from starling.errors import ConfigError
from starling.topology.base import Matrix, Topology

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


class _Symmetric(Topology):
    """A topology in which neighbours mix each other, with equal weights."""

    @abstractmethod
    def _neighbours(self, round: int, rank: int) -> list[int]:
        """The learners that mix with `rank`, ascending, without `rank`."""

    def sources(self, round: int, rank: int) -> Mapping[int, float]:
        self._check(round, rank)
        neighbours = self._neighbours(round, rank)
        return dict.fromkeys(neighbours, 1.0 / (len(neighbours) + 1))

    def targets(self, round: int, rank: int) -> Sequence[int]:
        self._check(round, rank)
        return self._neighbours(round, rank)


class _Ring(_Symmetric):
    period = 1

    def _neighbours(self, round: int, rank: int) -> list[int]:
        return sorted({(rank - 1) % self.world, (rank + 1) % self.world} - {rank})


class _RandomRing(_Symmetric):
    def __init__(self, world: int, seed: int) -> None:
        super().__init__(world)
        self._seed = seed

    def _neighbours(self, round: int, rank: int) -> list[int]:
        order, places = _permutation(self.world, self._seed, "random ring", round)
        place = places[rank]
        return sorted({order[place - 1], order[(place + 1) % self.world]} - {rank})


class _Pairs(_Symmetric):
    def __init__(self, world: int, seed: int) -> None:
        super().__init__(world)
        self._seed = seed

    def _neighbours(self, round: int, rank: int) -> list[int]:
        order, places = _permutation(self.world, self._seed, "pairs", round)
        partner = places[rank] ^ 1
        return [order[partner]] if partner < self.world else []


class _Complete(_Symmetric):
    period = 1

    def _neighbours(self, round: int, rank: int) -> list[int]:
        return [*range(rank), *range(rank + 1, self.world)]


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
    return _Ring(world)


def random_ring(world: int, seed: int) -> Topology:
    """A ring in a new random order each round.

    Equation, with R the matrix of `ring`::

        T_k = P_k^T R P_k

    and P_k a uniform permutation, drawn from `seed` and k and therefore the same on every learner.

    References:
        Zhang et al. 2020, "Improving Efficiency in Large-Scale Decentralized Distributed Training", arXiv 2002.01119.
    """
    return _RandomRing(world, seed)


def pairs(world: int, seed: int) -> Topology:
    """A uniform perfect matching each round, drawn from `seed` and the round.

    Equation, for two learners l and j that are matched::

        w_l, w_j <- (w_l + w_j) / 2

    If the number of learners is odd, one of them does not take part in the round.

    References:
        Lian et al. 2018, "Asynchronous Decentralized Parallel Stochastic Gradient Descent", arXiv 1710.06952.
    """
    return _Pairs(world, seed)


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
    return _Complete(world)


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
