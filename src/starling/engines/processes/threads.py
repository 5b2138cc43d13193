"""Threads of a learner process that wait for other learners, and handles of what they wait for. They do not keep the
process alive, and a failure of another thread ends their waits."""

import atexit
import os
import sys
import threading
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from torch import Tensor

from starling.learner import Handle
from starling.training.learner import given_away

T = TypeVar("T")
LOOK_AROUND_SECONDS = 1.0


def end_with_threads(exit_code: int) -> None:
    """Let this process exit cleanly although some of its threads wait for lost learners.

    Python does not join daemon threads at exit, but aborts the process if one of them wakes up meanwhile. So after all
    exit handlers this function ends the process: with code 1 after an uncaught exception, otherwise with `exit_code`.
    """

    process = os.getpid()

    def end() -> None:
        if os.getpid() == process:  # not in a child that this process has forked
            end_now(1 if hasattr(sys, "last_value") else exit_code, end)

    atexit.register(end)


def end_now(exit_code: int, handler: Callable[[], None]) -> None:
    """End this process from its exit handler `handler`, once all others have run."""
    atexit.unregister(handler)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(exit_code)


class Worker:
    """Runs tasks one after another in a daemon thread.

    Python joins the threads of a `ThreadPoolExecutor` at exit, so one that waits for a lost learner would keep a failed
    process alive.
    """

    def __init__(self, name: str) -> None:
        self._tasks: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def submit(self, task: Callable[[], T]) -> "Future[T]":
        """Run `task` after all earlier ones."""
        if self._thread.ident is None:
            self._thread.start()
        future: Future[T] = Future()
        self._tasks.put((task, future))
        return future

    def abandon(self) -> None:
        """Drop the tasks that have not begun. The thread ends after the current one, which may never end."""
        with suppress(Empty):
            while (given := self._tasks.get_nowait()) is not None:
                given[1].cancel()
        self._tasks.put(None)

    def close(self, seconds: float | None = None) -> None:
        """Finish the current task, waiting at most `seconds` for it, drop the rest, and end the thread."""
        self.abandon()
        if self._thread.ident is not None:
            self._thread.join(seconds)

    def _run(self) -> None:
        while (given := self._tasks.get()) is not None:
            task, future = given
            try:
                result = task()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            del given, task, future


class Workers(dict[str, Worker]):
    """The threads of a learner by name, each made when it is first needed; they end together."""

    def __missing__(self, name: str) -> Worker:
        worker = self[name] = Worker(name)
        return worker

    def abandon(self) -> None:
        """Let them end, without waiting for what is under way."""
        for worker in list(self.values()):
            worker.abandon()

    def close(self) -> None:
        """End them. None of them may still be waiting."""
        for worker in list(self.values()):
            worker.close()


class Release:
    """Ends the waits of a learner's threads when one of them fails."""

    def __init__(self) -> None:
        self._failed: Future[Any] = Future()

    @property
    def error(self) -> BaseException | None:
        """Why the learner has failed, if it has."""
        return self._failed.exception() if self._failed.done() else None

    def fail(self, error: BaseException) -> None:
        """End all waits with `error`, or with that of an earlier call. May be called by any thread."""
        with suppress(InvalidStateError):
            self._failed.set_exception(error)

    def check(self) -> None:
        """Raise the error given to `fail`, if any."""
        if self._failed.done():
            self._failed.result()

    def wait(self, work: "Future[T]") -> T:
        """Wait for the result of `work`. Raises the error given to `fail` before or during the wait."""
        wait((work, self._failed), return_when=FIRST_COMPLETED)
        if not work.done():
            self.check()
        return work.result()


class ProcessHandle(Handle[T]):
    """Work under way in this process. The first call of `result()` waits for it; later calls return the same result.

    `finish_in` waits by `wait_long`, if given: in another thread than the strategy's, and without a time-out.
    """

    def __init__(self, wait: Callable[[], T], wait_long: Callable[[], T] | None = None) -> None:
        self._wait = wait
        self._wait_long = wait_long or wait
        self._results: list[T] = []

    def __await__(self) -> Generator[Handle[Any], None, T]:
        """Wait here: the thread that runs the strategy has nothing else to do."""
        yield from ()
        return self.result()

    @property
    def is_finished(self) -> bool:
        return bool(self._results)

    def finish_in(self, worker: Worker) -> "Future[T]":
        """Wait in a thread, without a time-out; `result` then waits for that."""
        finished = worker.submit(self._wait_long)
        self._wait = finished.result
        return finished

    def result(self) -> T:
        if not self._results:
            self._results.append(self._wait())
        return self._results[0]


class GradientHandle(ProcessHandle[Tensor]):
    """A gradient, computed when it is awaited; before that, `mean` may request the sync group's mean instead."""

    def __init__(self, rank: int, compute: Callable[[bool], Tensor], may_reduce: bool) -> None:
        """`compute` returns the gradient or, if that is asked for and it `may_reduce`, the mean, which it computes
        while backward runs."""
        super().__init__(lambda: compute(False))
        self._rank, self._compute, self._may_reduce = rank, compute, may_reduce
        self._is_given_away = False

    def averaged(self, mean: Callable[[Tensor], Tensor]) -> Handle[Tensor]:
        """The mean over the sync group in place of the gradient, which must not be awaited any more. If `compute`
        cannot reduce, `mean` makes it from the gradient, whose memory it may overwrite."""
        self._is_given_away = True
        if self._may_reduce:
            return ProcessHandle(lambda: self._compute(True))
        return ProcessHandle(lambda: mean(self._compute(False)))

    def result(self) -> Tensor:
        if self._is_given_away:
            raise given_away(self._rank)
        return super().result()


class FirstOf:
    """Determines which of several handles finishes first; one thread per key waits for its handle."""

    def __init__(self, workers: Workers, name: str) -> None:
        self._watched: dict[int, tuple[ProcessHandle[Any], Future[Any]]] = {}
        self._finished: SimpleQueue[Future[Any]] = SimpleQueue()
        self._workers, self._name = workers, name

    def of(self, handles: Mapping[int, ProcessHandle[Any]], look_around: Callable[[], None]) -> int:
        """The key of a handle that has finished or failed. Each handle is returned once.

        While waiting, `look_around` is called repeatedly and may raise.
        """
        for key, handle in handles.items():
            if key not in self._watched or self._watched[key][0] is not handle:
                self._watched[key] = handle, handle.finish_in(self._workers[f"{self._name}-{key}"])
                self._watched[key][1].add_done_callback(self._finished.put)
        while True:
            try:
                finished = self._finished.get(timeout=LOOK_AROUND_SECONDS)
            except Empty:
                look_around()
                continue
            for key in handles:
                if self._watched[key][1] is finished:
                    return key
