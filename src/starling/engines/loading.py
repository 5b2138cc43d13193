"""Mini-batches, loaded ahead of the learner that computes on them."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader, Dataset, Sampler

from starling.workload import Ticket, Workload

Loaded = tuple[Ticket, Sequence[Any]]


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
        )
    )
