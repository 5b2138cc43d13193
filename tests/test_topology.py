"""Topologies and mixing matrices against naive matrices, exact enumeration and closed forms."""

import itertools
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from starling.errors import ConfigError
from starling.topology import (
    PATTERNS,
    Matrix,
    Topology,
    check_pattern,
    complete,
    complete_graph,
    custom,
    distance_of_noise,
    exponential,
    find_topology,
    identity,
    is_connected,
    is_doubly_stochastic,
    lazy,
    mixing_product,
    pairs,
    random_ring,
    ring,
    spectral_gap,
)
from tests.contract.oracle import expected_contraction, pairs_contraction, random_ring_contraction, ring_eigenvalues

names = st.sampled_from(sorted(PATTERNS))
worlds = st.integers(1, 40)
seeds = st.integers(0, 2**40)
rounds = st.integers(0, 10**6)


def naive_ring(world: int) -> Matrix:
    """A ring of at least three, from shifted identities."""
    return (identity(world) + np.roll(identity(world), 1, axis=0) + np.roll(identity(world), -1, axis=0)) / 3


def naive_pairs(order: Sequence[int]) -> Matrix:
    """The matching of the learners at places 0 and 1, 2 and 3, ..."""
    mixing = identity(len(order))
    for one, other in zip(order[::2], order[1::2], strict=False):
        mixing[np.ix_([one, other], [one, other])] = 0.5
    return mixing


def seen_by_learners(topology: Topology, k: int) -> Matrix:
    """T of a round, put together from what each learner is told of its sources."""
    mixing = np.zeros((topology.world, topology.world))
    for rank in range(topology.world):
        for peer, weight in topology.sources(k, rank).items():
            mixing[peer, rank] += weight
        mixing[rank, rank] += 1 - mixing[:, rank].sum()
    return mixing


def check_consistent(topology: Topology, k: int) -> None:
    """Sources, targets and matrix of a round tell the same."""
    mixing = topology.matrix(k)
    assert is_doubly_stochastic(mixing)
    np.testing.assert_allclose(seen_by_learners(topology, k), mixing, rtol=0, atol=1e-12)
    for rank in range(topology.world):
        others = [peer for peer in range(topology.world) if peer != rank]
        sources = topology.sources(k, rank)
        assert list(sources) == [peer for peer in others if mixing[peer, rank] > 0]
        assert list(topology.targets(k, rank)) == [peer for peer in others if mixing[rank, peer] > 0]
        assert all(weight > 0 for weight in sources.values())
        assert sum(sources.values()) <= 1 + 1e-12


@pytest.mark.parametrize("world", [1, 2, 5, 64])
def test_the_complete_graph_mixes_at_once_and_the_identity_never(world: int) -> None:
    """Eigenvalues other than the mean's are all 0, or all 1."""
    assert spectral_gap(complete(world)) == pytest.approx(1.0)
    assert spectral_gap(identity(world)) == pytest.approx(1.0 if world == 1 else 0.0)


@pytest.mark.parametrize("world", [3, 4, 8, 25])
def test_a_ring_has_the_gap_of_its_closed_form(world: int) -> None:
    """The eigenvalues of the ring with 1/3 each are (1 + 2 cos(2 pi j / L)) / 3."""
    expected = 1 - max(abs(1 + 2 * np.cos(2 * np.pi * j / world)) / 3 for j in range(1, world))
    assert spectral_gap(naive_ring(world)) == pytest.approx(expected)


def test_a_matrix_that_moves_the_mean_is_refused() -> None:
    """A column that does not sum to 1 is not a mixing that conserves the mean."""
    mixing = complete(3)
    mixing[0, 0] += 0.1
    assert not is_doubly_stochastic(mixing)
    with pytest.raises(ValueError, match="doubly stochastic"):
        spectral_gap(mixing)


@settings(max_examples=150, deadline=None)
@given(names, worlds, seeds, rounds)
def test_every_pattern_conserves_the_mean_and_tells_all_learners_the_same(
    name: str, world: int, seed: int, k: int
) -> None:
    """In every round T is doubly stochastic, and sources and targets are its columns and rows."""
    topology = PATTERNS[name](world, seed)
    assert topology.world == world
    check_consistent(topology, k)


@pytest.mark.parametrize("world", [3, 4, 7, 40])
def test_the_fixed_ring_is_its_matrix_in_every_round(world: int) -> None:
    """One third each for itself, left and right."""
    for k in (0, 1, 1000):
        np.testing.assert_allclose(ring(world).matrix(k), naive_ring(world), atol=1e-15)


@pytest.mark.parametrize("name", ["ring", "random", "pairs", "exponential", "complete"])
def test_two_learners_are_a_pair_and_one_is_alone(name: str) -> None:
    """Every pattern of two is 1/2 each in every round, and of one nothing."""
    for k in range(5):
        np.testing.assert_array_equal(PATTERNS[name](2, 7).matrix(k), complete(2))
        assert PATTERNS[name](1, 7).sources(k, 0) == {}
        assert list(PATTERNS[name](1, 7).targets(k, 0)) == []


@settings(max_examples=60, deadline=None)
@given(st.integers(3, 40), seeds, rounds)
def test_a_random_ring_is_one_ring_through_all_learners(world: int, seed: int, k: int) -> None:
    """T_k = P_k^T T_1 P_k: walking from neighbour to neighbour passes every learner once, 1/3 each."""
    topology = random_ring(world, seed)
    order = [0, min(topology.sources(k, 0))]
    while len(order) < world:
        (following,) = set(topology.sources(k, order[-1])) - {order[-2]}
        order.append(following)
    assert sorted(order) == list(range(world))
    permutation = identity(world)[order]
    np.testing.assert_allclose(topology.matrix(k), permutation.T @ naive_ring(world) @ permutation, atol=1e-15)


@settings(max_examples=60, deadline=None)
@given(worlds, seeds, rounds)
def test_pairs_are_a_perfect_matching_and_of_an_odd_number_one_sits_out(world: int, seed: int, k: int) -> None:
    """Each learner is its partner's partner; T is a projection."""
    topology = pairs(world, seed)
    partners = [list(topology.sources(k, rank)) for rank in range(world)]
    assert sum(not partner for partner in partners) == world % 2
    for rank, partner in enumerate(partners):
        assert all(partners[other] == [rank] and other != rank for other in partner)
        assert list(topology.sources(k, rank).values()) == [0.5] * len(partner)
    np.testing.assert_allclose(topology.matrix(k) @ topology.matrix(k), topology.matrix(k), atol=1e-15)


@pytest.mark.parametrize("make", [random_ring, pairs])
def test_all_draw_the_same_round_from_the_seed_whoever_asks_first(make: Callable[[int, int], Topology]) -> None:
    """A round is a function of seed and number: not of the object, nor of the order of asking."""
    one, other = make(16, 5), make(16, 5)
    forward = [one.matrix(k) for k in range(50)]
    backward = [other.matrix(k) for k in reversed(range(50))][::-1]
    np.testing.assert_array_equal(forward, backward)


@pytest.mark.parametrize("make", [random_ring, pairs])
def test_rounds_and_seeds_differ(make: Callable[[int, int], Topology]) -> None:
    """Of 16 learners there are millions of rings and matchings: a hundred draws are all different."""
    drawn = [make(16, seed).matrix(k).tobytes() for seed in range(4) for k in range(25)]
    assert len(set(drawn)) == 100


def test_another_process_draws_the_same() -> None:
    """Learners are processes: nothing of the draw depends on the process, such as the salt of `hash`."""
    text = (
        "from starling.topology import random_ring, pairs; rings, matchings = random_ring(9, 3), pairs(9, 3); "
        "print([[*rings.targets(k, 4), *matchings.targets(k, 4)] for k in range(9)])"
    )
    other = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True, timeout=60)
    rings, matchings = random_ring(9, 3), pairs(9, 3)
    mine = [[*rings.targets(k, 4), *matchings.targets(k, 4)] for k in range(9)]
    assert other.stdout.strip() == str(mine)


def test_draws_never_change() -> None:
    """A resumed run and learners of other versions of Python go through the same rounds: these are pinned."""
    assert [random_ring(7, 1).targets(k, 0) for k in range(4)] == [[2, 6], [3, 5], [4, 5], [2, 4]]
    assert [pairs(7, 1).targets(k, 0) for k in range(4)] == [[3], [], [5], [2]]


@pytest.mark.parametrize("make", [random_ring, pairs])
def test_rounds_that_fell_out_of_memory_are_drawn_again_the_same(make: Callable[[int, int], Topology]) -> None:
    """What is kept is bounded; learners that drift by more rounds than are kept still agree."""
    topology = make(6, 11)
    first = [topology.sources(k, 2) for k in range(20)]
    for k in range(20, 3000):
        topology.sources(k, 2)
    assert [topology.sources(k, 2) for k in range(20)] == first


@pytest.mark.parametrize("world", [2, 4, 8, 32])
@pytest.mark.parametrize("first", [0, 1, 5])
def test_the_exponential_graph_averages_exactly_in_log2_rounds(world: int, first: int) -> None:
    """With L a power of two, any log2 L rounds in a row are the complete average, and one round fewer is not."""
    hops = int(np.log2(world))
    np.testing.assert_array_equal(mixing_product(exponential(world), hops, first), complete(world))
    assert not np.allclose(mixing_product(exponential(world), hops - 1, first), complete(world))


def test_the_exponential_graph_is_directed_and_doubles_its_distance() -> None:
    """In round k learner l mixes l - 2^(k mod ceil(log2 L)), and is mixed by l + 2^(k mod ceil(log2 L))."""
    topology = exponential(6)
    assert [topology.sources(k, 1) for k in range(4)] == [{0: 0.5}, {5: 0.5}, {3: 0.5}, {0: 0.5}]
    assert [list(topology.targets(k, 1)) for k in range(4)] == [[2], [3], [5], [2]]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 9, 64])
def test_eigenvalues_of_the_ring_have_their_closed_form(world: int) -> None:
    """Those of the matrix, and the square of the largest but the mean's is what a round keeps."""
    closed = ring_eigenvalues(world)
    np.testing.assert_allclose(np.sort(closed), np.linalg.eigvalsh(ring(world).matrix(0)), atol=1e-12)
    worst = max((value**2 for value in closed[1:]), default=0.0)
    assert expected_contraction(ring(world)) == pytest.approx(worst, abs=1e-12)


def worst_mode(matrices: Sequence[Matrix]) -> tuple[float, float]:
    """Smallest and largest eigenvalue, orthogonal to the mean, of the average of T T^T."""
    average = np.mean([mixing @ mixing.T for mixing in matrices], axis=0)
    eigenvalues, vectors = np.linalg.eigh(average)
    orthogonal = [value for value, vector in zip(eigenvalues, vectors.T, strict=True) if abs(vector.sum()) < 1e-6]
    return min(orthogonal), max(orthogonal)


@pytest.mark.parametrize("world", [3, 4, 5, 6])
def test_random_rings_contract_by_their_closed_form(world: int) -> None:
    """Over all permutations every mode but the mean keeps 1/3 - 2 / (3 (L - 1)), also for L = 3 and 4."""
    every = [naive_ring(world)[np.ix_(order, order)] for order in map(list, itertools.permutations(range(world)))]
    expected = 1 / 3 - 2 / (3 * (world - 1))
    assert worst_mode(every) == pytest.approx((expected, expected), abs=1e-12)
    assert random_ring_contraction(world) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("world", [2, 3, 4, 5, 6, 7])
def test_pairs_contract_by_their_closed_form(world: int) -> None:
    """Over all matchings every mode but the mean keeps (1 - 1 / (L - 1)) / 2, or 1/2 where one sits out."""
    every = [naive_pairs(order) for order in itertools.permutations(range(world))]
    expected = 0.5 if world % 2 else 0.5 * (1 - 1 / (world - 1))
    assert worst_mode(every) == pytest.approx((expected, expected), abs=1e-12)
    assert pairs_contraction(world) == pytest.approx(expected, abs=1e-12)


@pytest.mark.wide
@pytest.mark.parametrize("world", [1, 2, 3, 6, 9, 16])
def test_drawn_rounds_contract_as_expected(world: int) -> None:
    """The rounds that are really drawn average to the closed forms: permutations are uniform."""
    for topology, closed in [
        (random_ring(world, 2), random_ring_contraction(world)),
        (pairs(world, 2), pairs_contraction(world)),
    ]:
        assert expected_contraction(topology, 2000) == pytest.approx(closed, abs=0.04)
        assert expected_contraction(topology, 2000) >= closed - 1e-12


@pytest.mark.parametrize("name", ["random", "pairs"])
def test_a_simulated_consensus_distance_shrinks_by_the_expected_factor(name: str) -> None:
    """The mean over many seeds of |deviation|^2 after one round, of any start, is the factor times what it was."""
    world = 12
    closed = {"random": random_ring_contraction(world), "pairs": pairs_contraction(world)}[name]
    start = np.linspace(-1, 1, world) ** 3
    kept = [np.sum((start @ PATTERNS[name](world, seed).matrix(0)) ** 2) for seed in range(1500)]
    assert np.mean(kept) / np.sum(start**2) == pytest.approx(closed, rel=0.05)


@pytest.mark.parametrize("world", [4, 16])
def test_the_distance_that_noise_keeps_up_has_its_closed_forms(world: int) -> None:
    """A ring has it by its eigenvalues, at any time; the exponential graph forgets after log2 L rounds."""
    squares = ring_eigenvalues(world)[1:] ** 2
    for rounds in (1, 7, 400):
        closed = np.sum((1 - squares**rounds) / (1 - squares)) / world
        assert distance_of_noise(ring(world), rounds) == pytest.approx(closed, rel=1e-9)
    hops = world.bit_length() - 1
    assert distance_of_noise(exponential(world), 50) == pytest.approx(2 * (1 - 1 / world) - hops / world, rel=1e-9)
    assert distance_of_noise(complete_graph(world), 9) == pytest.approx((world - 1) / world, rel=1e-9)


@pytest.mark.parametrize("name", ["random", "pairs"])
def test_noise_keeps_random_patterns_apart_by_their_expected_contraction(name: str) -> None:
    """(L - 1) / L / (1 - c) on average over seeds; and learners that add noise are that far apart."""
    world, rounds = 12, 15
    contraction = {"random": random_ring_contraction(world), "pairs": pairs_contraction(world)}[name]
    found = [distance_of_noise(PATTERNS[name](world, seed), rounds) for seed in range(100)]
    assert np.mean(found) == pytest.approx((world - 1) / world / (1 - contraction), rel=0.02)
    topology, noise = PATTERNS[name](world, 3), np.random.default_rng(1)
    weights = np.zeros((3000, world))
    for k in range(rounds):
        weights = weights @ topology.matrix(k) + noise.normal(size=weights.shape)
    distance = ((weights - weights.mean(1, keepdims=True)) ** 2).mean()
    assert distance == pytest.approx(distance_of_noise(topology, rounds), rel=0.05)


def test_the_numbers_of_64_learners() -> None:
    """The reason for randomising: the fixed ring's worst mode keeps 0.9936 of the distance, the random one's 0.32."""
    assert expected_contraction(ring(64)) == pytest.approx(0.9936, abs=1e-4)
    assert random_ring_contraction(64) == pytest.approx(0.3228, abs=1e-4)
    assert expected_contraction(complete_graph(64)) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("name", sorted(PATTERNS))
def test_a_period_repeats(name: str) -> None:
    """Where a pattern gives a period, round k + period is round k."""
    topology = PATTERNS[name](11, 0)
    assert (topology.period is None) == (name in ("random", "pairs"))
    if topology.period is not None:
        for k in range(2 * topology.period):
            np.testing.assert_array_equal(topology.matrix(k), topology.matrix(k + topology.period))


def test_connected_is_what_several_rounds_join() -> None:
    """Even pairs alone never join another pair; together with odd pairs they do."""

    def bricks(k: int, rank: int, world: int) -> dict[int, float]:
        partner = rank ^ 1 if k % 2 == 0 else ((rank - 1) ^ 1) + 1
        return {partner % world: 0.5}

    topology = custom(8, bricks)
    assert not is_connected(topology, 0)
    assert not is_connected(topology, 1)
    assert is_connected(topology, 2)
    assert is_connected(ring(1), 0)
    assert is_connected(exponential(7), 1)


@pytest.mark.parametrize("world", [0, -3])
@pytest.mark.parametrize("name", sorted(PATTERNS))
def test_a_topology_needs_a_learner(name: str, world: int) -> None:
    """The message has the number."""
    with pytest.raises(ConfigError, match=f"{world} learners; a topology needs at least 1"):
        PATTERNS[name](world, 0)


@pytest.mark.parametrize(("k", "rank"), [(-1, 0), (0, -1), (0, 4)])
def test_a_request_for_an_unknown_learner_or_round_is_an_error(k: int, rank: int) -> None:
    """Python would count from the end, and a learner would mix with the wrong ones."""
    own = custom(4, lambda k, rank, world: {(rank + 1) % world: 0.5})
    for topology in [make(4, 0) for make in PATTERNS.values()] + [own]:
        with pytest.raises(ValueError, match=f"round {k}, learner {rank}: .* 0 to 3"):
            topology.sources(k, rank)
        with pytest.raises(ValueError, match=f"round {k}, learner {rank}: .* 0 to 3"):
            topology.targets(k, rank)


def uneven(k: int, rank: int, world: int) -> Mapping[int, float]:
    """A directed ring that leaps further each round, with weights of its own and an entry of 0."""
    return {(rank + 1 + k % (world - 1)) % world: 0.3, (rank + 1 + (k + 1) % (world - 1)) % world: 0.0}


@settings(max_examples=20, deadline=None)
@given(st.integers(3, 20), rounds)
def test_a_pattern_of_ones_own_is_what_its_function_says(world: int, k: int) -> None:
    """Weights are taken over, peers of weight 0 are absent, also far beyond the rounds that were checked at first."""
    topology = custom(world, uneven)
    check_consistent(topology, k)
    assert topology.sources(k, 0) == {1 + k % (world - 1): 0.3}


def test_a_pattern_of_ones_own_keeps_a_bounded_number_of_rounds() -> None:
    """Rounds that were dropped are asked for again, and answered alike."""
    topology = custom(3, uneven)
    first = topology.matrix(0)
    for k in range(1200):
        topology.sources(k, 0)
    assert topology._plan.cache_info().currsize <= 512  # type: ignore[attr-defined]
    np.testing.assert_array_equal(topology.matrix(0), first)


asked = itertools.count()
WRONG: dict[str, Callable[[int, int, int], object]] = {
    r"round 0, learner 0: returned \[1\]; return a mapping": lambda k, rank, world: [1],
    r"round 0, learner 0: 'left': 0.5 is not a rank and a weight": lambda k, rank, world: {"left": 0.5},
    r"round 0, learner 0: 1: None is not a rank and a weight": lambda k, rank, world: {rank + 1: None},
    r"round 0, learner 3: mixes learner 4; peers are 0 to 3": lambda k, rank, world: {rank + 1: 0.5},
    r"round 0, learner 0: mixes learner -1; peers are 0 to 3": lambda k, rank, world: {rank - 1: 0.5},
    r"round 0, learner 0: mixes itself; leave it out": lambda k, rank, world: {rank: 0.5},
    r"round 2, learner 0: mixes learner 1 with weight -0.1": lambda k, rank, world: {
        (rank + 1) % world: -0.1 if k == 2 else 0.1
    },
    r"round 0, learner 0: mixes learner 1 with weight nan": lambda k, rank, world: {(rank + 1) % world: float("nan")},
    r"round 0, learner 0: the weights of its peers sum to 1.2": lambda k, rank, world: {
        (rank + 1) % world: 0.6,
        (rank - 1) % world: 0.6,
    },
    r"round 1, learner 0: not doubly stochastic.* to 0, others' weights for it to 1.5": lambda k, rank, world: (
        {0: 0.5} if k == 1 and rank else {}
    ),
    r"not connected within 64 rounds": lambda k, rank, world: {rank ^ 1: 0.5},
    r"round 0: two calls gave different results": lambda k, rank, world: {
        (rank + 1) % world: 0.1 if next(asked) // world % 2 else 0.2
    },
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_pattern_of_ones_own_is_refused_by_name(message: str) -> None:
    """The error names the function, the round, the learner, the value and the limit."""

    def mine(k: int, rank: int, world: int) -> Mapping[int, float]:
        return WRONG[message](k, rank, world)  # type: ignore[return-value]

    with pytest.raises(ConfigError, match=f"^pattern mine.*({message})"):
        custom(4, mine)


def test_a_pattern_that_goes_wrong_later_is_refused_then() -> None:
    """Each round is checked before learners mix in it."""
    topology = custom(4, lambda k, rank, world: {(rank + 1) % world: 0.5} if k < 1000 or rank else {})
    topology.sources(999, 0)
    with pytest.raises(ConfigError, match="round 1000, learner 0: not doubly stochastic"):
        topology.sources(1000, 3)


def test_a_pattern_that_connects_slowly_passes_when_more_rounds_are_looked_at() -> None:
    """How long the check looks is the caller's to say."""

    def slow(k: int, rank: int, world: int) -> Mapping[int, float]:
        return {rank ^ (2 if k % 100 == 99 else 1): 0.5}

    with pytest.raises(ConfigError, match="slow: not connected within 99 rounds"):
        custom(4, slow, rounds=99)
    assert is_connected(custom(4, slow, rounds=100), 100)


def test_a_wrong_period_is_refused_at_the_round_that_differs() -> None:
    """In the rounds that are checked at once, and later."""

    def turning(k: int, rank: int, world: int) -> Mapping[int, float]:
        return {rank ^ (2 if k in (9, 1000) else 1): 0.5, rank ^ 3: 0.25}

    turning.period = 4  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="turning, round 9: differs from round 1, although its `period` is 4"):
        custom(4, turning)
    topology = custom(4, turning, rounds=8)
    assert topology.period == 4
    with pytest.raises(ConfigError, match="turning, round 1000: differs from round 0"):
        topology.sources(1000, 3)


class Rotated(Topology):
    """A ring whose order depends on the run's seed."""

    def __init__(self, world: int, seed: int) -> None:
        super().__init__(world)
        self._seed = seed
        self.period = world - 1

    def sources(self, k: int, rank: int) -> Mapping[int, float]:
        return {(rank + 1 + (k + self._seed) % (self.world - 1)) % self.world: 0.25}

    def targets(self, k: int, rank: int) -> Sequence[int]:
        return [(rank - 1 - (k + self._seed) % (self.world - 1)) % self.world]


class Lopsided(Rotated):
    """All learners take of learner 0, so that the mean would move."""

    def sources(self, k: int, rank: int) -> Mapping[int, float]:
        return {0: 0.25} if rank else {}


def test_a_recipe_names_a_class_of_ones_own_which_knows_the_seed() -> None:
    """What it says is checked like a function's."""
    found = find_topology(f"{__name__}:Rotated", 5, 4)
    assert found.period == 4
    for k in range(8):
        check_consistent(found, k)
        np.testing.assert_array_equal(found.matrix(k), Rotated(5, 4).matrix(k))
    assert not np.array_equal(found.matrix(0), find_topology(f"{__name__}:Rotated", 5, 5).matrix(0))
    with pytest.raises(ConfigError, match="pattern Lopsided, round 0, learner 0: not doubly stochastic"):
        find_topology(f"{__name__}:Lopsided", 5, 4)


def test_a_recipe_names_a_pattern_or_a_function_of_ones_own() -> None:
    """A name in PATTERNS, or module:function."""
    check_pattern("random")
    np.testing.assert_array_equal(find_topology("random", 9, 4).matrix(3), random_ring(9, 4).matrix(3))
    check_pattern(f"{__name__}:uneven")
    np.testing.assert_array_equal(find_topology(f"{__name__}:uneven", 5, 4).matrix(3), custom(5, uneven).matrix(3))


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("rnig", "did you mean 'ring'"),
        ("", "known are ring, random, pairs, exponential, complete, or module:function"),
        ("math:", "known are ring"),
        ("no_such_module:f", "cannot be imported: No module named 'no_such_module'"),
        ("math:no_such_function", "cannot be imported"),
        ("math:pi", "is the float 3.14.*, not a function of .round, rank, world. or a class of starling.Topology"),
    ],
)
def test_an_unknown_pattern_is_refused_with_the_nearest_known(pattern: str, message: str) -> None:
    """A recipe's check collects ValueErrors; making the topology raises a ConfigError."""
    with pytest.raises(ValueError, match=message):
        check_pattern(pattern)
    with pytest.raises(ConfigError, match=message):
        find_topology(pattern, 4, 0)


@pytest.mark.parametrize("name", sorted(PATTERNS))
def test_a_topology_can_be_copied_to_another_process(name: str) -> None:
    """Its state is world and seed."""
    topology = PATTERNS[name](6, 3)
    copy = pickle.loads(pickle.dumps(topology))  # noqa: S301 - its own bytes
    np.testing.assert_array_equal(copy.matrix(4), topology.matrix(4))


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("world", [1, 2, 5])
def test_what_a_learner_keeps_is_its_own_weight_where_the_mean_stays(name: str, world: int) -> None:
    """And half of each change is the mean of a round and of none."""
    topology = PATTERNS[name](world, 3)
    for k in range(4):
        matrix = topology.matrix(k)
        assert [topology.kept(k, rank) for rank in range(world)] == pytest.approx(list(np.diag(matrix)))
        np.testing.assert_allclose(lazy(topology).matrix(k), (identity(world) + matrix) / 2, rtol=0.0, atol=1e-15)


def test_a_path_that_leads_one_way_does_not_connect() -> None:
    """What connects undirected graphs is not enough where nothing comes back."""

    def one_way(k: int, rank: int, world: int) -> dict[int, float]:
        return {rank - 1: 0.5} if rank else {}

    def around(k: int, rank: int, world: int) -> dict[int, float]:
        return {(rank - 1) % world: 0.5} if rank == k % world else {}

    assert is_connected(custom(4, around, is_balanced=False), 4)
    assert not is_connected(exponential(4), 0)
    with pytest.raises(ConfigError, match="not connected"):
        custom(4, one_way, is_balanced=False)
