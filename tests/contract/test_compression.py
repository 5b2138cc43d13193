"""Means of vectors that travel encoded: what encodings keep, their bytes, and what error feedback gives back."""

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from starling.budget import Budget
from starling.checkpoint.state import OWN_PREFIX, LearnerState
from starling.engines.virtual.cluster import Cluster
from starling.engines.virtual.engine import VirtualEngine
from starling.engines.virtual.timing import simulate_timing
from starling.errors import ConfigError
from starling.learner import Learner
from starling.strategies import STRATEGIES, Strategy
from starling.strategies.parts.encodings import BLOCK, Bfloat16, CoarseLargest, Encoding, Integers, Largest
from starling.strategies.parts.means import Compression, Means, TopK
from starling.strategies.parts.mixing import PublicCopies
from starling.topology import find_topology
from starling.training.faults import NotFinite
from starling.training.job import EpochReport, Job, Observer
from starling.workload import Position
from tests.contract.cases import adamw, sgd
from tests.contract.matrix_form import EncodedMean, rounded
from tests.contract.oracle import allreduce_of_encoded, choco, gossip_pga, gradient_of_regression
from tests.contract.oracle_periodic import periodic
from tests.contract.problems import ConstantGradient, TinyRegression
from tests.contract.test_contract import flat

ENCODINGS: dict[str, tuple[Encoding, Compression]] = {
    "bfloat16": (Bfloat16(), "bfloat16"),
    "int8": (Integers(8), "int8"),
    "int4": (Integers(4), "int4"),
    "int2": (Integers(2), "int2"),
    "top_k": (Largest(0.1), TopK(top_k=0.1)),
    "top_k_bits": (CoarseLargest(0.1), TopK(top_k=0.1, bits=2)),
}
every_encoding = pytest.mark.parametrize("name", ENCODINGS)
LEARNERS, STEPS = 3, 36


def normal(size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@every_encoding
@pytest.mark.parametrize("size", [1, 3, 255, 256, 1001])
def test_an_encoded_vector_has_the_bytes_of_the_formula_and_is_decoded_anywhere_in_a_buffer(
    name: str, size: int
) -> None:
    """Bytes that are received need not be aligned."""
    encoding, vector = ENCODINGS[name][0], normal(size)
    encoded = encoding.encode(vector)
    blocks, kept = -(-size // BLOCK), max(1, round(0.1 * size))
    expected = {"bfloat16": 2 * size, "int8": size + 4 * blocks, "int4": -(-size // 2) + 4 * blocks, "top_k": 8 * kept}
    expected["int2"] = -(-size // 4) + 4 * blocks
    expected["top_k_bits"] = 4 + 2 * kept + -(-kept // 4)
    assert len(encoded) == encoding.num_bytes(size) == expected[name]
    elsewhere = torch.cat([torch.zeros(3, dtype=torch.uint8), encoded])[3:]
    assert torch.equal(encoding.decode(elsewhere, size), encoding.decode(encoded, size))


@pytest.mark.parametrize(("bits", "levels"), [(8, 127), (4, 7), (2, 1)])
def test_no_number_changes_by_more_than_half_a_step_of_its_block(bits: int, levels: int) -> None:
    """The step is the largest magnitude of the block over the number of levels; that number itself is exact."""
    vector, encoding = normal(4 * BLOCK) * torch.arange(1, 5).repeat_interleave(BLOCK) ** 8, Integers(bits)
    change = (encoding.decode(encoding.encode(vector), len(vector)) - vector).abs().view(4, BLOCK)
    largest = vector.abs().view(4, BLOCK).amax(dim=1, keepdim=True)
    assert bool((change <= 0.5000001 * largest / levels).all())
    assert bool((change.max(dim=1).values > 0.4 * largest[:, 0] / levels).all())  # else the bound shows nothing


def test_of_every_4096_numbers_the_largest_are_sent_in_2_bits() -> None:
    """Two whole blocks of unlike size and a rest, each beside the rule for one; zeros stay zeros."""
    vector, encoding, rule = normal(2 * 4096 + 100), CoarseLargest(0.01), TopK(top_k=0.01, bits=2)
    vector[4096:8192] *= 1000.0
    vector[8195:] = 0.0  # three numbers are left, and one of them is sent
    decoded = encoding.decode(encoding.encode(vector), len(vector))
    assert encoding.num_bytes(len(vector)) == 2 * (2 * 41 + 11 + 4) + 2 + 1 + 4
    for block in (slice(0, 4096), slice(4096, 8192), slice(8192, None)):
        expected = rounded(vector[block].double().numpy(), rule)
        np.testing.assert_allclose(decoded[block].numpy(), expected, rtol=1e-6, atol=1e-6)
    sparse = torch.zeros(300)
    sparse[[7, 200]] = torch.tensor([3.0, -1.2])
    assert torch.equal(
        CoarseLargest(0.1).decode(CoarseLargest(0.1).encode(sparse), 300).nonzero()[:, 0], torch.tensor([7, 200])
    )


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
@every_encoding
def test_what_is_not_finite_arrives_as_such(name: str, wrong: float) -> None:
    """So that all learners leave the mini-batch out."""
    vector, encoding = normal(300), ENCODINGS[name][0]
    vector[7] = wrong
    assert not bool(encoding.decode(encoding.encode(vector), 300).isfinite().all())


def averaged(compression: Compression, rounds: list[list[Tensor]]) -> tuple[list[list[Tensor]], Tensor]:
    """What each learner gets in each round of means of the learners' vectors, and the last residuals, `[L, P]`."""
    world = len(rounds[0])
    found: list[list[Tensor]] = [[] for _ in range(world)]

    async def run(me: Learner) -> None:
        means = Means(me, compression)
        for vectors in rounds:
            found[me.rank].append((await means.start(vectors[me.rank].clone())).clone())

    workload = ConstantGradient(dimensions=len(rounds[0][0]))
    mine = Job(workload, Strategy("means", "only in tests", run, keeps_state=True), Budget(steps=0), sgd(0.1))
    states = VirtualEngine(mine, world).run().states
    written_last = len(rounds) % 2  # beside each residual is the next one
    return found, torch.stack([state.strategy[OWN_PREFIX + "residual"][written_last] for state in states])


@every_encoding
@pytest.mark.parametrize("learners", [2, 3, 16])
def test_a_mean_is_that_of_the_matrix_form(name: str, learners: int) -> None:
    """Four times, so that residuals count, of workers and of owners."""
    compression = ENCODINGS[name][1]
    rounds = [[normal(401, 17 * seed + rank) for rank in range(learners)] for seed in range(4)]
    found, _ = averaged(compression, rounds)
    mean = EncodedMean(compression, 401, learners)
    for number, vectors in enumerate(rounds):
        expected = mean.of(torch.stack(vectors, dim=1).double().numpy())
        assert all(torch.equal(each[number], found[0][number]) for each in found)
        np.testing.assert_allclose(found[0][number].numpy(), expected, rtol=0.0, atol=4e-6)


@every_encoding
def test_numbers_of_the_largest_magnitude_do_not_overflow(name: str) -> None:
    """With 16 learners."""
    found, _ = averaged(ENCODINGS[name][1], [[torch.full((64,), 127.0)] * 16])
    largest = found[0][0]
    assert bool((largest[largest != 0.0] >= 126.5).all())


@every_encoding
def test_what_encoding_takes_away_comes_back_later(name: str) -> None:
    """Error feedback: the sum of many means is that of the exact means, to the residuals that are left, whoever owes
    them."""
    vectors, num_rounds = [normal(90, rank) for rank in range(LEARNERS)], 100
    found, left = averaged(ENCODINGS[name][1], [vectors] * num_rounds)
    total = torch.stack(found[0]).double().sum(dim=0)
    exact = torch.stack(vectors).double().mean(dim=0)
    torch.testing.assert_close((total + left.double().mean(dim=0)) / num_rounds, exact, rtol=0.0, atol=1e-6)
    assert float(((total / num_rounds) - exact).abs().max()) < 0.1


def job(name: str, optimizer: Any = None, **options: Any) -> Job:
    strategy = STRATEGIES[name]
    chosen = strategy.options.model_validate(options)
    return Job(TinyRegression(), strategy, Budget(steps=STEPS), optimizer or sgd(0.1), options=chosen, seed=11)


class Watch(Observer):
    """The bytes that each learner has sent, and the states at checkpoints."""

    def __init__(self) -> None:
        self.by_rank: dict[int, int] = {}
        self.saved: list[LearnerState] = []

    def on_epoch(self, report: EpochReport, state: LearnerState) -> None:
        self.by_rank[report.rank] = self.by_rank.get(report.rank, 0) + report.averaging.bytes_sent

    def on_barrier(self, state: LearnerState) -> None:
        self.saved.append(copy.deepcopy(state))


LOW_RANK = {"low_rank": 1}
CHOSEN: list[tuple[str, dict[str, Any]]] = [
    ("local-sgd", {"every": 6, "compression": "bfloat16"}),
    ("allreduce", {"compression": {"top_k": 0.1}}),
    ("local-sgd", {"every": 4, "compression": {"top_k": 0.25}}),
    ("post-local-sgd", {"every": 4, "warm_up": 3, "compression": "int8"}),
    ("bmuf", {"every": 3, "warm_up": 3, "compression": "int8"}),
    ("slowmo", {"every": 5, "compression": {"top_k": 0.2, "bits": 2}}),
    ("diloco", {"every": 5, "compression": "int4"}),
    ("diloco", {"every": 5, "compression": "int2"}),
    ("streaming-diloco", {"every": 4, "fragments": 2, "overlap": 1, "compression": "int8"}),
    ("streaming-diloco", {"every": 4, "fragments": 2, "overlap": 1, "compression": {"top_k": 0.25}}),
    ("easgd", {"every": 4, "compression": "int8"}),
]


@pytest.mark.parametrize(("name", "options"), CHOSEN)
def test_options_that_the_contract_leaves_out_follow_the_equation(name: str, options: dict[str, Any]) -> None:
    """In matrix form, as those of the contract."""
    chosen = STRATEGIES[name].options.model_validate(options)
    compression: Compression = chosen.compression  # type: ignore[attr-defined]
    oracle = allreduce_of_encoded(compression) if name == "allreduce" else periodic(name, chosen)
    start = flat(TinyRegression().make_model()).double().numpy()
    expected = oracle(start, gradient_of_regression(), 0.1, LEARNERS, STEPS // LEARNERS)
    states = VirtualEngine(job(name, **options), LEARNERS).run().states
    for rank, state in enumerate(states):
        np.testing.assert_allclose(state.weights.numpy(), expected[:, rank], rtol=0.0, atol=2e-6)


@pytest.mark.parametrize("compression", ["int8", {"top_k": 0.1}], ids=["int8", "top_k"])
@pytest.mark.parametrize(
    ("name", "options", "means", "num_whole"),
    [
        ("allreduce", {}, [29] * 12, 0),
        ("diloco", {"every": 5}, [29] * 3, 0),
        ("post-local-sgd", {"every": 6, "warm_up": 6}, [29], 6 + 1),
        ("streaming-diloco", {"every": 4, "fragments": 2, "overlap": 1}, [15, 14] * 4, 0),
    ],
)
def test_the_bytes_sent_are_those_of_the_formula(
    name: str, options: dict[str, Any], means: list[int], num_whole: int, compression: Any
) -> None:
    """2 (L - 1) times an encoded chunk for each mean, or L - 1 times all that is kept of a vector, in a run as in a
    simulation of time alone. While warming up, and for its last mean, nothing is encoded."""
    if compression == "int8":
        expected = sum(2 * (LEARNERS - 1) * Integers(8).num_bytes(-(-size // LEARNERS)) for size in means)
    else:
        expected = sum((LEARNERS - 1) * Largest(0.1).num_bytes(size) for size in means)
    expected += num_whole * (2 * (LEARNERS - 1) * 4 * 29 // LEARNERS)
    watch, mine = Watch(), job(name, **options, compression=compression)
    VirtualEngine(mine, LEARNERS, observer=watch).run()
    assert list(watch.by_rank.values()) == [expected] * LEARNERS
    timing = simulate_timing(mine.strategy, mine.options, LEARNERS, Cluster(), 4 * 29, STEPS)
    assert [each.averaging.bytes_sent for each in timing.learners] == [expected] * LEARNERS


def test_a_simulated_mean_takes_the_time_of_its_encoded_bytes() -> None:
    """On a slow link a step with numbers of 4 bits takes nearly an eighth of the time of one with 32."""
    cluster = Cluster.model_validate({"compute": {"seconds": 1e-9}, "link": {"latency": 0.0, "bandwidth": 1e6}})

    def seconds(compression: str) -> float:
        options = STRATEGIES["allreduce"].options.model_validate({"compression": compression})
        return simulate_timing(STRATEGIES["allreduce"], options, 4, cluster, 4 * 2**20, 40).seconds

    assert seconds("none") / seconds("int4") == pytest.approx(32 / (4 + 32 / BLOCK), rel=1e-3)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("allreduce", {"compression": "int4"}),
        ("allreduce", {"compression": LOW_RANK}),
        ("diloco", {"every": 4, "compression": {"top_k": 0.2}}),
        ("streaming-diloco", {"every": 6, "fragments": 2, "overlap": 3, "compression": "int4"}),
    ],
)
def test_a_resumed_run_ends_in_the_same_bits(name: str, options: dict[str, Any]) -> None:
    """Wherever it was stopped: residuals are saved, and a mean under way is begun again."""
    mine, whole = replace(job(name, adamw(0.01), **options), checkpoint_every=LEARNERS), Watch()
    expected = VirtualEngine(mine, LEARNERS, observer=whole).run().states
    assert len(whole.saved) > 4 * LEARNERS
    for first in range(0, len(whole.saved), LEARNERS):
        start = sorted(whole.saved[first : first + LEARNERS], key=lambda state: state.rank)
        resumed = VirtualEngine(mine, LEARNERS, start=start).run().states
        for found, state in zip(resumed, expected, strict=True):
            assert torch.equal(found.weights, state.weights)


@pytest.mark.parametrize("compression", ["int8", LOW_RANK], ids=["int8", "low_rank"])
def test_a_gradient_that_is_not_finite_leaves_the_residual_as_it_was(compression: Any) -> None:
    """Otherwise no later gradient would be finite."""
    mine = replace(job("allreduce", compression=compression), faults=(NotFinite(nan=1, at_step=3),))
    for state in VirtualEngine(mine, LEARNERS).run().states:
        assert bool(state.weights.isfinite().all())
        assert bool(state.strategy[OWN_PREFIX + "residual"].isfinite().all())


ORDERS = {"at-once": 0.1, "adapt-first": 0.07}
"""Each order of CHOCO with a learning rate at which no number lies so near to the middle between two of int8, within a
few 1e-7, that processors round it differently."""


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("pattern", "compression", "gamma"),
    [("ring", "int8", 1.0), ("complete", "int4", 0.5), ("ring", {"top_k": 0.25}, 0.4)],
)
def test_weights_that_neighbours_average_follow_the_equation(
    pattern: str, compression: Any, gamma: float, order: str
) -> None:
    """CHOCO in matrix form, with public copies and a consensus rate."""
    rate = ORDERS[order]
    mine = job("choco", sgd(rate), pattern=pattern, compression=compression, consensus_rate=gamma, order=order)
    start = flat(TinyRegression().make_model()).double().numpy()
    chosen: Compression = mine.options.compression  # type: ignore[attr-defined]
    oracle = choco(pattern, chosen, gamma, adapts_first=order == "adapt-first")
    expected = oracle(start, gradient_of_regression(), rate, LEARNERS, STEPS // LEARNERS)
    for rank, state in enumerate(VirtualEngine(mine, LEARNERS).run().states):
        np.testing.assert_allclose(state.weights.numpy(), expected[:, rank], rtol=0.0, atol=2e-6)


@pytest.mark.wide
@pytest.mark.parametrize(("compression", "gamma"), [("int8", 1.0), ("int4", 1.0), ({"top_k": 0.1}, 0.1)])
def test_gossip_of_changes_agrees_on_the_mean_to_rounding(compression: Any, gamma: float) -> None:
    """Without gradients, on a ring of eight, from weights far apart: no error of the encoding remains."""
    chosen, world = TopK(**compression) if isinstance(compression, dict) else compression, 8
    topology, piece = find_topology("ring", world, 0), slice(0, 200)
    weights = [normal(200, rank) for rank in range(world)]
    mean = torch.stack(weights).double().mean(dim=0)
    encoders = [PublicCopies(each, [piece], chosen, gamma) for each in weights]
    for k in range(1000 if gamma < 1.0 else 100):
        own = [each.clone() for each in weights]
        sent = [encoder.encode(each, piece) for encoder, each in zip(encoders, own, strict=True)]
        for rank in range(world):
            theirs = [(weight, sent[peer]) for peer, weight in topology.sources(k, rank).items()]
            weights[rank] = weights[rank] + encoders[rank].change(own[rank], theirs, piece)
    for each in weights:
        torch.testing.assert_close(each.double(), mean, rtol=0.0, atol=1e-4)


@pytest.mark.parametrize("compression", ["none", "int8", "int4"])
def test_super_learners_agree_where_a_piece_has_fewer_weights_than_they_have_learners(compression: str) -> None:
    """Without gradients, from weights far apart. The last of two pieces has one weight for two learners."""
    options = {"per_node": 2, "pattern": "ring", "piece_megabytes": 28 * 4 / 2**20, "compression": compression}
    mine, world = replace(job("hadpsgd", sgd(0.0), **options), budget=Budget(steps=240)), 4
    states, first = (
        VirtualEngine(replace(mine, budget=Budget(steps=0)), world).run().states,
        [normal(29), normal(29, 1)],
    )
    start = [
        replace(state, position=Position(), epochs_ended=None, weights=first[state.rank // 2].clone())
        for state in states
    ]
    for state in VirtualEngine(mine, world, start=start).run().states:
        torch.testing.assert_close(state.weights, (first[0] + first[1]) / 2, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("pattern", ["ring", "pairs"])
def test_a_mean_of_all_in_each_step_is_delay_by_one(pattern: str) -> None:
    """To rounding: one adds a change, the other writes the mean."""
    delayed = VirtualEngine(job("delay-by-one"), LEARNERS).run().states
    found = VirtualEngine(job("gossip-pga", pattern=pattern, every=1), LEARNERS).run().states
    for one, other in zip(found, delayed, strict=True):
        torch.testing.assert_close(one.weights, other.weights, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("every", [2, 5])
def test_periodic_means_among_gossip_follow_the_equation(every: int, order: str) -> None:
    """Gossip-PGA in matrix form, and its bytes."""
    start, watch = flat(TinyRegression().make_model()).double().numpy(), Watch()
    oracle = gossip_pga("ring", every, adapts_first=order == "adapt-first")
    expected = oracle(start, gradient_of_regression(), 0.1, LEARNERS, STEPS // LEARNERS)
    states = VirtualEngine(job("gossip-pga", every=every, order=order), LEARNERS, observer=watch).run().states
    for rank, state in enumerate(states):
        np.testing.assert_allclose(state.weights.numpy(), expected[:, rank], rtol=0.0, atol=2e-6)
    num_means = STEPS // LEARNERS // every
    sent = num_means * (2 * (LEARNERS - 1) * 4 * 29 // LEARNERS) + (STEPS // LEARNERS - num_means) * 2 * 4 * 29
    assert list(watch.by_rank.values()) == [sent] * LEARNERS


def test_gossip_of_changes_sends_float32_once_and_then_encoded_bytes() -> None:
    """On a ring to two neighbours, in a run as in a simulation of time alone."""
    mine, watch, rounds = job("choco"), Watch(), STEPS // LEARNERS
    VirtualEngine(mine, LEARNERS, observer=watch).run()
    expected = 2 * (4 * 29 + (rounds - 1) * Integers(8).num_bytes(29))
    assert list(watch.by_rank.values()) == [expected] * LEARNERS
    timing = simulate_timing(mine.strategy, mine.options, LEARNERS, Cluster(), 4 * 29, STEPS)
    assert [each.averaging.bytes_sent for each in timing.learners] == [expected] * LEARNERS


def around(k: int, rank: int, world: int) -> dict[int, float]:
    """A ring of one's own."""
    return {(rank + 1) % world: 1 / 3, (rank - 1) % world: 1 / 3}


def around_slowly(k: int, rank: int, world: int) -> dict[int, float]:
    return around(k, rank, world)


around.period = 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["choco", "d2", "a2cid2"])
def test_a_pattern_of_ones_own_that_says_that_it_never_changes_is_one(name: str) -> None:
    """It trains as a ring does; without its period, which no one can know of a function, it is refused."""
    own, ring = (
        VirtualEngine(job(name, pattern=pattern), 4).run().states for pattern in (f"{__name__}:around", "ring")
    )
    for mine, expected in zip(own, ring, strict=True):
        torch.testing.assert_close(mine.weights, expected.weights, rtol=0.0, atol=1e-6)
    with pytest.raises(ConfigError, match="`period`"):
        job(name, pattern=f"{__name__}:around_slowly").validate(4)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "adpsgd",
            {"compression": "int8"},
            "neighbours change from round to round, or its `period` is not given as 1; choose",
        ),
        (
            "choco",
            {"pattern": "random"},
            "neighbours change from round to round, or its `period` is not given as 1; choose",
        ),
        ("hadpsgd", {"per_node": 1, "pattern": "pairs", "compression": "int4"}, "neighbours change"),
        ("easgd", {"compression": {"top_k": 0.1}}, "would be added up without end; choose bfloat16, int8 or int4"),
    ],
)
def test_options_that_cannot_work_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    """With what to set instead."""
    strategy = STRATEGIES[name]
    with pytest.raises(ConfigError, match=message):
        strategy.validate(strategy.options.model_validate(options), 4)


@pytest.mark.parametrize(
    ("name", "options"), [("allreduce", {}), ("diloco", {"every": 4}), ("local-sgd", {"every": 1})]
)
def test_factors_of_full_rank_are_no_compression(name: str, options: dict[str, Any]) -> None:
    """Matrices that factors would not make smaller are averaged as they are."""
    plain, full = (
        VirtualEngine(job(name, **options, **chosen), LEARNERS).run().states
        for chosen in ({}, {"compression": {"low_rank": 4}})
    )
    for one, other in zip(plain, full, strict=True):
        torch.testing.assert_close(one.weights, other.weights, rtol=0.0, atol=1e-6)


def test_factors_send_their_own_bytes() -> None:
    """r (n + m) for a matrix `[n, m]`, and all numbers of what is not worth it."""
    watch = Watch()
    VirtualEngine(job("allreduce", compression=LOW_RANK), LEARNERS, observer=watch).run()
    first, second = 4 * (4 + 4 + 4 + 1), 4 * 5
    expected = STEPS // LEARNERS * sum(2 * (LEARNERS - 1) * each // LEARNERS for each in (first, second))
    assert list(watch.by_rank.values()) == [expected] * LEARNERS


def test_a_simulation_of_time_alone_refuses_factors_whose_bytes_it_does_not_know() -> None:
    """`starling plan` says so."""
    options = STRATEGIES["allreduce"].options.model_validate({"compression": LOW_RANK})
    with pytest.raises(ConfigError, match="depend on the shapes"):
        simulate_timing(STRATEGIES["allreduce"], options, 2, Cluster(), 4 * 29, 4)
