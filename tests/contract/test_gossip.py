"""Averaging with neighbours: push-sum on directed graphs, quasi-global momentum, and corrections for unequal data."""

import copy
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from starling.budget import Budget
from starling.checkpoint.state import MEMBERSHIP_PREFIX, LearnerState
from starling.engines.virtual.cluster import Cluster
from starling.engines.virtual.engine import VirtualEngine
from starling.engines.virtual.timing import simulate_timing
from starling.errors import ConfigError
from starling.strategies import STRATEGIES
from starling.topology import custom, find_topology
from starling.training.faults import Kill
from starling.training.job import EpochReport, Job, Observer
from starling.workload import Position, Ticket, Workload
from tests.contract.cases import adamw, sgd
from tests.contract.oracle import Oracle, adapt_first, gradient_of_regression, push_sum, tracking
from tests.contract.problems import Points, TinyRegression
from tests.contract.test_contract import flat

LEARNERS, STEPS, SIZE = 3, 36, 29
LOPSIDED = f"{__name__}:lopsided"
"""A pattern that is not doubly stochastic: learner 0 hears of all in turn, the others of their left neighbour."""


def lopsided(round: int, rank: int, world: int) -> dict[int, float]:  # noqa: A002 - the name of a pattern's argument
    """Directed, different from round to round, and with unequal shares."""
    taken = {(rank - 1) % world: 0.3}
    if rank == 0:
        taken[1 + round % (world - 1)] = 0.4
    return taken if world > 1 else {}


def job(name: str, optimizer: Any = None, steps: int = STEPS, **options: Any) -> Job:
    strategy = STRATEGIES[name]
    chosen = strategy.options.model_validate(options)
    return Job(TinyRegression(), strategy, Budget(steps=steps), optimizer or sgd(0.1), options=chosen, seed=11)


def weights_of(states: Sequence[LearnerState]) -> Tensor:
    """`[P, L]`."""
    return torch.stack([state.weights for state in states], dim=1).double()


class Watch(Observer):
    """The bytes that each learner has sent, and the states at checkpoints."""

    def __init__(self) -> None:
        self.by_rank: dict[int, int] = {}
        self._saved: dict[int, list[LearnerState]] = defaultdict(list)

    def on_epoch(self, report: EpochReport, state: LearnerState) -> None:
        self.by_rank[report.rank] = self.by_rank.get(report.rank, 0) + report.averaging.bytes_sent

    def on_barrier(self, state: LearnerState) -> None:
        self._saved[state.position.next_ticket.step].append(copy.deepcopy(state))

    def checkpoints(self, learners: int) -> list[list[LearnerState]]:
        """The states of all learners, by rank, at each place where they were saved."""
        found = [sorted(states, key=lambda state: state.rank) for states in self._saved.values()]
        assert len(found) > 2 and {len(states) for states in found} == {learners}
        return found


def apart(mine: Job, learners: int) -> list[LearnerState]:
    """States to begin with, of learners whose weights differ."""
    states = VirtualEngine(replace(mine, budget=Budget(steps=0)), learners).run().states
    noise = torch.Generator().manual_seed(5)
    return [
        replace(state, position=Position(), epochs_ended=None, weights=torch.randn(SIZE, generator=noise))
        for state in states
    ]


@pytest.mark.parametrize("overlap", [False, True])
def test_push_sum_keeps_both_sums_and_reaches_the_mean_on_an_unbalanced_graph(overlap: bool) -> None:
    """Without gradients, from weights far apart: sum u z and sum u stay, and all z reach the mean of the first."""
    mine = job("sgp", sgd(0.0), steps=160, pattern=LOPSIDED, overlap=overlap)
    mine, watch, learners = replace(mine, checkpoint_every=8), Watch(), 4
    first = apart(mine, learners)
    states = VirtualEngine(mine, learners, start=first, observer=watch).run().states
    mean = weights_of(first).mean(dim=1)
    for state in states:
        torch.testing.assert_close(state.weights.double(), mean, rtol=0.0, atol=2e-6)
    topology = find_topology(LOPSIDED, learners, seed=11, is_balanced=False)
    smallest = 1.0
    for saved in watch.checkpoints(learners):
        sum_x, sum_u = torch.zeros(SIZE, dtype=torch.float64), 0.0
        for state in saved:
            kept = {name.removeprefix(MEMBERSHIP_PREFIX): each for name, each in state.strategy.items()}
            u, k = float(kept["push-sum weight"]), int(kept["rounds"]) - 1
            smallest = min(smallest, u)
            sum_x, sum_u = sum_x + u * state.weights.double(), sum_u + u
            if overlap and float(kept["sent weight"]):
                given = 1.0 - topology.kept(k, state.rank)
                sum_x, sum_u = sum_x + given * kept["sent"].double(), sum_u + given * float(kept["sent weight"])
        assert sum_u == pytest.approx(learners, abs=1e-12)
        torch.testing.assert_close(sum_x / learners, mean, rtol=0.0, atol=2e-6)
    assert smallest < 0.8  # else the graph is balanced, and this shows nothing


@pytest.mark.parametrize("pattern", ["exponential", "random", "complete"])
def test_push_sum_on_a_balanced_graph_is_dpsgd_that_adapts_first(pattern: str) -> None:
    """The push-sum weight stays 1, so both are one method to rounding."""
    watch = Watch()
    found = VirtualEngine(replace(job("sgp", pattern=pattern), checkpoint_every=6), LEARNERS, observer=watch).run()
    expected = VirtualEngine(job("dpsgd", pattern=pattern, order="adapt-first"), LEARNERS).run()
    torch.testing.assert_close(weights_of(found.states), weights_of(expected.states), rtol=0.0, atol=1e-6)
    for states in watch.checkpoints(LEARNERS):
        for state in states:
            assert float(state.strategy[MEMBERSHIP_PREFIX + "push-sum weight"]) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "options", "oracle"),
    [
        ("sgp", {"pattern": LOPSIDED}, push_sum(LOPSIDED)),
        ("sgp", {"pattern": LOPSIDED, "overlap": True}, push_sum(LOPSIDED, overlap=True)),
        ("dpsgd", {"pattern": "random", "order": "adapt-first"}, adapt_first("random")),
        ("gradient-tracking", {"pattern": "exponential"}, tracking("exponential")),
    ],
)
def test_options_that_the_contract_leaves_out_follow_the_equation(
    name: str, options: dict[str, Any], oracle: Oracle
) -> None:
    """In matrix form, as those of the contract."""
    start = flat(TinyRegression().make_model()).double().numpy()
    expected = oracle(start, gradient_of_regression(), 0.1, LEARNERS, STEPS // LEARNERS)
    found = weights_of(VirtualEngine(job(name, **options), LEARNERS).run().states)
    np.testing.assert_allclose(found.numpy(), expected, rtol=0.0, atol=2e-6)


def test_without_beta_quasi_global_momentum_is_dpsgd_that_adapts_first() -> None:
    """To the bit."""
    plain, momentum = (
        VirtualEngine(job(name, pattern="random", **options), LEARNERS).run().states
        for name, options in (("dpsgd", {"order": "adapt-first"}), ("qg-dsgdm", {"beta": 0.0}))
    )
    assert torch.equal(weights_of(plain), weights_of(momentum))


class Unequal(Workload[Points]):
    """Learner l has f_l(w) = h_l / 2 |w - b_l|^2, of which the minima are far apart."""

    num_parts = 4
    curvatures = torch.tensor([0.5, 1.0, 1.5, 2.0])
    minima = torch.tensor([[3.0, -1.0], [-2.0, 0.5], [0.0, 4.0], [1.0, -3.0]])

    def make_model(self) -> nn.Module:
        model = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(model.weight)
        return model

    def num_batches(self, epoch: int) -> int:
        return 100

    def load(self, ticket: Ticket) -> list[Points]:
        return [Points(self.minima[None, ticket.part], self.curvatures[None, ticket.part])]

    def loss(self, model: nn.Module, examples: Points) -> Tensor:
        (weight,) = model.parameters()
        return 0.5 * examples.targets[0] * ((weight[0] - examples.inputs[0]) ** 2).sum()

    def optimum(self, learners: int) -> Tensor:
        curvatures = self.curvatures[:learners, None]
        return ((curvatures * self.minima[:learners]).sum(dim=0) / curvatures.sum()).double()


@pytest.mark.parametrize(
    ("name", "options", "is_exact", "is_one_lost"),
    [
        ("d2", {}, True, False),
        ("d2", {}, True, True),
        ("gradient-tracking", {}, True, False),
        ("gradient-tracking", {"pattern": "exponential"}, True, True),
        ("dpsgd", {}, False, False),
        ("dpsgd", {"order": "adapt-first"}, False, False),
    ],
    ids=str,
)
def test_corrections_reach_the_optimum_of_unequal_data_at_a_constant_rate(
    name: str, options: dict[str, Any], is_exact: bool, is_one_lost: bool
) -> None:
    """D-PSGD stays away from it. After the loss of a learner it is the optimum of the others."""
    strategy, workload = STRATEGIES[name], Unequal()
    chosen, faults = strategy.options.model_validate(options), (Kill(kill=3, at_step=10),) if is_one_lost else ()
    mine = Job(workload, strategy, Budget(steps=400), sgd(0.1), options=chosen, faults=faults)
    outcome = VirtualEngine(mine, 4).run()
    assert len(outcome.states) == 4 - is_one_lost
    distance = (weights_of(outcome.states) - workload.optimum(4 - is_one_lost)[:, None]).abs().max()
    assert float(distance) < 1e-5 if is_exact else float(distance) > 0.1


RESUMED: list[tuple[str, dict[str, Any]]] = [
    ("noloco", {"every": 3, "pull": 0.3}),
    ("sgp", {"pattern": LOPSIDED}),
    ("sgp", {"pattern": LOPSIDED, "overlap": True}),
    ("dpsgd", {"pattern": "random"}),
    ("qg-dsgdm", {"pattern": "pairs"}),
    ("d2", {}),
    ("gradient-tracking", {"pattern": "pairs"}),
    ("dpsgd", {"compression": "bfloat16"}),
    ("gossip-pga", {"every": 3, "piece_megabytes": 4e-5}),
    ("gossip-pga", {"every": 3, "compression": "bfloat16", "order": "adapt-first"}),
    ("choco", {"compression": "int4", "piece_megabytes": 4e-5}),
    ("choco", {"compression": {"top_k": 0.2}, "consensus_rate": 0.3, "order": "adapt-first"}),
]


@pytest.mark.wide
@pytest.mark.parametrize(("name", "options"), RESUMED, ids=str)
def test_a_resumed_run_ends_in_the_same_bits(name: str, options: dict[str, Any]) -> None:
    """Wherever it was stopped: rounds, public copies, corrections and what was under way are saved."""
    mine, whole = replace(job(name, adamw(0.01), **options), checkpoint_every=LEARNERS), Watch()
    expected = weights_of(VirtualEngine(mine, LEARNERS, observer=whole).run().states)
    for states in whole.checkpoints(LEARNERS)[::3]:
        assert torch.equal(weights_of(VirtualEngine(mine, LEARNERS, start=states).run().states), expected)


@pytest.mark.parametrize(
    ("name", "options", "targets", "size", "once"),
    [
        ("sgp", {}, 1, 4 * SIZE + 8, 0),
        ("sgp", {"overlap": True, "pattern": "ring"}, 2, 4 * SIZE + 8, 0),
        ("dpsgd", {"order": "adapt-first", "pattern": "exponential"}, 1, 4 * SIZE, 0),
        ("qg-dsgdm", {}, 2, 4 * SIZE, 0),
        ("d2", {}, 2, 4 * SIZE, 0),
        ("gradient-tracking", {}, 2, 2 * 4 * SIZE, 24 * (LEARNERS - 1)),
    ],
    ids=str,
)
def test_the_bytes_sent_are_those_of_the_formula(
    name: str, options: dict[str, Any], targets: int, size: int, once: int
) -> None:
    """In each step to each target and `once` in a membership, in a run as in a simulation of time alone."""
    mine, watch = job(name, **options), Watch()
    VirtualEngine(mine, LEARNERS, observer=watch).run()
    expected = STEPS // LEARNERS * targets * size + once
    assert list(watch.by_rank.values()) == [expected] * LEARNERS
    timing = simulate_timing(mine.strategy, mine.options, LEARNERS, Cluster(), 4 * SIZE, STEPS)
    assert [each.averaging.bytes_sent for each in timing.learners] == [expected] * LEARNERS


def test_overlapping_messages_wait_for_none_but_long_ones() -> None:
    """Messages that take nine tenths of a gradient's time cost none of it with an overlap, and all of it without."""
    cluster = Cluster.model_validate(
        {"compute": {"seconds": 1.0}, "link": {"latency": 0.0, "bandwidth": (4e6 + 8) / 0.9}}
    )

    def seconds(overlap: bool) -> float:
        mine = job("sgp", overlap=overlap)
        return simulate_timing(mine.strategy, mine.options, 4, cluster, 4_000_000, 80).seconds

    assert seconds(True) == pytest.approx(20 + 0.9, rel=0.02)
    assert seconds(False) == pytest.approx(20 * 1.9, rel=0.02)


def gives_all(round: int, rank: int, world: int) -> dict[int, float]:  # noqa: A002
    """Nothing stays with a learner."""
    return {(rank - 1) % world: 1.0}


def one_way(round: int, rank: int, world: int) -> dict[int, float]:  # noqa: A002
    """Learner 0 hears of none."""
    return {rank - 1: 0.5} if rank else {}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("d2", {"pattern": "pairs"}, "same neighbours in each step, in both directions"),
        ("dpsgd", {"pattern": LOPSIDED}, "not doubly stochastic"),
        ("sgp", {"pattern": f"{__name__}:gives_all"}, "nothing of its model would stay with it"),
        ("sgp", {"pattern": f"{__name__}:one_way"}, "not connected within 64 rounds"),
    ],
    ids=str,
)
def test_options_that_cannot_work_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    """With what to set instead."""
    strategy = STRATEGIES[name]
    with pytest.raises(ConfigError, match=message):
        strategy.validate(strategy.options.model_validate(options), 4)


@pytest.mark.parametrize("compression", ["int8", "int4", {"top_k": 0.1}], ids=str)
@pytest.mark.parametrize("name", ["dpsgd", "gossip-pga", "qg-dsgdm", "a2cid2"])
def test_encodings_of_changes_are_those_of_choco(name: str, compression: Any) -> None:
    """And the message says so."""
    with pytest.raises(ValueError, match="write `name: choco`"):
        STRATEGIES[name].options.model_validate({"compression": compression})


@pytest.mark.parametrize("name", ["dpsgd", "adpsgd", "hadpsgd"])
def test_an_option_that_moved_is_none_any_more(name: str) -> None:
    """Each says where it went, to a strategy or an option that there is."""
    options = STRATEGIES[name].options
    moved = options.MOVED  # type: ignore[attr-defined]
    assert moved and not set(moved) & set(options.model_fields)
    for advice in moved.values():
        written = re.findall(r"`name: ([\w-]+)`", advice)
        assert set(written) <= set(STRATEGIES) and (written or "compression: {choco: int8" in advice)


def test_an_unbalanced_pattern_gives_away_what_others_take() -> None:
    """Rows of its matrix sum to 1, and columns do not."""
    topology = custom(4, lopsided, is_balanced=False)
    for k in range(6):
        matrix = topology.matrix(k)
        np.testing.assert_allclose(matrix.sum(axis=1), 1.0, rtol=0.0, atol=1e-12)
        assert abs(matrix.sum(axis=0) - 1.0).max() > 0.1
        assert [matrix[rank, rank] for rank in range(4)] == [topology.kept(k, rank) for rank in range(4)]
