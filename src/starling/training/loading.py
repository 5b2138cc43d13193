"""Loading of mini-batches ahead of the learner's computation."""

import math
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain, islice, repeat
from multiprocessing import resource_tracker
from multiprocessing.reduction import ForkingPickler
from queue import SimpleQueue
from statistics import median
from threading import Thread
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils.data import DataLoader, Dataset

from starling.workload import Ticket, Workload

Loaded = tuple[Ticket, Sequence[Any]]
_MAX_COPIED_BYTES = 4 * 2**20
_PREFETCH_FACTOR = 2  # number of mini-batches that each process holds, which are being loaded or not yet received
_WINDOW = 9  # number of recent mini-batches from which speeds are estimated
_CLOSE_TIMEOUT_SECONDS = 10.0
_POLL_SECONDS = 0.2
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Lookahead:
    """Decides how many mini-batches an asynchronous learner draws ahead.

    A mini-batch that one learner has drawn cannot go to another learner. Therefore a learner draws only as many
    mini-batches as it needs to have each loaded in time. Near the end of the budget, it draws only those that it will
    begin before the last mini-batch is drawn, so that even a slow learner finishes at most about one gradient after the
    others. If only a time limit ends the run (`is_counted` is False), there is no last mini-batch.
    """

    def __init__(self, is_counted: bool = True) -> None:
        self._is_counted = is_counted
        self._steps: deque[float] = deque(maxlen=_WINDOW)
        self._draws: deque[tuple[float, float]] = deque(maxlen=_WINDOW)

    def began(self, drawn_at: float, step_seconds: float, fraction: float) -> None:
        """Record that a mini-batch begins. The previous mini-batch took `step_seconds`. The mini-batch that this
        learner drew last, at the time `drawn_at`, is at `fraction` of the budget."""
        self._steps.append(step_seconds)
        if not self._draws or fraction > self._draws[-1][1]:  # it has drawn another mini-batch
            self._draws.append((drawn_at, fraction))

    def num(self, now: float, load_seconds: float, least: int = 1) -> int:
        """Return the number of mini-batches to draw ahead, if loading a mini-batch takes `load_seconds`. The number is
        at least `least`, except near the end."""
        if not self._steps:
            return 0
        step = max(median(self._steps), 1e-6)
        in_time, before_end = least + math.ceil(2.0 * load_seconds / step), self._seconds_left(now) / step
        return int(min(in_time, max(0.0, before_end - 0.5)))  # half a step less, because the values are estimates

    def _seconds_left(self, now: float) -> float:
        """Return the estimated seconds until any learner draws the last mini-batch of the budget."""
        if not self._is_counted:
            return math.inf
        if len(self._draws) < 2:
            return 0.0
        (first, spent_then), (last, spent) = self._draws[0], self._draws[-1]
        return max(0.0, (1.0 - spent) * (last - first) / (spent - spent_then) - (now - last))


_Timed = tuple[Loaded, float]
"""A loaded mini-batch with its ticket, and the seconds that loading took."""


class _ByTicket(Dataset[_Timed | None]):
    def __init__(self, workload: Workload[Any]) -> None:
        self._workload = workload

    def __getitem__(self, ticket: Ticket | None) -> _Timed | None:
        if ticket is None:
            return None
        begin = time.perf_counter()
        loaded = ticket, self._workload.load(ticket)
        return loaded, time.perf_counter() - begin


_END = object()
"""Marks the end of the stream of tickets."""


def _unchanged(loaded: Any) -> Any:  # as `collate_fn`: torch's default would convert what a mini-batch contains
    return loaded


def _initialize_process(learner: int, ignores_signals: bool, worker: int) -> None:
    """Make a loading process exit once its learner has exited. The learner may already have exited, because starting a
    process takes seconds. With `ignores_signals`, a SIGTERM or SIGINT does not end the loading process earlier.

    Small CPU tensors are pickled instead of being passed in shared memory, which needs several messages for each
    tensor. With few cores, these messages take ten times as long as a copy of up to `_MAX_COPIED_BYTES`.
    """
    ForkingPickler.register(Tensor, _reduce)
    Thread(target=_exit_after, args=[learner], name="orphan", daemon=True).start()
    if ignores_signals:
        for number in _SIGNALS:
            signal.signal(number, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def _exit_after(learner: int) -> None:
    """Exit once the learner that started this process has exited."""
    while os.getppid() == learner:
        time.sleep(_POLL_SECONDS)
    os._exit(0)


@contextmanager
def _blocking_signals() -> Generator[None, None, None]:
    """Block signals in processes that are started within this context, until they have installed their handlers."""
    resource_tracker.ensure_running()  # start it first: starting it unblocks signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _reduce(tensor: Tensor) -> Any:
    if tensor.nbytes > _MAX_COPIED_BYTES or tensor.device.type != "cpu" or tensor.dtype == torch.bfloat16:
        return reduce_tensor(tensor)  # type: ignore[no-untyped-call]
    return torch.from_numpy, (tensor.detach().numpy(),)


class Loader(AbstractContextManager["Loader"]):
    """Loads mini-batches ahead in `num_workers` processes or, if there are none, on request.

    The processes are spawned, because forking a process with gloo's threads crashes, and a fork server outlives a
    killed learner. Spawning takes seconds; during this time the caller's thread loads the mini-batches. With
    `ignores_signals` the processes survive a SIGTERM or SIGINT to the learner's process group, and exit when the
    learner does.

    A thread receives mini-batches from torch's loading processes in parallel with the computation. Before torch returns
    a mini-batch, it draws another ticket. It therefore returns a mini-batch only once `_prefetched` later tickets have
    been drawn. While the processes start, torch draws padding (None); afterwards it draws the tickets that the caller's
    thread requests. If fewer than `_prefetched` tickets are requested after a mini-batch, padding is requested in their
    place.
    """

    def __init__(self, workload: Workload[Any], num_workers: int, ignores_signals: bool = False) -> None:
        self.is_ahead = False
        """Whether all loading processes have started, or their start has failed. If it has failed, `load` raises the
        error."""
        self._workload, self._num_workers = workload, num_workers
        self._prefetched = _PREFETCH_FACTOR * num_workers
        self._requested: SimpleQueue[Any] = SimpleQueue()  # tickets, padding, and finally _END
        self._received: SimpleQueue[Loaded | BaseException] = SimpleQueue()
        self._num_requested = 0  # number of requested tickets and padding
        self._outstanding: deque[int] = deque()  # the value of `_num_requested` before each ticket not yet received
        self._seconds: deque[float] = deque([0.0], maxlen=_WINDOW)
        self._is_closed = False
        self._thread: Thread | None = None
        if num_workers > 0:
            self._start(ignores_signals)

    def _start(self, ignores_signals: bool) -> None:
        loaded = DataLoader(
            _ByTicket(self._workload),
            sampler=chain(repeat(None, self._prefetched + self._num_workers), iter(self._requested.get, _END)),
            batch_size=None,
            collate_fn=_unchanged,
            num_workers=self._num_workers,
            prefetch_factor=_PREFETCH_FACTOR,
            multiprocessing_context="spawn",
            worker_init_fn=partial(_initialize_process, os.getpid(), ignores_signals),
        )
        with _blocking_signals() if ignores_signals else nullcontext():
            starting = iter(loaded)
        self._thread = Thread(target=self._run, args=[starting], name="loader", daemon=True)
        self._thread.start()

    @property
    def load_seconds(self) -> float:
        """The time in which a process loads a mini-batch, as the maximum over recent mini-batches."""
        return max(self._seconds)

    def load(self, tickets: Iterable[Ticket], num_ahead: Callable[[], int] = lambda: sys.maxsize) -> Iterator[Loaded]:
        """Yield each ticket with its mini-batch, in order.

        The caller's thread draws tickets ahead. Before each mini-batch is yielded, it draws enough tickets to keep the
        processes busy, but at most `num_ahead()`. This method may be called again with different tickets; mini-batches
        that were loaded for the earlier tickets are then dropped.
        """
        tickets = iter(tickets)
        while not self.is_ahead:
            if (ticket := next(tickets, None)) is None:
                return
            yield ticket, self._workload.load(ticket)
        while self._outstanding:
            self._receive()
        self._draw(tickets, 1)
        while self._outstanding:
            received = self._receive()
            self._draw(tickets, min(self._prefetched + 1, num_ahead()))
            yield received
            self._draw(tickets, 1)

    def close(self) -> None:
        """Stop the processes, and drop the mini-batches that they have loaded."""
        self._is_closed = True
        self._requested.put(_END)
        if self._thread is not None:
            self._thread.join(_CLOSE_TIMEOUT_SECONDS)

    def __exit__(self, *_: object) -> None:
        self.close()

    def _draw(self, tickets: Iterator[Ticket], num: int) -> None:
        """Draw tickets until `num` tickets are outstanding, or no ticket is left."""
        for ticket in islice(tickets, max(0, num - len(self._outstanding))):
            self._outstanding.append(self._num_requested)
            self._request(ticket)

    def _request(self, ticket: Ticket | None) -> None:
        self._requested.put(ticket)
        self._num_requested += 1

    def _receive(self) -> Loaded:
        place = self._outstanding.popleft()
        while self._num_requested <= place + self._prefetched:
            self._request(None)
        received = self._received.get()
        if isinstance(received, BaseException):
            raise received
        return received

    def _run(self, loaded: Iterator[_Timed | None]) -> None:
        """Receive mini-batches. This method runs in the thread. The processes stop when it releases the iterator."""
        try:
            for _ in range(self._num_workers):
                next(loaded)
            self.is_ahead = True
            while not self._is_closed:
                received = next(loaded)
                if received is not None:
                    self._seconds.append(received[1])
                    self._received.put(received[0])
        except StopIteration:
            pass
        except BaseException as error:
            self._received.put(error)
        self.is_ahead = True
