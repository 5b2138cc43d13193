"""Threads of a learner process that wait for other learners, and handles of the work for which they wait. The threads
do not keep the process alive, and their waits end if another thread fails."""

import atexit
import os
import sys
import threading
from collections.abc import Callable, Generator
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from contextlib import suppress
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, TypeVar

from torch import Tensor

from starling.learner import Handle
from starling.training.replica import given_away

T = TypeVar("T")
Mean = Callable[[Tensor], Tensor]


def end_with_threads(exit_code: int) -> None:
    """Let this process exit cleanly although some of its threads wait for lost learners.

    Python does not join daemon threads at exit, but aborts the process if one of them wakes up during exit. Therefore
    this function ends the process after all exit handlers have run, with code 1 after an uncaught exception, otherwise
    with `exit_code`.
    """

    process = os.getpid()

    def end() -> None:
        if os.getpid() == process:  # not in a child that this process has forked
            end_now(1 if hasattr(sys, "last_value") else exit_code, end)

    atexit.register(end)


def end_now(exit_code: int, handler: Callable[[], None]) -> None:
    """End this process from its exit handler `handler`, once all other exit handlers have run."""
    atexit.unregister(handler)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(exit_code)


class Worker:
    """Runs tasks one after another in a daemon thread.

    Python joins the threads of a `ThreadPoolExecutor` at exit, so such a thread would keep a failed process alive if it
    waited for a lost learner.
    """

    def __init__(self, name: str) -> None:
        self._tasks: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def submit(self, task: Callable[[], T]) -> "Future[T]":
        """Run `task` after all earlier tasks."""
        if self.thread.ident is None:
            self.thread.start()
        future: Future[T] = Future()
        self._tasks.put((task, future))
        return future

    def abandon(self) -> None:
        """Drop the tasks that have not begun. The thread ends after the current task, which may never end."""
        with suppress(Empty):
            while (given := self._tasks.get_nowait()) is not None:
                given[1].cancel()
        self._tasks.put(None)

    def close(self, seconds: float | None = None) -> None:
        """Finish the current task, waiting at most `seconds` for it, drop the other tasks, and end the thread."""
        self.abandon()
        if self.thread.ident is not None:
            self.thread.join(seconds)

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
    """The threads of a learner, by name. Each thread is created when it is first needed; all end together."""

    def __missing__(self, name: str) -> Worker:
        worker = self[name] = Worker(name)
        return worker

    def abandon(self) -> None:
        """Let the threads end, without waiting for work under way."""
        for worker in list(self.values()):
            worker.abandon()

    def close(self) -> None:
        """End the threads. None of them may still be waiting."""
        for worker in list(self.values()):
            worker.close()


class Release:
    """Ends the waits of a learner's threads when one of them fails."""

    def __init__(self) -> None:
        self._failed: Future[Any] = Future()
        self._traceback: TracebackType | None = None

    @property
    def error(self) -> BaseException | None:
        """The error because of which the learner has failed; None if it has not failed."""
        return self._failed.exception() if self._failed.done() else None

    def fail(self, error: BaseException) -> None:
        """End all waits with `error`, or with the error of an earlier call. Any thread may call this method."""
        traceback = error.__traceback__
        with suppress(InvalidStateError):
            self._failed.set_exception(error)
            self._traceback = traceback

    def check(self) -> None:
        """Raise the error that was passed to `fail`, if any."""
        if (error := self.error) is not None:
            context = error.__context__
            try:
                raise error
            finally:
                error.__context__ = context  # and not the wait that this error has ended

    def restore(self, error: BaseException) -> None:
        """Let the traceback of an error end where the error was passed to `fail`, and not in a wait that it ended."""
        if error is self.error:
            error.__traceback__ = self._traceback

    def wait(self, work: "Future[T]") -> T:
        """Wait for the result of `work`, and return it. Raises the error that was passed to `fail` before or during the
        wait."""
        wait((work, self._failed), return_when=FIRST_COMPLETED)
        if not work.done():
            self.check()
        return work.result()


class _Started(threading.local):
    """Counter of the work that this thread has started or awaited, if its learner uses one."""

    count: list[int] = [0]  # noqa: RUF012 - each thread that counts sets its own


STARTED = _Started()


class ProcessHandle(Handle[T]):
    """Work under way in this process. The first call of `result()` waits for the work; later calls return the same
    result.

    `finish_in` waits in a thread other than the strategy's and without a time-out; it calls `wait_long` if given. `of`
    is the gradient of a user's loop that the work needs, if any.
    """

    def __init__(
        self, wait: Callable[[], T], wait_long: Callable[[], T] | None = None, of: "GradientHandle | None" = None
    ) -> None:
        self._wait = wait
        self._wait_long = wait_long or wait
        self._results: list[T] = []
        self._is_finishing = False
        self._of = of

    @property
    def of(self) -> "GradientHandle | None":
        """The gradient that this work needs, if any."""
        return self._of

    def __await__(self) -> Generator[Handle[Any], None, T]:
        """Wait within this call, because the thread that runs the strategy has nothing else to do. If the work needs a
        gradient of a user's loop, let the loop compute it first."""
        if self.of is not None and not self.of.is_supplied:
            yield self
        result = self.result()
        STARTED.count[0] += 1
        return result

    @property
    def is_finished(self) -> bool:
        return bool(self._results)

    def finish_in(self, worker: Worker, tell: "Callable[[ProcessHandle[T]], object]") -> None:
        """Wait without a time-out in the thread of `worker`, which then calls `tell`. `result` waits for that thread.
        Further calls of this method do nothing."""
        if not self._is_finishing:
            self._is_finishing = True
            finished = worker.submit(self._wait_long)
            self._wait = finished.result
            finished.add_done_callback(lambda _: tell(self))

    def result(self) -> T:
        if not self._results:
            self._results.append(self._wait())
            self._wait = self._wait_long  # a worker's future would keep this handle and its contents in a cycle
        return self._results[0]


class GradientHandle(ProcessHandle[Tensor]):
    """A gradient that is computed when it is awaited. Before that, `averaged` may request the sync group's mean
    instead."""

    def __init__(self, rank: int, compute: Callable[[Mean | None], Tensor], is_supplied: bool = True) -> None:
        """Create the handle of a gradient that is computed later. `compute` returns the gradient or, if it is given a
        `Mean`, the mean over the sync group. That mean is computed while backward runs, or by the `Mean`, which may
        overwrite the gradient."""
        super().__init__(lambda: compute(None))
        self._rank, self._compute = rank, compute
        self.is_supplied = is_supplied
        """Whether the gradient can be computed without waiting for a user's loop. If False, awaiting the gradient or a
        mean of it waits until the loop has computed it."""
        self._is_given_away = False

    @property
    def of(self) -> "GradientHandle":
        return self  # as an attribute, `self` would form a cycle, which holds a snapshot until the next collection

    def averaged(self, mean: Mean) -> Handle[Tensor]:
        """Return the handle of the mean over the sync group. The gradient itself must no longer be awaited."""
        self._is_given_away = True
        return ProcessHandle(lambda: self._compute(mean), of=self)

    def result(self) -> Tensor:
        if self._is_given_away:
            raise given_away(self._rank)
        return super().result()
