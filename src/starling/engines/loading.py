"""Mini-batches, loaded ahead of the learner that computes on them."""

from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from starling.workload import Ticket, Workload

Loaded = tuple[Ticket, Sequence[Any]]
_SMALL = 4 * 2**20  # bytes


class _ByTicket(Dataset[Loaded]):
    def __init__(self, workload: Workload[Any]) -> None:
        self._workload = workload

    def __getitem__(self, ticket: Ticket) -> Loaded:
        return ticket, self._workload.load(ticket)


class _Tickets(Sampler[Ticket]):
    """A stream of tickets; torch draws from it as it loads ahead."""

    def __init__(self, tickets: Iterable[Ticket]) -> None:
        self._tickets = tickets

    def __iter__(self) -> Iterator[Ticket]:
        return iter(self._tickets)


def _as_it_is(loaded: Any) -> Any:  # torch would otherwise convert what it finds inside
    return loaded


def _send_small_by_value(worker: int) -> None:
    """Have a loading process send small tensors as they are. Shared memory takes a learner a few exchanges with the
    process for each tensor, which wait for their turn where cores are few: ten times as long as a copy of this size."""
    ForkingPickler.register(Tensor, _reduce)


def _reduce(tensor: Tensor) -> Any:
    if tensor.nbytes > _SMALL or tensor.device.type != "cpu" or tensor.dtype == torch.bfloat16:
        return reduce_tensor(tensor)  # type: ignore[no-untyped-call]
    return torch.from_numpy, (tensor.detach().numpy(),)


def load_ahead(workload: Workload[Any], tickets: Iterable[Ticket], num_workers: int) -> Iterator[Loaded]:
    """Each ticket with its mini-batch, in order, loaded by `num_workers` processes (0: when asked for).

    The processes are spawned: a fork of a process with gloo's threads in it crashes, and a fork server outlives a
    learner that is killed.
    """
    if num_workers == 0:
        return ((ticket, workload.load(ticket)) for ticket in tickets)
    return iter(
        DataLoader(
            _ByTicket(workload),
            sampler=_Tickets(tickets),
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=num_workers,
            multiprocessing_context="spawn",
            worker_init_fn=_send_small_by_value,
        )
    )
