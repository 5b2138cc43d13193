"""Rate 0, anything happens, nothing moves."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from starling.errors import StarlingError
from tests.boundaries.grid import KINDS, SPEEDS, WORLDS, Cell, Method, marked, methods, run_cell, same_bits, undisturbed
from tests.contract.cases import MakeOptimizer
from tests.contract.problems import TinyRegression

STEPS = 12
"""The mini-batches for each learner."""
MOST = 1e-6
"""How far a weight may move over a run, relative to itself, where nothing lossy is sent."""
MOST_GRADIENTS = 1000.0
"""More than all gradients of a run can come to, momentum included."""
WORKLOAD = TinyRegression()


@cache
def optimizer(rate: float) -> MakeOptimizer:
    """With momentum, because some strategies average it or set it to zero."""
    return lambda parameters: torch.optim.SGD(parameters, lr=rate, momentum=0.9)


def rate_of(method: Method) -> float:
    """0, except for a method that divides by the rate."""
    return 1e-9 if getattr(method.options(4), "divided_by_rate", False) else 0.0


@cache
def start() -> Tensor:
    """The weights of all learners when a run begins."""
    job = next(iter(methods().values())).job(WORKLOAD, optimizer(0.0), 0, 1)
    return undisturbed(next(iter(methods().values())), WORKLOAD, optimizer(0.0), job.budget.steps or 0, 1, "even").states[0].weights


def moved(weights: Tensor, rate: float) -> float:
    """How far the weight that moved most has moved: relative to itself, after what the rate alone can do."""
    return float((((weights - start()).abs() - MOST_GRADIENTS * rate).clamp(min=0.0) / start().abs()).max())


def most(cell: Cell) -> float:
    """How far weights may move: by rounding, unless what is sent is lossy and moves them where nothing happens."""
    method, rate = cell.method, rate_of(cell.method)
    if not method.is_lossy:
        return MOST
    whole = undisturbed(method, WORKLOAD, optimizer(rate), STEPS * cell.world, cell.world, cell.speed)
    still = max(moved(state.weights, rate) for state in whole.states if state.is_worker)
    return MOST if still <= MOST else float("inf")


def problem(cell: Cell, folder: Path) -> str | None:
    """What a cell breaks."""
    try:
        weights = run_cell(cell, WORKLOAD, optimizer(rate_of(cell.method)), STEPS, folder).weights
    except StarlingError as error:
        return f"{type(error).__name__}: {error}"
    if not same_bits(weights):
        return f"learners that were equal are {max(float((w - weights[0]).abs().max()) for w in weights):.2g} apart"
    distance = max(moved(each, rate_of(cell.method)) for each in weights)
    return None if distance <= most(cell) else f"weights moved by {distance:.2g} of themselves, at most {most(cell):.2g}"


def problems(cells: list[Cell], folder: Path) -> list[str]:
    """What is wrong with each cell, one line each."""
    assert cells
    return [f"{cell.name}: {what}" for cell in cells if (what := problem(cell, folder)) is not None]


def of_sample() -> list[Cell]:
    """Of each strategy as the first method that sends numbers as they are, and the first that encodes them, one cell."""
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


@pytest.mark.parametrize("cell", [marked("rate zero", cell.name, cell) for cell in of_sample()])
def test_whatever_happens_once_nothing_moves_at_rate_zero(cell: Cell, tmp_path: Path) -> None:
    """Learners that were equal stay equal to the bit, and each weight moves by rounding at most."""
    assert problems([cell], tmp_path) == []


@pytest.mark.soak
@pytest.mark.parametrize(
    ("method", "kind"),
    [
        marked("rate zero", f"{method.name} {kind}", method, kind)
        for method in methods().values()
        for kind in KINDS
    ],
)
def test_whatever_happens_nothing_moves_at_rate_zero(method: Method, kind: str, tmp_path: Path) -> None:
    """The same under every method, in every encoding, with 1 to 5 learners of unequal speeds."""
    cells = [Cell(method, kind, "uneven", world) for world in WORLDS]
    assert problems([cell for cell in cells if cell.is_possible], tmp_path) == []
