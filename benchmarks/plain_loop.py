"""What one writes without Starling: a plain PyTorch loop over the same model, data and optimizer."""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn

from starling.engines.job import Job
from starling.workload import Ticket


def plain_loop(
    job: Job, tickets: Iterable[Ticket], device: torch.device, wrap: Callable[[nn.Module], nn.Module] = lambda m: m
) -> Iterator[None]:
    """What one writes without Starling: the same model, data, optimizer and clipping, step by step."""
    model = wrap(job.workload.make_model().to(device))
    parameters = list(model.parameters())
    optimizer = job.make_optimizer(parameters)
    for ticket in tickets:
        (batch,) = job.workload.load(ticket)
        optimizer.zero_grad()
        loss = job.workload.loss(model, batch.to(device))
        loss.backward()
        if job.clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, job.clip_norm)
        optimizer.step()
        loss.item()
        yield


def tickets_of(job: Job, steps: int, rank: int, world: int) -> Iterator[Ticket]:
    """The tickets that learner `rank` of `world` gets among the first `steps`."""
    epoch, first = 0, 0
    for step in range(steps):
        if step - first >= job.workload.num_batches(epoch):
            first += job.workload.num_batches(epoch)
            epoch += 1
        if step % world == rank:
            yield Ticket(epoch, step - first, step)
