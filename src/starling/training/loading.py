"""Mini-batches, loaded ahead of the learner that computes on them."""

import math
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice, repeat
from multiprocessing import resource_tracker
from multiprocessing.reduction import ForkingPickler
from queue import SimpleQueue
from statistics import median
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
_REMEMBERED = 9  # mini-batches from which a learner's speed is estimated
_LONGEST_END = 10.0  # seconds
_LOOK_SECONDS = 0.2
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Lookahead:
    """How many mini-batches an asynchronous learner draws ahead of the one that it is about to begin.

    A mini-batch that is drawn belongs to its learner. So a learner draws as many as it takes to have each loaded in
    time, and none that it would begin only after the last of the budget is drawn: another learner begins that earlier.
    Hence no learner, however slow, ends more than about one of its gradients after the others. Where only a time limit
    ends the run (`is_counted` False), there is no last mini-batch.
    """

    def __init__(self, is_counted: bool = True) -> None:
        self._is_counted = is_counted
        self._steps: deque[float] = deque(maxlen=_REMEMBERED)
        self._draws: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED)

    def began(self, now: float, step_seconds: float, fraction: float) -> None:
        """A mini-batch begins. The one before it took `step_seconds`, and the newest that this learner has drawn lies
        at `fraction` of the budget."""
        self._steps.append(step_seconds)
        if not self._draws or fraction > self._draws[-1][1]:  # else it has drawn nothing since
            self._draws.append((now, fraction))

    def num(self, now: float, load_seconds: float) -> int:
        """The number to draw ahead, where loading one takes `load_seconds`."""
        if not self._steps:
            return 0
        step = max(median(self._steps), 1e-6)
        in_time, before_end = 1 + math.ceil(2.0 * load_seconds / step), self._seconds_left(now) / step
        return int(min(in_time, max(0.0, before_end - 0.5)))  # by half a step, for these are estimates

    def _seconds_left(self, now: float) -> float:
        """Until all learners together will have drawn the last mini-batch of the budget."""
        if not self._is_counted:
            return math.inf
        if len(self._draws) < 2:
            return 0.0
        (first, spent_then), (last, spent) = self._draws[0], self._draws[-1]
        return max(0.0, (1.0 - spent) * (last - first) / (spent - spent_then) - (now - last))


class Loader:
    """Loads mini-batches ahead, in `num_workers` processes; with 0, when they are requested.

    The processes are spawned: a fork of a process with gloo's threads crashes, and a fork server outlives a killed
    learner. Spawning takes seconds, in which the caller loads mini-batches itself. With `ignores_signals` the processes
    survive a SIGTERM or SIGINT to the learner's process group, and end when the learner does.
    """

    def __init__(self, workload: Workload[Any], num_workers: int, ignores_signals: bool = False) -> None:
        self._workload = workload
        self._processes = _Processes(workload, num_workers, ignores_signals) if num_workers else None

    @property
    def is_ahead(self) -> bool:
        """Whether processes load by now."""
        return self._processes is not None and self._processes.are_up

    @property
    def load_seconds(self) -> float:
        """How long a process takes to load a mini-batch: the longest of the last few."""
        return self._processes.load_seconds if self._processes is not None else 0.0

    def load(self, tickets: Iterable[Ticket], num_ahead: Callable[[], int] = lambda: sys.maxsize) -> Iterator[Loaded]:
        """Each ticket with its mini-batch, in order. Tickets are drawn by the caller's thread, and ahead: before each
        mini-batch is given out, as many as keep the processes busy, but at most `num_ahead()`.

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
            yield from self._processes.load(tickets, num_ahead)

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


_Timed = tuple[Loaded, float]
"""What a process has loaded, and the seconds that it took."""


class _ByTicket(Dataset[_Timed | None]):
    def __init__(self, workload: Workload[Any]) -> None:
        self._workload = workload

    def __getitem__(self, ticket: Ticket | None) -> _Timed | None:
        if ticket is None:
            return None
        begin = time.perf_counter()
        loaded = ticket, self._workload.load(ticket)
        return loaded, time.perf_counter() - begin


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
    thread gives out. Where fewer of these are drawn behind a mini-batch, empty ones make up for them.
    """

    def __init__(self, workload: Workload[Any], num_workers: int, ignores_signals: bool) -> None:
        self.are_up = False
        """Whether mini-batches come at once; or the error that stands in their way."""
        self._num_workers = num_workers
        self._num_filling = _AHEAD * num_workers
        self._asked: SimpleQueue[Ticket | _End | None] = SimpleQueue()
        self._received: SimpleQueue[Loaded | BaseException] = SimpleQueue()
        self._num_asked = 0
        self._outstanding: deque[int] = deque()  # how many were asked for before each ticket that is to be received
        self._seconds: deque[float] = deque([0.0], maxlen=_REMEMBERED)
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

    @property
    def load_seconds(self) -> float:
        """The longest of the last few loads."""
        return max(self._seconds)

    def load(self, tickets: Iterator[Ticket], num_ahead: Callable[[], int]) -> Iterator[Loaded]:
        """Each ticket with its mini-batch, in order; what is left of other tickets is dropped."""
        while self._outstanding:
            self._receive()
        self._draw(tickets, 1)
        while self._outstanding:
            received = self._receive()
            self._draw(tickets, min(self._num_filling + 1, num_ahead()))
            yield received
            self._draw(tickets, 1)

    def close(self) -> None:
        """End the processes."""
        self._is_over = True
        self._asked.put(_End())
        self._thread.join(_LONGEST_END)

    def _draw(self, tickets: Iterator[Ticket], num: int) -> None:
        """Draw tickets until this many are outstanding, or there are no more."""
        for ticket in islice(tickets, max(0, num - len(self._outstanding))):
            self._outstanding.append(self._num_asked)
            self._ask(ticket)

    def _ask(self, ticket: Ticket | None) -> None:
        self._asked.put(ticket)
        self._num_asked += 1

    def _receive(self) -> Loaded:
        place = self._outstanding.popleft()
        while self._num_asked <= place + self._num_filling:
            self._ask(None)
        received = self._received.get()
        if isinstance(received, BaseException):
            raise received
        return received

    def _run(self, loaded: Iterator[_Timed | None]) -> None:
        """What the thread does. The processes end when it lets go of the iterator."""
        try:
            for _ in range(self._num_workers):
                next(loaded)
            self.are_up = True
            while not self._is_over:
                received = next(loaded)
                if received is not None:
                    self._seconds.append(received[1])
                    self._received.put(received[0])
        except StopIteration:
            pass
        except BaseException as error:
            self._received.put(error)
        self.are_up = True
