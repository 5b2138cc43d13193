"""Nothing is lost or delivered twice.

Each of the first mini-batches of a run moves weights of its own, and all later ones move nothing, so that whatever is
pending has arrived in the end: residuals, momenta, fragments, messages, queues. How far its weights have moved then is
the share with which a mini-batch counts, and it must be the share that the method gives to each when nothing happens.
The test knows nothing about what a method keeps, or how.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from starling.strategies.parts.background import BackgroundOptions
from starling.strategies.parts.means import TopK
from starling.workload import Ticket, Workload
from tests.boundaries.grid import (
    KINDS,
    SPEEDS,
    Cell,
    Method,
    NothingHappened,
    methods,
    named,
    run_cell,
    tiered,
    undisturbed,
)
from tests.contract.problems import Points

STEPS = 40
"""The mini-batches for each learner."""
NUM_OWN = 8
"""The first mini-batches, which move weights of their own."""
SIZE = 8
"""The model is a matrix of so many rows and columns."""
SMALL = 0.02
"""The part of a share that may still be pending, because momenta are geometric."""
RATE = 0.5
"""The consensus rate of what has changed in weights."""
GENTLE: dict[str, Any] = {
    "momentum": 0.5,
    "beta": 0.5,
    "mu": 0.5,
    "blend": 0.0,
    "feedback": 1.0,
    "consensus_rate": RATE,
    "warm_up": 0,
    "every": 3,
    "overlap": 1,
}
"""Constants with which everything arrives soon, and nothing is dropped by intention."""


class OwnWeights(Workload[Points]):
    """The gradient of mini-batch t, of the first `NUM_OWN`, is 1 for each weight whose place is t modulo their number
    and 0 for all others; that of a later one is 0."""

    def make_model(self) -> nn.Module:
        model = nn.Linear(SIZE, SIZE, bias=False)
        nn.init.zeros_(model.weight)
        return model

    def num_batches(self, epoch: int) -> int:
        return 1 << 20

    def load(self, ticket: Ticket) -> Sequence[Points]:
        own = torch.zeros(1, SIZE * SIZE)
        if ticket.step < NUM_OWN:
            own[0, ticket.step :: NUM_OWN] = 1.0
        return [Points(own, torch.zeros(1))]

    def loss(self, model: nn.Module, examples: Points) -> Tensor:
        (weight,) = model.parameters()
        return (weight.view(1, -1) * examples.inputs).sum()


WORKLOAD = OwnWeights()


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Plain SGD of rate 1."""
    return torch.optim.SGD(parameters, lr=1.0)


@cache
def gentle(method: Method) -> Method:
    """A method with constants with which everything arrives soon, as far as it has them."""
    options = method.options(4)
    for name, value in GENTLE.items():
        if isinstance(before := getattr(options, name, None), int | float) or (name == "momentum" and before is None):
            is_less = before is None or value < before or name == "feedback"
            changed = method.using(**{name: value})
            method = changed if is_less and changed.fits(4) else method
    if isinstance(options, BackgroundOptions) and options.compression not in ("none", "bfloat16"):
        found = options.model_dump()["compression"]
        method = method.using(compression={"choco": found, "consensus_rate": RATE})
    if isinstance(getattr(options, "compression", None), TopK) and hasattr(options, "every"):
        method = method.using(compression=options.compression.model_copy(update={"top_k": 0.25}).model_dump())
    return method


def shares(weights: Sequence[Tensor]) -> Tensor:
    """How far weights have moved, on average over the learners: by mini-batch and replica, `[NUM_OWN, replicas]`."""
    return -torch.stack(list(weights)).double().mean(dim=0).view(-1, NUM_OWN).T


@cache
def expected(method: Method, world: int) -> tuple[float, float]:
    """The smallest and the largest share with which a mini-batch counts where nothing happens. Of a mini-batch's
    replicas the best counts: some methods drop what is done while a fragment travels."""
    outcome = undisturbed(gentle(method), WORKLOAD, sgd, STEPS * world, world, "even")
    found = shares([state.weights for state in outcome.states if state.is_worker])
    return float(found.max(dim=1).values.min()), float(found.max())


def drops_some(method: Method, world: int) -> bool:
    """Whether some replicas of a mini-batch count less where nothing happens."""
    outcome = undisturbed(gentle(method), WORKLOAD, sgd, STEPS * world, world, "even")
    found = shares([state.weights for state in outcome.states if state.is_worker])
    return float(found.max() - found.min()) > 2 * SMALL * float(found.max())


def problem(cell: Cell, folder: Path) -> str | None:
    """What a cell breaks.

    A mini-batch counts with the share that it has among as many learners as one of the memberships, or between two.
    Where learners differed when something happened, the mean of those that are left is another by as much. A learner
    that is lost takes along its own mini-batches, and up to half of what others had sent to it. A resume with another
    number of learners may drop what is pending; it delivers nothing twice.
    """
    method = gentle(cell.method)
    try:
        run = run_cell(replace(cell, method=method), WORKLOAD, sgd, STEPS, folder, between=(0.05, 0.25), fewest=2)
    except NothingHappened:
        raise
    except Exception as error:  # whatever it raises is a finding
        return f"{type(error).__name__}: {error}"
    found = shares(run.weights)
    bounds = [expected(cell.method, world) for world in set(run.worlds)]
    low, high = min(low for low, _ in bounds), max(high for _, high in bounds)
    slack = SMALL * high + max(1.0, high * max(run.worlds)) * run.apart.double().view(-1, NUM_OWN).T
    has_loss, has_drops = cell.kind in ("kill", "several"), any(drops_some(cell.method, each) for each in run.worlds)
    least = torch.full_like(found, 0.5 * low if has_loss else low)
    least[[step for step in run.lost if step < NUM_OWN]] = 0.0
    if cell.kind == "several" or run.is_resumed_otherwise:  # learners that resume are others, and may be lost again
        least[:] = 0.0
    if has_loss or has_drops:
        best = found.argmax(dim=1, keepdim=True)
        least = torch.zeros_like(least).scatter_(1, best, least.gather(1, best))
    is_wrong = (found < least - slack) | (found > high + slack)
    if not bool(is_wrong.any()):
        return None
    wrong = ", ".join(
        f"{step}: {float(found[step, place]):.3g}" for step in range(NUM_OWN) for place in is_wrong[step].nonzero()[:1]
    )
    return f"mini-batches that count with another share than {low:.3g} to {high:.3g}: {wrong}"


def problems(cells: Sequence[Cell], folder: Path) -> list[str]:
    """What is wrong with each cell, one line each."""
    return [f"{cell.name}: {what}" for cell in cells if (what := problem(cell, folder)) is not None]


def of_sample() -> list[Cell]:
    """Of each strategy one cell in which numbers are sent as they are, and of every third one in which they are
    encoded, which takes longer to drain."""
    chosen = {(each.strategy.name, each.is_lossy): each for each in reversed(methods().values())}
    cells = []
    for number, method in enumerate(reversed(chosen.values())):
        if method.is_lossy and number % 3:
            continue
        order = [
            Cell(method, KINDS[(number + shift) % 4], SPEEDS[number // 4 % 2], 3 + (number + world) % 2)
            for shift in range(1, 5)
            for world in range(4)
        ]
        cells.append(next(cell for cell in order if cell.is_possible))
    return cells


@pytest.mark.parametrize("cell", [tiered(cell.method, cell.name, cell) for cell in of_sample()])
def test_each_mini_batch_counts_once_whatever_happens_once(cell: Cell, tmp_path: Path) -> None:
    """With the share that its method gives to it among so many learners."""
    assert problems([cell], tmp_path) == []


def test_an_interrupted_agreement_is_made_with_the_rate_of_the_newest_step(tmp_path: Path) -> None:
    """A learner joins while an agreement of SlowMo is due. No mini-batch has been claimed yet, but with a rate of 0 the
    momentum of a period would be lost."""
    assert problems([Cell(methods()["slowmo/none"], "join", "uneven", 4, 1)], tmp_path) == []


@pytest.mark.soak
@pytest.mark.parametrize(
    ("method", "kind"),
    [named(f"{method.name} {kind}", method, kind) for method in methods().values() for kind in KINDS],
)
def test_each_mini_batch_counts_once_whatever_happens(method: Method, kind: str, tmp_path: Path) -> None:
    """The same under every method, in every encoding, with 2 to 4 learners of unequal speeds."""
    draws = {"kill": [(3, 0), (3, 1), (3, 2), (4, 0)], "several": [(3, 0), (4, 0)]}.get(kind, [(2, 0), (4, 0)])
    cells = [Cell(method, kind, "uneven", world, draw) for world, draw in draws]
    assert problems([cell for cell in cells if cell.is_possible], tmp_path) == []
