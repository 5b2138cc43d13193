"""Corrections of stale gradients on a server, against lists of events in NumPy."""

import heapq
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from starling.engines.virtual.cluster import Cluster, ComputeModel
from starling.engines.virtual.timing import simulate_timing
from starling.strategies import STRATEGIES
from starling.strategies.server import ServerOptions
from starling.strategies.staleness import DelayCompensation, correction
from starling.training.stragglers import Stragglers
from tests.contract.cases import sgd
from tests.contract.oracle import Vector, gradient_of_regression
from tests.contract.problems import TinyRegression
from tests.contract.test_contract import flat
from tests.contract.test_servers import AT_ONCE, INSTANT, model, run

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
        outcome = run("parameter-server", ServerOptions(**options), 3, instant, sgd(0.1), stragglers=slow)
        weights: Vector = model(outcome).double().numpy()
        return weights

    found = trained(**RULES[rule])
    np.testing.assert_allclose(found, one_after_the_other(oracle(rule), 24, 0.1), rtol=0.0, atol=2e-6)
    assert np.abs(found - trained()).max() > 1e-3


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
    mine = correction(ServerOptions.model_validate(RULES[rule]).staleness)
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
    with pytest.raises(ValueError, match="under hybrid no gradient is stale; leave it out"):
        ServerOptions(update="hybrid", staleness=DelayCompensation(delay_compensation=0.04))
