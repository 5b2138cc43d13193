"""Mixing patterns, which say which learners average in each round, with their matrices and spectra.

A mixing matrix T `[L, L]` has one column for each learner: column l holds the weights with which learner l mixes all
learners' models (W <- W T). It conserves the mean if it is doubly stochastic: no entry is negative, and all rows and
columns sum to 1. A `Topology` gives each learner its part of T_k, for every round k, without communication.

Built in are rings, pairs, exponential and complete graphs. Custom patterns are checked before
training begins. The spectrum of T tells how fast learners agree without gradients.
"""
# ruff: noqa: A002 - `round` is the name of an averaging round, as on the learner

import math
import operator
import random
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, wraps
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from starling.chance import derive_seed
from starling.errors import ConfigError
from starling.registry import Registry

Matrix = NDArray[np.float64]
Function = Callable[[int, int, int], Mapping[int, float]]
"""Function whose call `function(round, rank, world)` returns the learners that `rank` mixes in `round`, each with its
weight."""
TOLERANCE = 1e-12
"""Largest rounding error accepted in sums of weights."""


class Topology(ABC):
    """A mixing pattern, which gives the matrices T_k of W <- W T_k in the form of each learner's sources and targets.

    The methods are pure functions of round and rank, so learners agree without communication, and may query rounds in
    any order.

    Args:
        world: L, the number of learners, at least 1.

    Raises:
        ConfigError: `world` is below 1.
        ValueError: Raised by the methods for a round below 0 or a rank outside [0, world).
    """

    period: int | None = None
    """Number of rounds after which the pattern repeats, 1 if neighbours never change; None if it never repeats, or the
    period is unknown."""

    def __init__(self, world: int) -> None:
        if world < 1:
            raise ConfigError(f"topology: {world} learners; a topology needs at least 1")
        self.world = world
        """Number of learners, L."""

    @abstractmethod
    def sources(self, round: int, rank: int) -> Mapping[int, float]:
        """Return the learners whose models `rank` mixes into its own in `round`, each with its weight, in ascending
        order of rank.

        The weight of the learner's own model is 1 minus the sum of these weights. The mapping is empty if the learner
        does not take part in the round.
        """

    @abstractmethod
    def targets(self, round: int, rank: int) -> Sequence[int]:
        """Return the learners that mix the model of `rank` into their own in `round`, in ascending order."""

    def kept(self, round: int, rank: int) -> float:
        """Return the share of its own model that `rank` keeps in `round`, which is 1 minus the weights with which other
        learners mix that model. If averaging conserves the mean, this is also the weight of its own model."""
        return max(0.0, 1.0 - sum(self.sources(round, peer)[rank] for peer in self.targets(round, rank)))

    def matrix(self, round: int) -> Matrix:
        """Return the matrix T of `round`, `[L, L]`. Column l contains the weights with which learner l mixes all
        models."""
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
    """Return a uniform permutation for one round, as the learner at each place, and the place of each learner.

    Learners are sorted by `random.random()`, whose sequence Python guarantees for a given seed, so that learners agree
    across versions of Python.
    """
    generator = random.Random(derive_seed(seed, "topology", purpose, round))
    keys = [generator.random() for _ in range(world)]
    order = sorted(range(world), key=keys.__getitem__)
    places = [0] * world
    for place, rank in enumerate(order):
        places[rank] = place
    return tuple(order), tuple(places)


Others = Callable[[int, int, int, int], Iterable[int]]
"""Function whose call `others(round, rank, world, seed)` returns the learners that a learner mixes, with or without
itself."""


class Alike(Topology):
    """A topology in which each learner mixes its `neighbours` with equal weights. The learners in `mix_it`, by default
    its neighbours, mix its model."""

    def __init__(
        self, world: int, neighbours: Others, seed: int = 0, period: int | None = None, mix_it: Others | None = None
    ) -> None:
        super().__init__(world)
        self.period, self._seed = period, seed
        self._neighbours, self._mix_it = neighbours, mix_it or neighbours

    def sources(self, round: int, rank: int) -> Mapping[int, float]:
        neighbours = self._but_itself(self._neighbours, round, rank)
        return dict.fromkeys(neighbours, 1.0 / (len(neighbours) + 1))

    def targets(self, round: int, rank: int) -> Sequence[int]:
        return self._but_itself(self._mix_it, round, rank)

    def _but_itself(self, others: Others, round: int, rank: int) -> Sequence[int]:
        self._check(round, rank)
        return sorted({*others(round, rank, self.world, self._seed)} - {rank})


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


def _num_hops(world: int) -> int:
    return max(1, (world - 1).bit_length())


def _behind(round: int, rank: int, world: int, seed: int) -> Iterable[int]:
    return [(rank - 2 ** (round % _num_hops(world))) % world]


def _ahead(round: int, rank: int, world: int, seed: int) -> Iterable[int]:
    return [(rank + 2 ** (round % _num_hops(world))) % world]


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
    """Return a topology that applies half of each change. Its matrices are (I + T_k) / 2, which have no negative
    eigenvalue if T_k is symmetric."""
    return _Lazy(topology)


def ring(world: int) -> Topology:
    """A fixed ring: each learner averages with its left and right neighbours.

    Equation, with l counted modulo L >= 3::

        w_l <- (w_(l-1) + w_l + w_(l+1)) / 3

    Two learners average as a pair, 1/2 each.
    """
    return Alike(world, _beside, period=1)


def random_ring(world: int, seed: int) -> Topology:
    """A ring in a new random order each round.

    Equation, with R the matrix of `ring`::

        T_k = P_k^T R P_k

    and P_k a uniform permutation, drawn from `seed` and k and therefore the same on every learner.

    References:
        Zhang et al. 2020, "Improving Efficiency in Large-Scale Decentralized Distributed Training", arXiv 2002.01119.
    """
    return Alike(world, _beside_in_random_order, seed)


def pairs(world: int, seed: int) -> Topology:
    """A uniform perfect matching each round, drawn from `seed` and the round.

    Equation, for two learners l and j that are matched::

        w_l, w_j <- (w_l + w_j) / 2

    If the number of learners is odd, one of them does not take part in the round.

    References:
        Lian et al. 2018, "Asynchronous Decentralized Parallel Stochastic Gradient Descent", arXiv 1710.06952.
    """
    return Alike(world, _partner, seed)


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
    return Alike(world, _behind, period=_num_hops(world), mix_it=_ahead)


def complete_graph(world: int) -> Topology:
    """All learners average with equal weights: w_l <- (1/L) sum_j w_j."""
    return Alike(world, _everyone, period=1)


PATTERNS: dict[str, Callable[[int, int], Topology]] = {
    "ring": lambda world, seed: ring(world),
    "random": random_ring,
    "pairs": pairs,
    "exponential": lambda world, seed: exponential(world),
    "complete": lambda world, seed: complete_graph(world),
}
"""Patterns by their names in recipes; each is created from the number of learners and the seed of the run."""


_PLANS_KEPT = 512


@dataclass(frozen=True)
class _Plan:
    """The weights and targets of one round, by rank."""

    sources: list[dict[int, float]]
    targets: list[list[int]]


class _Custom(Topology):
    def __init__(self, world: int, function: Function, rounds: int, is_balanced: bool) -> None:
        super().__init__(world)
        self._is_balanced = is_balanced
        self._function = function
        self.period = getattr(function, "period", None)
        self._name = getattr(function, "__name__", repr(function))
        self._plan = lru_cache(maxsize=_PLANS_KEPT)(self._draw)
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
        plan = _Plan(sources, targets)
        if self.period and round >= self.period and plan != self._plan(round % self.period):
            raise ConfigError(
                f"pattern {self._name}, round {round}: differs from round {round % self.period}, although its `period` "
                f"is {self.period}; correct the period, or leave it out"
            )
        return plan

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


def is_connected(topology: Topology, rounds: int) -> bool:
    """Return whether the first `rounds` rounds, if they are repeated, bring the changes of every learner to every other
    learner along the directions of the graph."""
    links = np.eye(topology.world, dtype=bool)  # from row to column
    for k in range(rounds):
        for rank in range(topology.world):
            links[list(topology.sources(k, rank)), rank] = True
    for middle in range(topology.world):
        links |= links[:, middle, None] & links[None, middle, :]
    return bool(links.all())


def custom(world: int, function: Function, rounds: int | None = None, is_balanced: bool = True) -> Topology:
    """A topology from a function: `function(round, rank, world)` returns the learners that `rank` mixes, with weights.

    A learner's own weight is 1 minus the weights of its peers; peers of weight 0 count as absent. The function must be
    pure, because each learner calls it for all ranks. The matrix of a round is checked to be doubly stochastic when it
    is first needed. The first `rounds` rounds (default: 64, or 2 L if that is more) are checked immediately, and must
    connect all learners.

    If the pattern repeats, its number of rounds may be an attribute `period` of the function, 1 if neighbours never
    change. A round that differs from the one that it repeats is an error.

    With `is_balanced` False, which is for push-sum, only the sum is conserved. The weights with which other learners
    mix a learner must then sum to less than 1; the rest is the learner's own weight. Directions count: from each
    learner a path must lead to every other learner.

    Raises:
        ConfigError: The pattern is not doubly stochastic, not connected or not pure, or has another period; the message
            names the function.
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
    function = found
    if isinstance(found, type):
        topology = found(world, seed)
        function = wraps(found)(lambda number, rank, world: topology.sources(number, rank))
        function.period = topology.period  # type: ignore[attr-defined]
    return custom(world, function, is_balanced=is_balanced)


def identity(world: int) -> Matrix:
    """Return the matrix `[L, L]` under which no learner averages with another."""
    return np.eye(world)


def complete(world: int) -> Matrix:
    """Return the matrix `[L, L]` under which all learners average with equal weights 1/L."""
    return np.full((world, world), 1.0 / world)


def is_doubly_stochastic(mixing: Matrix, tolerance: float = TOLERANCE) -> bool:
    """Return whether a mixing matrix conserves the mean."""
    sums = np.concatenate([mixing.sum(axis=0), mixing.sum(axis=1)])
    return bool((mixing >= -tolerance).all() and np.allclose(sums, 1.0, rtol=0.0, atol=tolerance))


def spectral_gap(mixing: Matrix) -> float:
    """Return 1 - max |lambda| over the eigenvalues except that of the mean. If the result is 1, one round mixes
    completely; if it is 0, no number of rounds does.

    Args:
        mixing: A doubly stochastic matrix `[L, L]`.

    Raises:
        ValueError: The matrix is not doubly stochastic.
    """
    if not is_doubly_stochastic(mixing):
        raise ValueError("a spectral gap needs a doubly stochastic mixing matrix: rows and columns that sum to 1")
    moduli = np.abs(np.linalg.eigvals(mixing - complete(len(mixing))))
    return float(1.0 - moduli.max())


def mixing_product(topology: Topology, rounds: int, first: int = 0) -> Matrix:
    """Return the product `[L, L]` of the matrices of `rounds` rounds from round `first` on: T_first T_(first+1) ..."""
    product = identity(topology.world)
    for k in range(first, first + rounds):
        product = product @ topology.matrix(k)
    return product


def acceleration_constants(mixing: Matrix) -> tuple[float, float]:
    """The constants of A2CiD2, eta per round and alpha~, for averaging with the same neighbours in each round.

    Equation, with the Laplacian Lambda = 2 (I - T), in which an edge is the pair {i, j} that averages 2 T_ij times in
    each round, and Lambda^+ its pseudo-inverse::

        chi_1 = 1 / (second smallest eigenvalue of Lambda)
        chi_2 = max over edges  (e_i - e_j)^T Lambda^+ (e_i - e_j) / 2
        eta = 1 / (2 sqrt(chi_1 chi_2)),    alpha~ = sqrt(chi_1 / chi_2) / 2

    chi_1 is the lifetime of a difference, and chi_2 half of the largest resistance of an edge; chi_1 >= chi_2, and they
    are equal if all pairs average alike. Then alpha~ = 1/2, and nothing is accelerated; the same holds for one learner.

    Args:
        mixing: A symmetric, doubly stochastic matrix `[L, L]` of a connected graph.

    References:
        Nabli et al. 2023, arXiv 2306.08289, whose pairs average one at a time, at random.
    """
    if len(mixing) == 1:
        return 1.0, 0.5
    lasting = np.linalg.pinv(2.0 * (identity(len(mixing)) - mixing), hermitian=True)
    first, second = np.nonzero(np.triu(mixing, 1))
    resistance = lasting[first, first] + lasting[second, second] - 2.0 * lasting[first, second]
    chi_1, chi_2 = float(np.linalg.eigvalsh(lasting).max()), float(resistance.max()) / 2.0
    return 1.0 / (2.0 * math.sqrt(chi_1 * chi_2)), max(0.5, round(math.sqrt(chi_1 / chi_2) / 2.0, 9))


def accelerated_contraction(mixing: Matrix, rate: float, step: float) -> float:
    """Return the factor by which a round of A2CiD2, with the same symmetric matrix in each round, reduces the squared
    distance of the learners in the slowest mode, without gradients.

    Equation, with r the modulus of the largest eigenvalue of these matrices, one for each eigenvalue 1 - m of T except
    the mean's; c = (1 - exp(-2 eta)) / 2; and b = 2 alpha~ - 1::

        r^2,    (     1 - m - c b m          c    )
                ( -(1 - 2 c) b m          1 - 2 c )

    Each describes the effect of a round on the weights and on the lead of their momentum. It is the factor of a round
    in the long run: in the first rounds a difference may also grow.

    Args:
        mixing: A symmetric, doubly stochastic matrix `[L, L]`.
        rate: eta, per round.
        step: alpha~.
    """
    c, b = -0.5 * math.expm1(-2.0 * rate), 2.0 * step - 1.0
    m = 1.0 - np.linalg.eigvalsh(mixing)[:-1]
    rounds = np.empty((len(m), 2, 2))
    rounds[:, 0, 0], rounds[:, 0, 1] = 1.0 - m - c * b * m, c
    rounds[:, 1, 0], rounds[:, 1, 1] = -(1.0 - 2.0 * c) * b * m, 1.0 - 2.0 * c
    return float(np.abs(np.linalg.eigvals(rounds)).max(initial=0.0) ** 2)


def distance_of_noise(topology: Topology, rounds: int) -> float:
    """The consensus distance after `rounds` steps from equal weights, if each step adds independent noise to each
    learner.

    Equation, for W <- W T_k + U_k with U_k `[P, L]` independent, of variance s^2 in each column's norm::

        E (1/L) sum_l |w_l - mean|^2  =  s^2 trace(C) / L,    C <- T_k^T C T_k + (I - 1 1^T / L)

    With `complete` it is (L - 1) / L. A pattern that repeats one matrix with eigenvalues lambda_j has
    (1/L) sum_j 1 / (1 - lambda_j^2) after many rounds, so that it grows as its spectral gap closes. In SGD the noise is
    the learning rate times that of a mini-batch's gradient.

    Args:
        topology: The pattern.
        rounds: The number of steps, with a round in each.
    """
    apart = identity(topology.world) - complete(topology.world)
    covariance = np.zeros_like(apart)
    for k in range(rounds):
        mixing = topology.matrix(k)
        covariance = mixing.T @ covariance @ mixing + apart
    return float(np.trace(covariance)) / topology.world
