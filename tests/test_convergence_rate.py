"""ADPSGD on a smooth problem with known constants: the constants are right, and the bound of its paper holds."""

import math
from pathlib import Path

import pytest
import torch

from benchmarks.convergence_rate import (
    BEGIN,
    DIMENSIONS,
    LIPSCHITZ,
    VARIANCE,
    Noisy,
    Run,
    bound,
    gradient,
    measure,
    objective,
    read_runs,
    step_size,
    table,
    table_of_increases,
    table_of_variants,
)
from starling.workload import Ticket

RESULTS = Path(__file__).parents[1] / "docs" / "results"


def test_the_constants_of_the_problem_are_those_of_its_function() -> None:
    """Gradient and curvature come from autograd, the variance of the noise from samples."""
    x = torch.linspace(-4.0, 4.0, 2001, dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(objective(x[:, None]).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(first, gradient(x))
    assert second.abs().max().item() == pytest.approx(LIPSCHITZ)
    assert second.min().item() == pytest.approx(-0.5, abs=1e-4)  # not convex
    assert objective(torch.ones(DIMENSIONS)).item() == BEGIN
    noise = torch.stack([Noisy(1).load(Ticket(0, index, index))[0].noise for index in range(2000)])
    assert noise.square().sum(1).mean().item() == pytest.approx(VARIANCE, rel=0.05)
    assert noise.mean(0).square().sum().item() < 5 * VARIANCE / 2000


def test_the_bound_is_the_theorem_at_the_step_size_of_the_corollary() -> None:
    """2 n (f(x_0) - f*) / (a K) + 2 a L sigma^2 / n is at most the corollary's bound, for every number of learners."""
    for steps in (100, 10_000):
        for learners in (1, 7, 64):
            a = step_size(steps, learners)
            theorem = 2 * learners * BEGIN / (a * steps) + 2 * a * LIPSCHITZ * VARIANCE / learners
            assert theorem <= bound(steps)
            assert theorem > 0.8 * bound(steps)


@pytest.mark.wide
def test_adpsgd_keeps_the_bound_and_does_not_depend_on_a_few_learners() -> None:
    """With one and with four learners and the same number of gradients, the mean squared gradient agrees within 10 %,
    in a quarter of the time, and is below the bound."""
    one, four = (measure(256, learners, seed=1) for learners in (1, 4))
    assert 0.1 * bound(256) < one.gradients < bound(256)
    assert four.gradients == pytest.approx(one.gradients, rel=0.1)
    assert four.seconds == pytest.approx(one.seconds / 4, rel=0.1)
    assert one.distance == 0.0 < four.distance


def test_the_tables_have_a_line_for_each_number_of_steps() -> None:
    """Means have intervals over seeds, increases are paired by seed, and missing runs are dashes."""
    values = {(100, 1): (0.5, 0.7), (100, 2): (0.6, 0.84), (200, 1): (0.3,)}
    runs = [Run(*key, seed, value, 0.0, 1.0) for key, own in values.items() for seed, value in enumerate(own)]
    half = 12.706204736 * math.sqrt(0.02 / 2)
    first, second = table(runs)[2:]
    assert first == f"| 100 | 0.6000 ± {half:.4f} | 0.7200 ± {1.2 * half:.4f} | 8.800 | 12.2 to 14.7 |"
    assert second == "| 200 | 0.3000 | — | 5.394 | 18.0 to 18.0 |"
    assert table_of_increases(runs) == ["| K | L = 2 |", "|---|---|", "| 100 | +20.0 ± 0.0 |"]


def test_the_page_has_the_tables_of_its_file() -> None:
    variants = read_runs(RESULTS / "rate" / "rate.json")
    runs = variants.pop("runs")
    alone = [run for run in runs if run.learners == 1]
    tables = (
        table(runs),
        table_of_increases(runs),
        table_of_variants({k: [*alone, *own] for k, own in variants.items()}),
    )
    page = (RESULTS / "rate.md").read_text(encoding="utf-8")
    assert all("\n".join(each) in page for each in tables)
