"""Mini-batches, loaded ahead of the learner that computes on them."""

import os
import signal
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice, repeat
from multiprocessing import resource_tracker
from multiprocessing.reduction import ForkingPickler
from queue import SimpleQueue
from threading import Thread
from types import FrameType, TracebackType
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
_LOOK_SECONDS = 0.2
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Loader:
    """Loads mini-batches in `num_workers` processes ahead of who computes on them; 0: when asked for.

    The processes are spawned: a fork of a process with gloo's threads in it crashes, and a fork server outlives a
    learner that is killed. That takes seconds, in which who asks for a mini-batch loads it. With `ignores_signals` they
    outlive a SIGTERM or SIGINT to all processes of a learner that goes on for a while; they end when it does.
    """

    def __init__(self, workload: Workload[Any], num_workers: int, ignores_signals: bool = False) -> None:
        self._workload = workload
        self._processes = _Processes(workload, num_workers, ignores_signals) if num_workers else None

    @property
    def is_ahead(self) -> bool:
        """Whether processes load by now."""
        return self._processes is not None and self._processes.are_up

    def load(self, tickets: Iterable[Ticket]) -> Iterator[Loaded]:
        """Each ticket with its mini-batch, in order. Tickets are drawn by the caller's thread, and ahead.

        May be called again for other tickets; what was loaded ahead for the former ones is lost.
        """
        tickets = iter(tickets)
        while not self.is_ahead:
            for ticket in islice(tickets, 1):
                yield ticket, self._workload.load(ticket)
                break
            else:
                return
        if self._processes is not None:
            yield from self._processes.load(tickets)

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


class _End:
    """Ends the stream of tickets."""


class _Tickets(Sampler[Ticket | None]):
    """A stream of tickets, behind some empty ones, which torch draws from as it loads ahead."""

    def __init__(self, asked: SimpleQueue[Ticket | _End | None], num_empty: int) -> None:
        self._asked = asked
        self._num_empty = num_empty

    def __iter__(self) -> Iterator[Ticket | None]:
        yield from repeat(None, self._num_empty)
        while not isinstance(ticket := self._asked.get(), _End):
            yield ticket


def _as_it_is(loaded: Any) -> Any:  # torch would otherwise convert what it finds inside
    return loaded


def _begin(ignores_signals: bool, worker: int) -> None:
    """Have a loading process send small tensors as they are. Shared memory takes a learner a few exchanges with the
    process for each tensor, which wait for their turn where cores are few: ten times as long as a copy of this size."""
    ForkingPickler.register(Tensor, _reduce)
    if ignores_signals:
        _outlive_signals(os.getppid())


def _outlive_signals(learner: int) -> None:
    """Let a SIGTERM or SIGINT end this process when its learner has ended, and not before."""

    def await_its_end() -> None:
        while os.getppid() == learner:
            time.sleep(_LOOK_SECONDS)
        os._exit(0)

    def hear(number: int, frame: FrameType | None) -> None:
        Thread(target=await_its_end, name="orphan", daemon=True).start()

    for number in _SIGNALS:
        signal.signal(number, hear)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


@contextmanager
def _holding_signals_back(is_wanted: bool) -> Generator[None, None, None]:
    """Let processes that are started meanwhile begin with signals held back, until they know what to do with them."""
    if not is_wanted:
        yield
        return
    resource_tracker.ensure_running()  # it lets signals through when it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _reduce(tensor: Tensor) -> Any:
    if tensor.nbytes > _SMALL or tensor.device.type != "cpu" or tensor.dtype == torch.bfloat16:
        return reduce_tensor(tensor)  # type: ignore[no-untyped-call]
    return torch.from_numpy, (tensor.detach().numpy(),)


class _Processes:
    """Torch's loading processes, and a thread that receives what they loaded, beside the computation.

    Torch draws a ticket whenever it hands over a mini-batch, and so hands over each when as many were drawn behind it
    as fill the processes. It draws empty ones until all processes are up, and then waits for those that the learner's
    thread gives out; empty ones behind the last bring that one to light.
    """

    def __init__(self, workload: Workload[Any], num_workers: int, ignores_signals: bool) -> None:
        self.are_up = False
        """Whether mini-batches come at once; or the error that stands in their way."""
        self._num_workers = num_workers
        self._num_filling = _AHEAD * num_workers
        self._asked: SimpleQueue[Ticket | _End | None] = SimpleQueue()
        self._received: SimpleQueue[Loaded | BaseException] = SimpleQueue()
        self._num_outstanding = 0
        self._is_over = False
        loaded = DataLoader(
            _ByTicket(workload),
            sampler=_Tickets(self._asked, num_empty=self._num_filling + num_workers),
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=num_workers,
            prefetch_factor=_AHEAD,
            multiprocessing_context="spawn",
            worker_init_fn=partial(_begin, ignores_signals),
        )
        with _holding_signals_back(ignores_signals):
            starting = iter(loaded)
        self._thread = Thread(target=self._run, args=[starting], name="loader", daemon=True)
        self._thread.start()

    def load(self, tickets: Iterator[Ticket]) -> Iterator[Loaded]:
        """Each ticket with its mini-batch, in order; what is left of other tickets is dropped."""
        self._push()
        while self._num_outstanding:
            self._receive()
        self._ask(tickets, self._num_filling + 1)
        while self._num_outstanding:
            received = self._receive()
            self._ask(tickets, 1)
            yield received

    def close(self) -> None:
        """End the processes."""
        self._is_over = True
        self._asked.put(_End())
        self._thread.join(_LONGEST_END)

    def _ask(self, tickets: Iterator[Ticket], at_most: int) -> None:
        drawn = list(islice(tickets, at_most))
        for ticket in drawn:
            self._asked.put(ticket)
        self._num_outstanding += len(drawn)
        if len(drawn) < at_most:
            self._push()

    def _push(self) -> None:
        """Let all that was asked for be handed over."""
        for _ in range(self._num_filling):
            self._asked.put(None)

    def _receive(self) -> Loaded:
        received = self._received.get()
        self._num_outstanding -= 1
        if isinstance(received, BaseException):
            raise received
        return received

    def _run(self, loaded: Iterator[Loaded | None]) -> None:
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
