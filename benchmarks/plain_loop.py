"""The loop that one writes without Starling: a plain PyTorch loop over the same model, data and optimizer."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from starling.training.job import Job
from starling.workload import Ticket


def plain_loop(
    job: Job,
    tickets: Iterable[Ticket],
    device: torch.device,
    wrap: Callable[[nn.Module], nn.Module] = lambda m: m,
    sync_every: int = 1,
) -> Iterator[None]:
    """The loop that one writes without Starling, with the same model, data, optimizer and clipping, gradient by
    gradient.

    With `sync_every`, the optimizer steps with the mean of that many gradients, for which DDP communicates once.
    """
    model = wrap(job.workload.make_model().to(device))
    parameters = list(model.parameters())
    optimizer = job.make_optimizer(parameters)
    for number, ticket in enumerate(tickets):
        (batch,) = job.workload.load(ticket)
        is_last = (number + 1) % sync_every == 0
        if number % sync_every == 0:
            optimizer.zero_grad()
        with nullcontext() if is_last or not isinstance(model, DistributedDataParallel) else model.no_sync():
            loss = job.workload.loss(model, batch.to(device))
            if sync_every > 1:
                loss = loss / sync_every
            loss.backward()
        if is_last:
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
