"""A job that takes milliseconds, with which a docstring or a page can show a strategy."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from starling.budget import Budget
from starling.chance import derive_seed
from starling.configuration import checked
from starling.strategies import Strategy, find_strategy
from starling.training.data import DataWorkload
from starling.training.job import Job
from starling.workload import Ticket

INPUTS, EXAMPLES, BATCHES = 8, 16, 96


def regression(strategy: str | Strategy, **options: Any) -> Job:
    """A linear regression with plain SGD, whose learners share 96 mini-batches.

    Its first model has a loss of about 8, and the best one of 0.01. It is the same on every machine.

    Args:
        strategy: A name that `starling strategies` lists, `module:name`, or a strategy.
        options: The strategy's options.

    Raises:
        ConfigError: The strategy is unknown, or its options are wrong.

    Example:
        >>> from starling.toy import regression
        >>> starling.simulate(regression("diloco", every=4), learners=4).loss()
        0.037
    """
    chosen = strategy if isinstance(strategy, Strategy) else find_strategy(strategy)
    workload = DataWorkload(_make_model, _loss, _batch, num_batches=BATCHES)
    own = checked(chosen.options, options, chosen.name)
    return Job(workload, chosen, Budget(epochs=1), partial(torch.optim.SGD, lr=0.1), options=own)


def _make_model() -> nn.Module:
    model = nn.Linear(INPUTS, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


def _batch(ticket: Ticket) -> tuple[Tensor, Tensor]:
    """Inputs `[16, 8]`, and targets `[16]`, which are sums of inputs with noise."""
    generator = torch.Generator().manual_seed(derive_seed(0, "toy", ticket.index))
    inputs = torch.randn(EXAMPLES, INPUTS, generator=generator)
    return inputs, inputs.sum(dim=1) + 0.1 * torch.randn(EXAMPLES, generator=generator)


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs).squeeze(1), targets)
