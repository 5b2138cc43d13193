"""Rate 0, anything happens, nothing moves."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.boundaries.grid import (
    KINDS,
    SPEEDS,
    WORLDS,
    Cell,
    Method,
    NothingHappened,
    methods,
    named,
    run_cell,
    same_bits,
    tiered,
    undisturbed,
)
from tests.contract.cases import MakeOptimizer
from tests.contract.problems import TinyRegression

STEPS = 12
"""The mini-batches for each learner."""
MOST = 1e-6
"""How far a weight may move over a run, relative to itself, where nothing lossy is sent."""
COARSE = 0.02
"""How far a weight may move where its rounding to bfloat16 is sent."""
MOST_GRADIENTS = 1000.0
"""More than all gradients of a run can come to, momentum included."""
WORKLOAD = TinyRegression()


@cache
def optimizer(rate: float) -> MakeOptimizer:
    """With momentum, because some strategies average it or set it to zero."""
    return lambda parameters: torch.optim.SGD(parameters, lr=rate, momentum=0.9)


def rate_of(method: Method) -> float:
    """0, except for a method that divides by the rate."""
    return 1e-9 if method.strategy.name == "slowmo" else 0.0


@cache
def start() -> Tensor:
    """The weights of all learners when a run begins."""
    job = next(iter(methods().values())).job(WORKLOAD, optimizer(0.0), 0, 1)
    return (
        undisturbed(next(iter(methods().values())), WORKLOAD, optimizer(0.0), job.budget.steps or 0, 1, "even")
        .states[0]
        .weights
    )


def moved(weights: Tensor, rate: float) -> float:
    """How far the weight that moved most has moved: relative to itself, after what the rate alone can do."""
    return float((((weights - start()).abs() - MOST_GRADIENTS * rate).clamp(min=0.0) / start().abs()).max())


@cache
def drift(method: Method) -> float:
    """How far lossy messages move weights where nothing happens."""
    if not method.is_lossy:
        return 0.0
    rate, worlds = rate_of(method), [world for world in (3, 4, 5) if method.fits(world)]
    runs = [undisturbed(method, WORKLOAD, optimizer(rate), STEPS * world, world, "even") for world in worlds]
    return max(moved(state.weights, rate) for run in runs for state in run.states)


def problem(cell: Cell, folder: Path) -> str | None:
    """What a cell breaks. Where lossy messages move nothing, nothing may move; where they let weights drift by
    rounding, learners that leave a membership a round apart are apart by as much; elsewhere weights are rounded to
    bfloat16."""
    try:
        weights = run_cell(cell, WORKLOAD, optimizer(rate_of(cell.method)), STEPS, folder).weights
    except NothingHappened:
        raise
    except Exception as error:  # whatever it raises is a finding
        return f"{type(error).__name__}: {error}"
    drifts = MOST / 100 < drift(cell.method) <= 10 * MOST
    if not same_bits(weights):
        apart = max(float(((each - weights[0]) / start()).abs().max()) for each in weights)
        if not drifts or apart > 10 * MOST:
            return f"learners that were equal are apart by {apart:.2g} of a weight"
    most = 10 * MOST if drifts else MOST if drift(cell.method) <= MOST else COARSE
    distance = max(moved(each, rate_of(cell.method)) for each in weights)
    return None if distance <= most else f"weights moved by {distance:.2g} of themselves, at most {most:.2g}"


def problems(cells: list[Cell], folder: Path) -> list[str]:
    """What is wrong with each cell, one line each."""
    return [f"{cell.name}: {what}" for cell in cells if (what := problem(cell, folder)) is not None]


def of_sample() -> list[Cell]:
    """Of each strategy one cell in which numbers are sent as they are, and one in which they are encoded."""
    chosen = {(method.strategy.name, method.is_lossy): method for method in reversed(methods().values())}
    cells = []
    for number, method in enumerate(reversed(chosen.values())):
        order = [
            Cell(method, KINDS[(number + shift) % 4], SPEEDS[number // 4 % 2], 2 + (number + world) % 4)
            for shift in range(4)
            for world in range(4)
        ]
        cells.append(next(cell for cell in order if cell.is_possible))
    return cells


@pytest.mark.parametrize("cell", [tiered(cell.method, cell.name, cell) for cell in of_sample()])
def test_whatever_happens_once_nothing_moves_at_rate_zero(cell: Cell, tmp_path: Path) -> None:
    """Learners that were equal stay equal to the bit, and each weight moves by rounding at most."""
    assert problems([cell], tmp_path) == []


@pytest.mark.soak
@pytest.mark.parametrize(
    ("method", "kind"),
    [named(f"{method.name} {kind}", method, kind) for method in methods().values() for kind in KINDS],
)
def test_whatever_happens_nothing_moves_at_rate_zero(method: Method, kind: str, tmp_path: Path) -> None:
    """The same under every method, in every encoding, with 1 to 5 learners of unequal speeds, at two moments each."""
    cells = [Cell(method, kind, "uneven", world, draw) for world in WORLDS for draw in range(2)]
    assert problems([cell for cell in cells if cell.is_possible], tmp_path) == []
