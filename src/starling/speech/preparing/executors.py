"""Where stages run: in this process, or in processes of this machine. `dask.py` has a third, for several machines."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import BrokenExecutor, CancelledError, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from types import TracebackType
from typing import Protocol, Self

import torch

from starling.errors import DataError, StarlingError
from starling.speech.chance import one_thread
from starling.speech.preparing.stages import Stage, Tick

_LOOK_EVERY = 0.1
"""Seconds between two looks at how far the other processes are."""
_LONGEST_END = 60.0
"""Seconds that a shard gets to come to its end, when another one has failed."""
_ahead: "Synchronized[int] | None" = None
"""In a working process: the count of utterances that all of them have done."""


class Executor(Protocol):
    """Runs stages; also a context manager that ends whatever it has started."""

    def run(self, stages: Iterable[Stage], tick: Tick) -> Iterator[Stage]:
        """Run those whose result is not there, and give all back in order, each when its result is there.

        The first error in the order of the stages is raised. Stages are drawn as they are needed.
        """

    def abandon(self, at_once: bool) -> None:
        """Begin no more stages; let those that run come to their end, or, if `at_once`, end them."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class InThisProcess:
    """One stage after the other."""

    def run(self, stages: Iterable[Stage], tick: Tick) -> Iterator[Stage]:
        for stage in stages:
            if not _is_done(stage, tick):
                with one_thread():  # resampling; short pieces are ten times slower on threads that others keep busy
                    stage.run(tick)
            yield stage

    def abandon(self, at_once: bool) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Remote:
    """What executors have in common whose stages run in other processes."""

    def __init__(self) -> None:
        self._futures: set[Future[int]] = set()

    def __enter__(self) -> Self:
        return self

    def run(self, stages: Iterable[Stage], tick: Tick) -> Iterator[Stage]:
        """See `Executor`; at most `window` of them are in memory."""
        queue: deque[tuple[Stage, Future[int] | None]] = deque()
        for stage in (listed := _Listed(stages)):
            queue.append((stage, None if _is_done(stage, tick) else self._submitted(stage)))
            while queue and (queue[0][1] is None or len(queue) >= self.window()):
                yield self._finished(*queue.popleft(), tick)
        while queue:
            yield self._finished(*queue.popleft(), tick)
        if listed.error is not None:
            raise listed.error

    def abandon(self, at_once: bool) -> None:
        for future in self._futures:
            future.cancel()
        if at_once:
            self.kill()
        else:
            wait(self._futures, timeout=_LONGEST_END)
        self._futures.clear()
        self.look(lambda count: None, 0)  # what they have done is no progress of the next run

    def window(self) -> int:
        """How many stages are begun before the first of them is waited for."""
        raise NotImplementedError

    def submit(self, stage: Stage) -> "Future[int]":
        """Have a stage run; the number of utterances that are used."""
        raise NotImplementedError

    def look(self, tick: Tick, finished: int) -> None:
        """Tell how far the others are; `finished` utterances are those of a stage that has just ended."""
        raise NotImplementedError

    def kill(self) -> None:
        """End what runs."""
        raise NotImplementedError

    def _submitted(self, stage: Stage) -> "Future[int]":
        try:
            future = self.submit(stage)
        except BrokenExecutor as error:  # which a stage before this one tells, in the order of the stages
            future = Future()
            future.set_exception(error)
        self._futures.add(future)
        return future

    def _finished(self, stage: Stage, future: "Future[int] | None", tick: Tick) -> Stage:
        if future is None:
            return stage
        while not wait([future], timeout=_LOOK_EVERY).done:
            self.look(tick, 0)
        try:
            self.look(tick, future.result())
        except (BrokenExecutor, CancelledError) as error:
            self.kill()
            raise DataError(
                f"set {stage.checking.set_name}: a process that wrote shard {stage.number} ended unexpectedly "
                f"({str(error) or 'the connection to it is lost'}); if memory was short, take fewer jobs or a smaller "
                f"data.shard_size; the same command goes on from the shards that are finished"
            ) from error
        finally:
            self._futures.discard(future)
        return stage


class Processes(Remote):
    """Several processes of this machine, started when there is something to do; they end with this one."""

    def __init__(self, jobs: int) -> None:
        super().__init__()
        self._jobs = jobs
        self._pool: ProcessPoolExecutor | None = None
        self._lifeline: Connection | None = None
        self._count: Synchronized[int] | None = None
        self._seen = 0

    def window(self) -> int:
        return 2 * self._jobs

    def submit(self, stage: Stage) -> "Future[int]":
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._end, self._lifeline = context.Pipe(duplex=False)
            self._count, self._seen = context.Value("q", 0), 0
            self._pool = ProcessPoolExecutor(self._jobs, context, _begin, (self._end, self._count))
        with interrupts_later():
            return self._pool.submit(_run, stage)

    def look(self, tick: Tick, finished: int) -> None:
        if self._count is None:
            return
        count = self._count.get_obj().value  # without its lock: who is killed may hold that
        if count > self._seen:
            tick(count - self._seen)
            self._seen = count

    def kill(self) -> None:
        if self._lifeline is not None:
            self._lifeline.close()
        self._shut_down()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._shut_down()
        else:
            self.kill()

    def _shut_down(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None
        for end in (self._lifeline, self._end) if self._lifeline is not None else ():
            end.close()
        self._lifeline = None


class _Listed:
    """Stages as they are listed; an error of the listing waits until those before it are done."""

    def __init__(self, stages: Iterable[Stage]) -> None:
        self._stages = stages
        self.error: StarlingError | None = None

    def __iter__(self) -> Iterator[Stage]:
        try:
            yield from self._stages
        except StarlingError as error:
            self.error = error


def _is_done(stage: Stage, tick: Tick) -> bool:
    result = stage.result()
    if result is not None:
        tick(len(result.places))
    return result is not None


@contextmanager
def interrupts_later() -> Iterator[None]:
    """Hold back Ctrl-C, and for ever in processes started meanwhile: it comes to all of them, and this one decides."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(lifeline: Connection, count: "Synchronized[int]") -> None:
    """Make ready a process that works; it ends when nobody holds the other end of its lifeline any more."""
    global _ahead
    _ahead = count
    torch.set_num_threads(1)
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()


def _end_with(lifeline: Connection) -> None:
    lifeline.poll(None)
    os._exit(1)


def _run(stage: Stage) -> int:
    return stage.run(_tick)


def _tick(count: int) -> None:
    if _ahead is not None:
        with _ahead.get_lock():
            _ahead.value += count
