"""Executors that run stages in this process or in several local processes. `on_ray.py` has one for several machines."""

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
from typing import Self

import torch

from starling.chance import one_thread
from starling.errors import DataError, StarlingError
from starling.speech.preparing.stages import Stage, Tick

_POLL_SECONDS = 0.1
"""Interval at which the progress of other processes is read."""
END_TIMEOUT_SECONDS = 60.0
"""How long running stages may take to finish after another one has failed."""
_num_done: "Synchronized[int] | None" = None
"""In a worker process: the number of utterances that all workers have done."""


class Executor:
    """Runs stages, one after another in this process. As a context manager it ends the processes it has started."""

    def run(self, stages: Iterable[Stage], tick: Tick) -> Iterator[Stage]:
        """Run the stages that have no result yet, and yield all in order, each once it has a result.

        The first error in the order of the stages is raised. Stages are drawn as they are needed.
        """
        for stage in stages:
            if not _is_done(stage, tick):
                with one_thread():  # on busy cores, resampling short audio with several threads is ten times slower
                    stage.run(tick)
            yield stage

    def abandon(self, at_once: bool) -> None:
        """Begin no more stages. Wait for running ones to finish or, if `at_once`, end them."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Remote(Executor):
    """The base class of executors that run stages in other processes."""

    def __init__(self) -> None:
        self._futures: set[Future[int]] = set()

    def run(self, stages: Iterable[Stage], tick: Tick) -> Iterator[Stage]:
        """See `Executor`; at most `window` stages are in memory."""
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
            wait(self._futures, timeout=END_TIMEOUT_SECONDS)
        self._futures.clear()
        self.look(lambda count: None, 0)  # do not count their progress in the next run

    def window(self) -> int:
        """How many stages may be submitted before the first of them has finished."""
        raise NotImplementedError

    def submit(self, stage: Stage) -> "Future[int]":
        """Run a stage elsewhere; its result is the number of utterances used."""
        raise NotImplementedError

    def look(self, tick: Tick, finished: int) -> None:
        """Report progress; `finished` is the number of utterances of a stage that has just ended, or 0."""
        raise NotImplementedError

    def kill(self) -> None:
        """End running stages."""
        raise NotImplementedError

    def _submitted(self, stage: Stage) -> "Future[int]":
        try:
            future = self.submit(stage)
        except BrokenExecutor as error:  # raised later, when it is this stage's turn
            future = Future()
            future.set_exception(error)
        self._futures.add(future)
        return future

    def _finished(self, stage: Stage, future: "Future[int] | None", tick: Tick) -> Stage:
        if future is None:
            return stage
        while not wait([future], timeout=_POLL_SECONDS).done:
            self.look(tick, 0)
        try:
            self.look(tick, future.result())
        except (BrokenExecutor, CancelledError) as error:
            self.kill()
            raise DataError(
                f"set {stage.checking.set_name}: the process that wrote shard {stage.number} ended unexpectedly "
                f"({str(error) or 'the connection to it is lost'}); if it ran out of memory, use fewer jobs or a "
                f"smaller data.shard_size; repeat the command to continue from the finished shards"
            ) from error
        finally:
            self._futures.discard(future)
        return stage


class Processes(Remote):
    """Several local processes, started when the first stage is submitted. They end when this process does."""

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
        count = self._count.get_obj().value  # without its lock, which a killed process may hold
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
    """Iterates over stages; keeps an error of the iteration until the stages before it are done."""

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
    """Block SIGINT within this context, and permanently in processes started there: only this process handles
    Ctrl-C."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(lifeline: Connection, count: "Synchronized[int]") -> None:
    """Initialise a worker process. It ends when the other end of `lifeline` is closed everywhere."""
    global _num_done
    _num_done = count
    torch.set_num_threads(1)
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()


def _end_with(lifeline: Connection) -> None:
    lifeline.poll(None)
    os._exit(1)


def _run(stage: Stage) -> int:
    return stage.run(_tick)


def _tick(count: int) -> None:
    if _num_done is not None:
        with _num_done.get_lock():
            _num_done.value += count
