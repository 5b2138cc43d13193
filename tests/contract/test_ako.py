"""What Ako keeps: at which weights gradients are taken, and that every step reaches everybody once."""

from collections import defaultdict
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from starling.budget import Budget
from starling.configuration import Config
from starling.engines.virtual.engine import VirtualEngine
from starling.learner import Handle, Learner
from starling.strategies import STRATEGIES
from starling.training.job import Job
from starling.training.speeds import Stragglers
from tests.contract.cases import sgd
from tests.contract.matrix_form import Matrix, Vector
from tests.contract.oracle import gradient_of_regression
from tests.contract.problems import TinyRegression
from tests.contract.test_asynchronous import EQUAL
from tests.contract.test_contract import flat

LEARNERS, STEPS = 3, 24


class Watched:
    """A run of Ako with SGD of rate 0.1 that notes where each learner takes its gradients."""

    def __init__(self, parts: int, combine: str, slow: dict[int, float]) -> None:
        self.taken_at: defaultdict[int, list[Vector]] = defaultdict(list)
        self.gradients: defaultdict[int, list[Vector]] = defaultdict(list)
        ako = STRATEGIES["ako"]

        async def run(me: Learner, chosen: Config) -> None:
            take, step = me.gradient, me.step

            def noted(at: Tensor) -> Handle[Tensor]:
                self.taken_at[me.rank].append(at.double().numpy().copy())
                return take(at)

            def stepped(gradient: Tensor, read_at: int | None = None, scale: float = 1.0) -> None:
                self.gradients[me.rank].append(gradient.double().numpy().copy())
                step(gradient, read_at, scale)

            me.gradient, me.step = noted, stepped  # type: ignore[method-assign]
            await ako.run(me, chosen)

        job = Job(
            TinyRegression(),
            replace(ako, run=run),
            Budget(steps=STEPS),
            sgd(0.1),
            options=ako.options(parts=parts, combine=combine),
            stragglers=Stragglers(slow=slow),
            seed=11,
        )
        states = VirtualEngine(job, LEARNERS, EQUAL).run().states
        self.final: Matrix = torch.stack([state.weights for state in states], dim=1).double().numpy()


@pytest.mark.parametrize("combine", ["mean", "sum"])
def test_in_one_part_the_next_gradient_knows_all_own_ones_and_those_of_others_but_the_last(
    combine: Literal["mean", "sum"],
) -> None:
    """With p = 1 and equal speeds, learner l takes gradient k + 1 at w - b (sum of its own gradients up to k + sum of
    all others' up to k - 1), b = a / L or a; at the end everybody has w - b (sum of all)."""
    watched, b = Watched(1, combine, {}), 0.1 / LEARNERS if combine == "mean" else 0.1
    start, gradient = flat(TinyRegression().make_model()).double().numpy(), gradient_of_regression()
    rounds = STEPS // LEARNERS
    g = np.zeros((rounds, LEARNERS, len(start)))
    for k in range(rounds):
        for rank in range(LEARNERS):
            others = [other for other in range(LEARNERS) if other != rank]
            known = g[:k, rank].sum(axis=0) + g[: max(0, k - 1), others].sum(axis=(0, 1))
            at = start - b * known
            np.testing.assert_allclose(watched.taken_at[rank][k], at, rtol=0.0, atol=1e-6)
            g[k, rank] = gradient(at, k * LEARNERS + rank)
    assert all(len(each) == rounds for each in watched.taken_at.values())
    for weights in watched.final.T:
        np.testing.assert_allclose(weights, start - b * g.sum(axis=(0, 1)), rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("slow", [{}, {0: 5.0}, {2: 1.7}], ids=["equal", "first", "last"])
@pytest.mark.parametrize("combine", ["mean", "sum"])
@pytest.mark.parametrize("parts", [1, 2, 3, 7, 29])
def test_at_the_end_every_gradient_has_moved_every_learner_once(
    parts: int, combine: Literal["mean", "sum"], slow: dict[int, float]
) -> None:
    """In any number of parts and at any speeds all end at w - b (sum of all gradients)."""
    watched, b = Watched(parts, combine, slow), 0.1 / LEARNERS if combine == "mean" else 0.1
    counts = [len(watched.gradients[rank]) for rank in range(LEARNERS)]
    assert sum(counts) == STEPS and (len(set(counts)) > 1) == bool(slow)
    total = sum(sum(each) for each in watched.gradients.values())
    expected = flat(TinyRegression().make_model()).double().numpy() - b * total
    for weights in watched.final.T:
        np.testing.assert_allclose(weights, expected, rtol=0.0, atol=1e-6)
