"""Mini-batches, loaded ahead of the learner that computes on them."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, repeat
from multiprocessing.reduction import ForkingPickler
from queue import SimpleQueue
from threading import Thread
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from starling.workload import Ticket, Workload

Loaded = tuple[Ticket, Sequence[Any]]
_SMALL = 4 * 2**20  # bytes
_AHEAD = 2  # mini-batches that each process has begun or done
_LONGEST_END = 10.0  # seconds


class Loader:
    """Loads mini-batches in `num_workers` processes ahead of who computes on them; 0: when asked for.

    The processes are spawned: a fork of a process with gloo's threads in it crashes, and a fork server outlives a
    learner that is killed. That takes seconds, in which who asks for a mini-batch loads it.
    """

    def __init__(self, workload: Workload[Any], num_workers: int) -> None:
        self._workload = workload
        self._processes = _Processes(workload, num_workers) if num_workers else None

    @property
    def is_ahead(self) -> bool:
        """Whether processes load by now."""
        return self._processes is not None and self._processes.are_up

    def load(self, tickets: Iterable[Ticket]) -> Iterator[Loaded]:
        """Each ticket with its mini-batch, in order; once. Tickets are drawn by the caller's thread, and ahead."""
        tickets = iter(tickets)
        try:
            for ticket in tickets:
                yield ticket, self._workload.load(ticket)
                if self._processes is not None and self.is_ahead:
                    yield from self._processes.load(tickets)
        finally:
            self.close()

    def close(self) -> None:
        """End the processes; what they loaded is lost."""
        if self._processes is not None:
            self._processes.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _ByTicket(Dataset[Loaded | None]):
    def __init__(self, workload: Workload[Any]) -> None:
        self._workload = workload

    def __getitem__(self, ticket: Ticket | None) -> Loaded | None:
        return None if ticket is None else (ticket, self._workload.load(ticket))


class _Tickets(Sampler[Ticket | None]):
    """A stream of tickets, behind some empty ones, which torch draws from as it loads ahead; None ends it."""

    def __init__(self, asked: SimpleQueue[Ticket | None], num_empty: int) -> None:
        self._asked = asked
        self._num_empty = num_empty

    def __iter__(self) -> Iterator[Ticket | None]:
        return chain(repeat(None, self._num_empty), iter(self._asked.get, None))


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


class _Processes:
    """Torch's loading processes, and a thread that receives what they loaded, beside the computation.

    Torch draws a ticket whenever it hands over a mini-batch. It draws empty ones until all processes are up, and then
    waits for those that the learner's thread gives out: as many as fill the processes, and one that is received.
    """

    def __init__(self, workload: Workload[Any], num_workers: int) -> None:
        self.are_up = False
        """Whether mini-batches come at once; or the error that stands in their way."""
        self._num_workers = num_workers
        self._asked: SimpleQueue[Ticket | None] = SimpleQueue()
        self._received: SimpleQueue[Loaded | BaseException] = SimpleQueue()
        self._is_over = False
        loaded = DataLoader(
            _ByTicket(workload),
            sampler=_Tickets(self._asked, num_empty=(_AHEAD + 1) * num_workers),
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=num_workers,
            prefetch_factor=_AHEAD,
            multiprocessing_context="spawn",
            worker_init_fn=_send_small_by_value,
        )
        self._thread = Thread(target=self._receive, args=[iter(loaded)], name="loader", daemon=True)
        self._thread.start()

    def load(self, tickets: Iterator[Ticket]) -> Iterator[Loaded]:
        """Each ticket with its mini-batch, in order."""
        outstanding = self._ask(tickets, _AHEAD * self._num_workers + 1)
        while outstanding:
            received = self._received.get()
            if isinstance(received, BaseException):
                raise received
            outstanding += self._ask(tickets, 1) - 1
            yield received

    def close(self) -> None:
        """End the processes."""
        self._is_over = True
        self._asked.put(None)
        self._thread.join(_LONGEST_END)

    def _ask(self, tickets: Iterator[Ticket], at_most: int) -> int:
        drawn = list(islice(tickets, at_most))
        for ticket in drawn:
            self._asked.put(ticket)
        if len(drawn) < at_most:
            self._asked.put(None)  # torch hands over the last ones then
        return len(drawn)

    def _receive(self, loaded: Iterator[Loaded | None]) -> None:
        """What the thread does. The processes end when it lets go of the iterator."""
        try:
            for _ in range(self._num_workers):
                next(loaded)
            self.are_up = True
            while not self._is_over:
                received = next(loaded)
                if received is not None:
                    self._received.put(received)
        except StopIteration:
            pass
        except BaseException as error:
            self._received.put(error)
        self.are_up = True
