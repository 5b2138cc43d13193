"""A regression whose learners believe that they are on machines of their own."""

from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from starling.engines.processes import links
from starling.launch.rendezvous import is_learner
from starling.toy import regression
from starling.training.data import DataWorkload
from starling.training.job import Job
from starling.workload import Ticket


def make_model() -> nn.Module:
    if is_learner():
        links._machine = lambda: None
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))


def batch(ticket: Ticket) -> tuple[Tensor, Tensor]:
    (loaded,) = regression("allreduce").workload.load(ticket)
    content: tuple[Tensor, Tensor] = loaded.content
    return content


def loss(model: nn.Module, rows: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = rows
    return nn.functional.mse_loss(model(inputs).squeeze(1), targets)


def unlinked(strategy: str) -> Job:
    return replace(regression(strategy), workload=DataWorkload(partial(make_model), loss, batch, num_batches=60))
