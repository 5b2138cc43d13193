"""Corrections of stale gradients, on a server and on a learner of adpsgd, against lists of events in NumPy."""

import heapq
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from starling.configuration import checked
from starling.engines.loop.replica import LoopReplica
from starling.engines.virtual.cluster import Cluster, ComputeModel
from starling.engines.virtual.timing import simulate_timing
from starling.errors import ConfigError
from starling.learner import Learner
from starling.strategies import STRATEGIES
from starling.strategies.adpsgd import AsynchronousOptions
from starling.strategies.hadpsgd import HierarchicalOptions
from starling.strategies.parts.rules import Asynchronous, ServerOptions
from starling.topology import find_topology
from starling.training.faults import NotFinite
from starling.training.speeds import Stragglers
from tests.contract.cases import LEARNING_RATE, sgd
from tests.contract.conftest import Runner
from tests.contract.oracle import Matrix, Vector, gradient_of_regression
from tests.contract.problems import TinyRegression
from tests.contract.test_contract import flat
from tests.contract.test_servers import AT_ONCE, EQUAL, INSTANT, Notes, model, run

SECONDS = (1.0, 2.3, 3.7)
"""Of a gradient of each worker."""
Correct = Callable[[Vector, Vector, Vector], Vector]
"""From a gradient, the present weights and those at which it was taken."""
RULES: dict[str, dict[str, Any]] = {
    "gap-aware": {"staleness": "gap-aware"},
    "constant": {"staleness": {"delay_compensation": 0.5}},
    "adaptive": {"staleness": {"delay_compensation": 2.0, "mean_square": 0.95}},
}


def oracle(rule: str) -> Correct:
    """The corrections of the papers, one worker's gradient at a time.

    `constant` and `adaptive`: DC-ASGD-c and DC-ASGD-a, the server's update of Algorithm 2 of Zheng et al. 2017, arXiv
    1609.08326, g + lambda g * g * (w - w_bak), the latter with lambda_0 / sqrt(MeanSquare + 1e-7) for lambda and
    MeanSquare <- m MeanSquare + (1 - m) g * g. `gap-aware`: Gap-Aware of Barkai, Hakimi & Schuster 2019, arXiv
    1909.10802, g / (1 + |w - w_read| / C); C is our choice, the mean length of the steps that were made.
    """
    mean_square, before, lengths = np.zeros(29), [], []

    def gap_aware(gradient: Vector, now: Vector, read: Vector) -> Vector:
        lengths.extend(np.linalg.norm(now - each) for each in before[-1:])
        before.append(now)
        gap = np.linalg.norm(now - read) / np.mean(lengths) if lengths else 0.0
        return gradient / (1.0 + gap)

    def constant(gradient: Vector, now: Vector, read: Vector) -> Vector:
        return gradient + 0.5 * gradient**2 * (now - read)

    def adaptive(gradient: Vector, now: Vector, read: Vector) -> Vector:
        mean_square[:] = 0.95 * mean_square + 0.05 * gradient**2
        return gradient + 2.0 / np.sqrt(mean_square + 1e-7) * gradient**2 * (now - read)

    return {"gap-aware": gap_aware, "constant": constant, "adaptive": adaptive}[rule]


def one_after_the_other(correct: Correct, steps: int, learning_rate: float) -> Vector:
    """w <- w - a g' whenever a worker is done."""
    gradient, weights = gradient_of_regression(), flat(TinyRegression().make_model()).double().numpy()
    under_way = [(each, worker, worker, weights) for worker, each in enumerate(SECONDS)]
    claimed = len(SECONDS)
    while under_way:
        now, worker, ticket, read = heapq.heappop(under_way)
        weights = weights - learning_rate * correct(gradient(read, ticket), weights, read)
        if claimed < steps:
            heapq.heappush(under_way, (now + SECONDS[worker], worker, claimed, weights))
            claimed += 1
    return weights


@pytest.mark.parametrize("rule", RULES)
def test_corrected_updates_follow_their_events(rule: str) -> None:
    """Workers of unlike speed, so that stalenesses differ; and it makes a difference."""
    slow = Stragglers(slow={rank: each for rank, each in enumerate(SECONDS) if each > 1.0})
    instant = Cluster(compute=ComputeModel(seconds=1.0), link=AT_ONCE, memory=INSTANT)

    def trained(**options: Any) -> Vector:
        outcome = run("parameter-server", ServerOptions.model_validate(options), 3, instant, sgd(0.1), stragglers=slow)
        weights: Vector = model(outcome).double().numpy()
        return weights

    found = trained(**RULES[rule])
    np.testing.assert_allclose(found, one_after_the_other(oracle(rule), 24, 0.1), rtol=0.0, atol=2e-6)
    assert np.abs(found - trained()).max() > 1e-3


@pytest.mark.wide
@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"update": "summed", "sum": 3}, {"shards": 3}], ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_every_asynchronous_server_has_the_weights_of_each_gradient(rule: str, options: dict[str, Any]) -> None:
    """With messages that take time; and a simulation of time alone has as many gradients and bytes."""
    chosen = ServerOptions.model_validate(RULES[rule] | options)
    cluster = Cluster(compute=ComputeModel(seconds=1.0, distribution="uniform", spread=0.5))
    weights = model(run("parameter-server", chosen, 4, cluster, sgd(0.05)))
    assert bool(weights.isfinite().all())
    timing = simulate_timing(STRATEGIES["parameter-server"], chosen, 4, cluster, 4 * 29, 24)
    assert timing.num_gradients == 24


@pytest.mark.parametrize("rule", RULES)
def test_a_gradient_that_is_not_stale_is_not_changed(rule: str) -> None:
    """To the bit, marks of weights without a gradient included; nor are such marks changed in a stale one."""
    me = cast(Learner, SimpleNamespace(strategy_state=lambda name, initial, is_common: initial))
    mine = Asynchronous.model_validate(RULES[rule]).correction(me)
    assert mine is not None
    gradient = torch.tensor([0.5, -0.0, 3.0, -2.0])
    for age in range(3):
        weights = torch.arange(4.0) * age
        mine.gave(0, age, weights)
        mine.before_step(weights)
        found = mine.correct(0, age, gradient, weights.clone())
        assert torch.equal(found, gradient) and bool(found[1].signbit())
    mine.gave(1, 3, torch.zeros(4))
    stale = mine.correct(1, 3, gradient, torch.ones(4))
    assert bool(stale[1].signbit()) and stale[1] == 0.0 and not torch.equal(stale, gradient)


def test_rules_without_staleness_refuse_a_correction() -> None:
    """With what to do."""
    with pytest.raises(ConfigError, match="staleness: only for update: asynchronous, summed; leave it out"):
        checked(ServerOptions, {"update": "hybrid", "staleness": {"delay_compensation": 0.04}}, "parameter-server")


def of_learner(rule: str) -> tuple[Correct, Callable[[Vector, Vector], None]]:
    """The oracle of one learner of adpsgd, and what to tell it after each step: the weights before and after. Its unit
    of a gap is its own step."""
    lengths: list[float] = []

    def gap_aware(gradient: Vector, now: Vector, read: Vector) -> Vector:
        return gradient / (1.0 + np.linalg.norm(now - read) / np.mean(lengths)) if lengths else gradient

    def stepped(before: Vector, after: Vector) -> None:
        lengths.append(float(np.linalg.norm(after - before)))

    if rule == "scaled":
        return (lambda gradient, now, read: gradient), stepped
    return (gap_aware if rule == "gap-aware" else oracle(rule)), stepped


def averaged_beside(rule: str, learners: int, per_gradient: int, learning_rate: float) -> Matrix:
    """w_l <- w_l - a g_l' at equal speeds, where all rounds since the last step have moved w_l from Phi_l."""
    gradient, start = gradient_of_regression(), flat(TinyRegression().make_model()).double().numpy()
    topology, rules = find_topology("pairs", learners, seed=11), [of_learner(rule) for _ in range(learners)]
    weights = read = np.tile(start[:, None], (1, learners))
    for step in range(24 // learners):
        rate = learning_rate / per_gradient if rule == "scaled" and step else learning_rate
        stepped = np.empty_like(weights)
        for rank, (correct, note) in enumerate(rules):
            now, phi = weights[:, rank], read[:, rank]
            stepped[:, rank] = now - rate * correct(gradient(phi, step * learners + rank), now, phi)
            note(now, stepped[:, rank])
        weights = read = stepped
        for k in range(per_gradient * step, per_gradient * (step + 1)):
            weights = weights @ topology.matrix(k)
    return weights


@pytest.mark.parametrize("per_gradient", [1, 2])
@pytest.mark.parametrize("rule", [*RULES, "scaled"])
def test_corrected_learners_that_average_follow_their_equation(rule: str, per_gradient: int) -> None:
    """In matrix form, at equal speeds: each gradient has the staleness of the rounds for each gradient."""
    given, notes = {"pattern": "pairs", "period": 1.0 / per_gradient}, Notes()

    def trained(**rules: Any) -> Matrix:
        outcome = run("adpsgd", AsynchronousOptions.model_validate(given | rules), 4, EQUAL, sgd(0.1), notes=notes)
        return np.stack([state.weights.double().numpy() for state in outcome.states], axis=1)

    found = trained(**RULES.get(rule, {"scale_by_staleness": True}))
    np.testing.assert_allclose(found, averaged_beside(rule, 4, per_gradient, 0.1), rtol=0.0, atol=2e-6)
    assert notes.staleness == {0: 4, per_gradient: 20}
    assert np.abs(found - trained()).max() > 5e-4 or (rule == "scaled" and per_gradient == 1)


@pytest.mark.wide
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("options", [{}, {"piece_megabytes": 1e-4, "optimizer_state": "averaged"}], ids=str)
def test_one_learner_that_averages_with_none_is_not_corrected(rule: str, options: dict[str, Any]) -> None:
    """To the bit, clipped or not, as nothing moves its weights; a gradient that is not finite spoils no rule."""
    chosen = AsynchronousOptions.model_validate(RULES[rule] | options | {"scale_by_staleness": True})
    for more in ({}, {"clip_norm": 0.05}, {"faults": (NotFinite(nan=0, at_step=3),)}):
        found, plain = (
            model(run("adpsgd", each, 1, EQUAL, sgd(0.1), **more)) for each in (chosen, AsynchronousOptions())
        )
        assert torch.equal(found, plain)
    cluster = Cluster(compute=ComputeModel(seconds=1.0, distribution="uniform", spread=0.5))
    faults = tuple(NotFinite(nan=rank, at_step=2) for rank in range(4))
    assert bool(model(run("adpsgd", chosen, 4, cluster, sgd(0.05), faults=faults)).isfinite().all())
    timing = simulate_timing(STRATEGIES["adpsgd"], chosen, 4, cluster, 4 * 29, 24)
    assert timing.num_gradients == 24


@pytest.mark.parametrize("engine", ["on_virtual", "on_processes"])
@pytest.mark.parametrize("learners", [2, 3])
def test_corrected_learners_make_shorter_steps(learners: int, engine: str, request: pytest.FixtureRequest) -> None:
    """Every gradient is 1, and both rules shrink steps: all weights move alike, and less far than without rules."""
    run_case: Runner = request.getfixturevalue(engine)
    moved = torch.stack(run_case("adpsgd-pairs/corrected", learners)).double().mean(dim=0)
    assert bool((moved == moved[0]).all()) and -LEARNING_RATE * 60 / learners * (1 + 1e-6) <= float(moved[0]) < 0.0


def test_a_joined_loop_makes_a_step_at_a_part_of_its_rate() -> None:
    """And has its rates back afterwards."""
    linear = torch.nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.5)
    replica = LoopReplica(linear, optimizer, is_shared=False)
    before = replica.weights.clone()
    replica.step(torch.tensor([1.0, -2.0]), 0.25)
    torch.testing.assert_close(before - replica.weights, torch.tensor([0.125, -0.25]))
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_learners_that_must_take_the_same_step_refuse_a_correction() -> None:
    """Those of a super-learner would each correct for changes that they have applied at moments of their own."""
    with pytest.raises(ValueError, match="staleness"):
        HierarchicalOptions.model_validate({"per_node": 2, "staleness": "gap-aware"})
    with pytest.raises(ValueError, match="delay_compensation"):
        AsynchronousOptions.model_validate({"staleness": {"delay_compensation": 0.0}})
