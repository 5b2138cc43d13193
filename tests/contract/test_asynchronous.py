"""What strategies keep whose learners wait for nobody: invariants on real processes, equations on the virtual clock."""

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from starling.budget import Budget
from starling.chance import derive_seed
from starling.consensus import consensus_distance, rank_ordered_mean
from starling.engines.virtual.cluster import Cluster, ComputeModel, LinkModel
from starling.engines.virtual.engine import VirtualEngine
from starling.learner import Learner
from starling.strategies import STRATEGIES, Strategy
from starling.strategies.adpsgd import AsynchronousOptions, adpsgd
from starling.strategies.parts.mixing import Rounding
from starling.training.job import EpochReport, Job, Observer, StepReport
from starling.training.speeds import Pause, Stragglers
from starling.workload import Ticket
from tests.contract.cases import CHOICES, LEARNING_RATE, PERIODIC, cases, sgd
from tests.contract.conftest import LARGER, Runner
from tests.contract.oracle import (
    ASYNCHRONOUS,
    SYNCHRONOUS,
    gradient_of_regression,
    pairs_contraction,
    random_ring_contraction,
    ring_eigenvalues,
)
from tests.contract.problems import NoisyQuadratic, TinyRegression

EQUAL = Cluster(compute=ComputeModel(seconds=1.0), link=LinkModel(latency=0.01, bandwidth=1e12))
asynchronous = [name for name, choice in CHOICES.items() if not choice.is_synchronous]
every_asynchronous = pytest.mark.parametrize("strategy", asynchronous)
every_engine = pytest.mark.parametrize("engine", ["on_virtual", "on_processes"])


def worlds(strategy: str) -> list[int]:
    return [2, 3, 4] if f"{strategy}/" in LARGER else [2, 3]


every_world = pytest.mark.parametrize(
    ("strategy", "learners"), [(name, learners) for name in CHOICES for learners in worlds(name)]
)


@every_engine
@every_world
def test_gradients_and_mixing_at_once_lose_no_update(
    strategy: str, learners: int, engine: str, request: pytest.FixtureRequest
) -> None:
    """Every gradient is 1, so the mean of the weights counts the steps; mixing in the background may not change it."""
    run: Runner = request.getfixturevalue(engine)
    check_that_all_updates_count(strategy, run(f"{strategy}/counted", learners), engine == "on_processes")


def check_that_all_updates_count(strategy: str, found: Sequence[Tensor], are_processes: bool) -> None:
    """`found` are the weights of each learner after 60 steps with gradients of 1.

    Processes without a lock may overwrite each other, and then lose something, but never most of it.
    """
    learners, weights = len(found), torch.stack(list(found)).double().mean(dim=0)
    expected = torch.full_like(weights, -LEARNING_RATE * 60 * CHOICES[strategy].share(learners))
    if strategy in (
        *PERIODIC,
        "dpsgd-quasi-global",
    ):  # an outer momentum moves the model by more or less than the steps
        start, rounds = np.zeros(len(weights)), 60 // learners
        columns = SYNCHRONOUS[strategy](start, lambda at, _: np.ones_like(at), LEARNING_RATE, learners, rounds)
        expected = torch.from_numpy(columns.mean(axis=1))
    if strategy == "hogwild" and are_processes:
        assert ((weights >= expected - 1e-6) & (weights <= 0.5 * expected)).all()
        return
    if strategy == "server-aeasgd":  # the model is what learners have drawn to them
        assert ((weights >= -LEARNING_RATE * 60) & (weights < -LEARNING_RATE)).all()
        return
    if strategy.startswith("decoupled-diloco"):  # in a merge, a learner counts as often as the steps that it has made
        assert ((weights >= -LEARNING_RATE * 60) & (weights <= expected + 1e-6)).all()
        return
    if strategy == "sparseloco":  # which of equal numbers are sent is left open, but not how many
        weights, expected = weights.sort().values, expected.sort().values
    tolerance = 2**-8 if "bfloat16" in strategy else 1e-6
    if "int8" in strategy:  # weights are rounded once more for each neighbour, when its change is added
        tolerance = 1e-5
    torch.testing.assert_close(weights, expected, rtol=tolerance, atol=0.0)


@every_engine
@every_world
@pytest.mark.parametrize("variant", ["one-step", "no-step", "first-is-slow", "last-is-slow"])
def test_every_order_of_finishing_is_a_clean_end(
    strategy: str, learners: int, variant: str, engine: str, request: pytest.FixtureRequest
) -> None:
    """Learners that never got a mini-batch, or are far behind the others, neither hang nor are waited for in vain."""
    run: Runner = request.getfixturevalue(engine)
    start = torch.cat([part.detach().reshape(-1) for part in TinyRegression().make_model().parameters()])
    weights = run(f"{strategy}/{variant}", learners)
    assert len(weights) == learners
    assert any(not torch.equal(each, start) for each in weights) == (variant != "no-step")
    assert all(bool(torch.isfinite(each).all()) for each in weights)


@pytest.mark.parametrize("engine", ["on_virtual", pytest.param("on_processes", marks=pytest.mark.wide)])
def test_learners_of_a_super_learner_agree_to_rounding(engine: str, request: pytest.FixtureRequest) -> None:
    """Two super-learners of two: their learners take the same steps and the same changes, at moments of their own."""
    run: Runner = request.getfixturevalue(engine)
    for variant in ("sgd", "adam", "accumulated"):
        first, second, third, fourth = run(f"hadpsgd/{variant}", 4)
        torch.testing.assert_close(first, second, rtol=0.0, atol=1e-5)
        torch.testing.assert_close(third, fourth, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("strategy", ASYNCHRONOUS)
@pytest.mark.parametrize("learners", [2, 3, 4])
def test_learners_of_one_speed_follow_the_delayed_recursion(strategy: str, learners: int) -> None:
    """Where a round takes less time than a gradient and all gradients take the same, these have a matrix form."""
    start = torch.cat([part.detach().reshape(-1) for part in TinyRegression().make_model().parameters()])
    expected = ASYNCHRONOUS[strategy](start.double().numpy(), gradient_of_regression(), 0.1, learners, 24 // learners)
    states = VirtualEngine(cases()[f"{strategy}/sgd"].job(learners), learners, EQUAL).run().states
    measured = torch.stack([state.weights for state in states], dim=1).double().numpy()
    np.testing.assert_allclose(measured, expected, rtol=0.0, atol=2e-6)


def shrinkage(
    pattern: str, learners: int, rounds: int, seed: int, beginning: Callable[[int], Tensor], strategy: str = "adpsgd"
) -> float:
    """What `rounds` averagings without gradients leave of the consensus distance."""

    async def apart(me: Learner, options: AsynchronousOptions) -> None:
        me.apply(beginning(me.rank))
        await adpsgd(me, options)

    dimensions = len(beginning(0))
    job = Job(
        workload=NoisyQuadratic(dimensions, curvature=0.0),
        strategy=Strategy("apart", "only in tests", apart, lambda options, world: 1, AsynchronousOptions),
        options=AsynchronousOptions(pattern=pattern),
        budget=Budget(steps=rounds * learners),
        make_optimizer=sgd(0.0),
        seed=seed,
    )
    first = [beginning(rank) for rank in range(learners)]
    last = [state.weights for state in VirtualEngine(job, learners, EQUAL).run().states]
    before, after = (consensus_distance(each, rank_ordered_mean(each)) for each in (first, last))
    return after / before


def noise(dimensions: int, seed: int) -> Callable[[int], Tensor]:
    def of(rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(derive_seed(seed, "apart", rank))
        return torch.randn(dimensions, generator=generator)

    return of


@pytest.mark.parametrize(
    ("pattern", "factor", "learners"),
    [
        pytest.param("random", random_ring_contraction, 64, marks=pytest.mark.wide),
        ("pairs", pairs_contraction, 8),
        *(
            pytest.param(*case, marks=pytest.mark.soak)
            for case in (
                ("random", random_ring_contraction, 8),
                ("random", random_ring_contraction, 16),
                ("pairs", pairs_contraction, 16),
                ("pairs", pairs_contraction, 64),
            )
        ),
    ],
)
def test_random_patterns_contract_as_their_closed_forms_say(
    pattern: str, factor: Callable[[int], float], learners: int
) -> None:
    """The expected consensus distance shrinks by the same factor in every direction, round after round.

    Of few learners and of many; `make soak` has the other numbers of each.
    """
    rounds, seeds = 4, 480 // learners
    left = [shrinkage(pattern, learners, rounds, seed, noise(256, seed)) for seed in range(seeds)]
    assert (sum(left) / seeds) ** (1 / rounds) == pytest.approx(factor(learners), rel=0.03)


@pytest.mark.parametrize("learners", [8, pytest.param(16, marks=pytest.mark.soak), 64])
def test_the_fixed_ring_contracts_as_its_eigenvalues_say(learners: int) -> None:
    """Isotropic differences shrink by the mean of lambda^2n, the slowest wave around the ring by its own lambda^2n.

    Of few learners and of many; `make soak` has a number in between.
    """
    rounds, eigenvalues = 5, ring_eigenvalues(learners)
    left = shrinkage("ring", learners, rounds, 1, noise(4096, seed=1))
    assert left == pytest.approx(float((eigenvalues[1:] ** (2 * rounds)).mean()), rel=0.03)

    def wave(rank: int) -> Tensor:
        return torch.full((4,), float(np.cos(2 * np.pi * rank / learners)))

    slowest = float(np.sort(np.abs(eigenvalues))[-2])
    assert shrinkage("ring", learners, rounds, 1, wave) == pytest.approx(slowest ** (2 * rounds), rel=0.001)


class Ends(Observer):
    """Remembers what learners report."""

    def __init__(self) -> None:
        self.steps: list[StepReport] = []
        self.epochs: list[EpochReport] = []
        self.positions: dict[int, list[Ticket]] = {}

    def on_step(self, report: StepReport) -> None:
        self.steps.append(report)

    def on_epoch(self, report: EpochReport, state: object) -> None:
        self.epochs.append(report)
        self.positions.setdefault(report.rank, []).append(state.position.next_ticket)  # type: ignore[attr-defined]


def watched(
    options: AsynchronousOptions, learners: int, budget: Budget, stragglers: Stragglers, cluster: Cluster = EQUAL
) -> Ends:
    ends = Ends()
    job = Job(TinyRegression(), STRATEGIES["adpsgd"], budget, sgd(0.1), options=options, stragglers=stragglers)
    VirtualEngine(job, learners, cluster, ends).run()
    return ends


@pytest.mark.parametrize("pattern", ["ring", "random", "pairs"])
def test_a_slow_learner_does_not_delay_its_neighbours(pattern: str) -> None:
    """Nine learners of ten keep their pace to the last gradient, and go through a round for each."""
    ends = watched(AsynchronousOptions(pattern=pattern), 10, Budget(minutes=1.0), Stragglers(slow={4: 10.0}))
    counts = [sum(report.num_steps for report in ends.epochs if report.rank == rank) for rank in range(10)]
    rounds = [sum(report.averaging.rounds for report in ends.epochs if report.rank == rank) for rank in range(10)]
    assert counts[4] == 6
    assert all(count == 60 for rank, count in enumerate(counts) if rank != 4)
    assert len(set(rounds)) == 1
    assert rounds[0] == pytest.approx(60, abs=1)


@pytest.mark.parametrize("strategy", ["allreduce", "delay-by-one", "dpsgd"])
def test_in_step_everybody_goes_at_the_pace_of_the_slowest(strategy: str) -> None:
    """One learner of ten that is ten times as slow makes all of them so, sooner or later."""
    ends = Ends()
    slow = Stragglers(slow={4: 10.0})
    chosen = STRATEGIES[strategy]
    options = chosen.options()
    job = Job(TinyRegression(), chosen, Budget(minutes=1.0), sgd(0.1), options=options, stragglers=slow)
    VirtualEngine(job, 10, EQUAL, ends).run()
    for rank in range(10):
        times = [60.0 * report.minutes for report in ends.steps if report.rank == rank]
        assert np.diff(times)[-3:] == pytest.approx([10.0] * 3, abs=0.5)  # a ring's far side may begin ahead


def test_a_learner_that_pauses_is_not_waited_for() -> None:
    """The others take the mini-batches that it leaves."""
    pause = Stragglers(pauses=(Pause(learner=1, after=3, seconds=1000.0),))
    ends = watched(AsynchronousOptions(), 3, Budget(steps=90), pause)
    steps = sorted((report.rank, report.minutes * 60) for report in ends.steps)
    counts = {rank: len(list(group)) for rank, group in itertools.groupby(steps, key=lambda step: step[0])}
    assert counts[1] == 3
    assert sum(counts.values()) == 90
    assert max(seconds for rank, seconds in steps if rank != 1) < 50.0


@pytest.mark.wide
@pytest.mark.parametrize("period", [0.5, 1.0, 4.0])
def test_the_period_bounds_rounds_per_gradient(period: float) -> None:
    """Learners of varying speed go through about 1 / period rounds for each of their gradients, not through many."""
    varying = Cluster(
        compute=ComputeModel(distribution="log-normal", seconds=1.0, spread=0.4),
        link=LinkModel(latency=1e-3, bandwidth=1e12),
    )
    ends = watched(AsynchronousOptions(period=period), 16, Budget(steps=16 * 40), Stragglers(), varying)
    rounds = sum(report.averaging.rounds for report in ends.epochs if report.rank == 0)
    assert 0.95 <= rounds / 40 * period <= 1.6


def test_every_ticket_is_handed_out_once_and_epochs_end_for_everybody() -> None:
    """Whatever the speeds: each mini-batch is computed by one learner, and all learners pass the same ends of epochs,
    also one that had no mini-batch in some of them."""
    ends = watched(AsynchronousOptions(), 5, Budget(epochs=4), Stragglers(slow={2: 40.0}, jitter=0.5))
    tickets = sorted((report.ticket.epoch, report.ticket.index) for report in ends.steps)
    assert tickets == [(epoch, index) for epoch in range(4) for index in range(12)]
    assert sum(report.num_steps for report in ends.epochs) == 48
    expected = [Ticket(epoch, 0, 12 * epoch) for epoch in range(1, 5)]
    assert all(positions == expected for positions in ends.positions.values())
    assert len(ends.positions) == 5


def test_staleness_counts_the_changes_between_reading_and_stepping() -> None:
    """With one round for each gradient, which ends while the next gradient is computed, staleness is 1."""
    ends = watched(AsynchronousOptions(), 4, Budget(steps=80), Stragglers())
    counts = sum((report.averaging.staleness for report in ends.epochs), start=ends.epochs[0].averaging.staleness)
    assert set(counts) == {0, 1}
    assert sum(report.averaging.staleness[0] for report in ends.epochs) == 4  # the first gradient of each


def test_bytes_are_those_of_the_weights_and_half_of_them_as_bfloat16() -> None:
    """Pairs send all weights once a round."""
    for compression, size in (("none", 4), ("bfloat16", 2)):
        options = AsynchronousOptions(pattern="pairs", compression=compression)
        ends = watched(options, 2, Budget(steps=20), Stragglers())
        rounds = sum(report.averaging.rounds for report in ends.epochs if report.rank == 0)
        sent = sum(report.averaging.bytes_sent for report in ends.epochs if report.rank == 0)
        assert rounds > 5
        assert sent == rounds * 29 * size


def test_what_rounding_takes_away_comes_back_later() -> None:
    """Error feedback: the mean of what was sent is what was meant, far below the resolution of bfloat16."""
    meant = torch.tensor([1.0 + 2**-11, 3.14159265])
    rounding = Rounding(meant, [slice(0, 2)])
    sent = []
    for _ in range(4096):
        mine = meant.clone()
        encoded = rounding.encode(mine, slice(0, 2))
        assert torch.equal(encoded.float(), mine)  # what the others see is what the difference is taken from
        sent.append(mine)
    assert not torch.equal(sent[0], meant)
    torch.testing.assert_close(torch.stack(sent).mean(dim=0), meant, rtol=2e-6, atol=0.0)


def test_optimizer_state_that_is_averaged_agrees_among_learners() -> None:
    """With little learning rate and many rounds, momenta that are averaged are alike, and local ones are not."""

    def spread(optimizer_state: str) -> float:
        job = Job(
            TinyRegression(),
            STRATEGIES["adpsgd"],
            Budget(steps=120),
            lambda parameters: torch.optim.SGD(parameters, lr=1e-6, momentum=0.99),
            options=AsynchronousOptions(pattern="complete", optimizer_state=optimizer_state),  # type: ignore[arg-type]
        )
        states = VirtualEngine(job, 4, EQUAL).run().states
        momenta = [
            torch.cat([each["momentum_buffer"].reshape(-1) for each in state.optimizer["state"].values()])
            for state in states
        ]
        return consensus_distance(momenta, rank_ordered_mean(momenta))

    assert spread("averaged") < 0.01 * spread("local")
