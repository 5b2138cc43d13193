"""Nothing is lost or delivered twice.

Each of the first mini-batches of a run moves weights of its own, and all later ones move nothing, so that whatever is
pending has arrived in the end: residuals, momenta, fragments, messages, queues. How far its weights have moved then is
the share with which a mini-batch counts, and it must be the share that the method gives to each when nothing happens.
The test knows nothing about what a method keeps, or how.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from starling.errors import StarlingError
from starling.workload import Ticket, Workload
from tests.boundaries.grid import KINDS, WORLDS, Cell, Method, marked, methods, run_cell, undisturbed
from tests.contract.problems import Points

STEPS = 40
"""The mini-batches for each learner."""
NUM_OWN = 8
"""The first mini-batches, which move weights of their own."""
SIZE = 8
"""The model is a matrix of so many rows and columns."""
SMALL = 2e-3
"""The share that may still be pending, because all momenta are geometric, and the share that rounding may take."""
GENTLE = {
    "momentum": 0.5,
    "beta": 0.5,
    "mu": 0.5,
    "blend": 0.0,
    "feedback": 1.0,
    "consensus_rate": 0.5,
    "warm_up": 0,
    "rate": 0.5,
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
    """A method with constants with which everything arrives soon."""
    fields = type(method.options(4)).model_fields
    allowed = {name: value for name, value in GENTLE.items() if name in fields and _is_number(method, name)}
    return method.using(**allowed)


def _is_number(method: Method, name: str) -> bool:
    value = getattr(method.options(4), name)
    if name == "consensus_rate":
        return getattr(method.options(4), "compression", "none") not in ("none", "bfloat16")
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool) and value != 0)


def shares(weights: Sequence[Tensor]) -> Tensor:
    """How far all weights have moved, on average over the learners: by mini-batch and replica, `[NUM_OWN, replicas]`."""
    return -torch.stack(list(weights)).double().mean(dim=0).view(-1, NUM_OWN).T


@cache
def share(method: Method, world: int) -> float:
    """The share with which each mini-batch counts where nothing happens."""
    outcome = undisturbed(gentle(method), WORKLOAD, sgd, STEPS * world, world, "even")
    found = shares([state.weights for state in outcome.states if state.is_worker])
    mean = float(found.mean())
    assert mean > 0.0 and float((found - mean).abs().max()) < SMALL * max(1.0, mean), f"{method.name} L={world}: {found}"
    return mean
