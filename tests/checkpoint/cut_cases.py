"""Runs whose checkpoints show which mini-batches they have, for both engines."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from starling.budget import Budget
from starling.checkpoint.state import OWN_PREFIX, LearnerState
from starling.strategies import STRATEGIES
from starling.training.job import Job
from starling.workload import Ticket, Workload
from tests.contract.problems import Points

STEPS = 48


class OwnWeight(Workload[Points]):
    """The gradient of mini-batch t is 1 for weight t, and 0 for all others."""

    def __init__(self, batches_in_epoch: int = 1 << 20) -> None:
        self.batches_in_epoch = batches_in_epoch

    def make_model(self) -> nn.Module:
        model = nn.Linear(STEPS, 1, bias=False)
        nn.init.zeros_(model.weight)
        return model

    def num_batches(self, epoch: int) -> int:
        return self.batches_in_epoch

    def load(self, ticket: Ticket) -> Sequence[Points]:
        own = torch.zeros(1, STEPS)
        own[0, ticket.step] = 1.0
        return [Points(own, torch.zeros(1))]

    def loss(self, model: nn.Module, examples: Points) -> Tensor:
        return model(examples.inputs).sum()


def summing(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD of rate 1 whose momentum is the sum of all gradients."""
    return torch.optim.SGD(parameters, lr=1.0, momentum=1.0)


def plain(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Plain SGD of rate 1."""
    return torch.optim.SGD(parameters, lr=1.0)


def job(name: str, options: dict[str, Any], **settings: Any) -> Job:
    """A run of `STEPS` mini-batches with a checkpoint after every few of them."""
    given: dict[str, Any] = {"workload": OwnWeight(), "make_optimizer": plain, "checkpoint_every": 4}
    return Job(
        strategy=STRATEGIES[name],
        budget=Budget(steps=STEPS),
        options=STRATEGIES[name].options.model_validate(options),
        **(given | settings),
    )


def expected(num_done: int, world: int) -> Tensor:
    """What the mean over learners has of each mini-batch after `num_done` of them, `[STEPS]`."""
    shares = torch.zeros(STEPS)
    shares[:num_done] = 1.0 / world
    return shares


def delivered_and_pending(states: list[LearnerState]) -> Tensor:
    """How often each mini-batch is in theta, or in what a worker will push of which the server has not taken it."""
    total = torch.zeros(len(states[0].weights))
    shards = sorted((shard for state in states for shard in state.shards), key=lambda shard: shard.start)
    for number, shard in enumerate(shards):
        piece, group = slice(shard.start, shard.stop), shard.optimizer["param_groups"][0]
        total[piece] -= shard.weights
        for worker in (state for state in states if state.is_worker):
            counts = worker.strategy[f"{OWN_PREFIX}counts"].tolist()
            loan = counts[2 + number]
            is_taken = loan <= group["num_loans"] and loan not in group["out"]
            if any(counts[:2]) and not is_taken:
                progress = worker.strategy[f"{OWN_PREFIX}theta"] - worker.for_computing().weights
                total[piece] += progress[piece]
    return total


def places_of_each_mini_batch(states: list[LearnerState]) -> Tensor:
    """In how many places each mini-batch is: in theta, in a sum that waits for a merge, or in what a learner will
    push."""
    found = torch.zeros(len(states[0].weights))
    shards = sorted((shard for state in states for shard in state.shards), key=lambda shard: shard.start)
    for number, shard in enumerate(shards):
        piece, group = slice(shard.start, shard.stop), shard.optimizer["param_groups"][0]
        found[piece] += shard.weights != 0.0
        for each in shard.optimizer["state"].values():
            found[piece] += each["sum"].flatten() != 0.0
        for learner in states:
            counts = learner.strategy[f"{OWN_PREFIX}counts"].tolist()
            loan, is_flown = counts[2 + number], counts[2 + 2 * len(shards) + number] > 0
            is_taken = loan <= group["num_loans"] and loan not in group["out"]
            base = learner.strategy[f"{OWN_PREFIX}{'sent' if is_flown and is_taken else 'theta'}"]
            found[piece] += (base - learner.for_computing().weights)[piece].abs() > 1e-6
    return found
