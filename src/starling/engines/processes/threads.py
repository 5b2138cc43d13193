"""Threads of a learner process that wait for other learners, and handles of the work for which they wait. The threads
do not keep the process alive, and a failure of another thread ends their waits."""

import atexit
import os
import sys
import threading
from collections.abc import Callable, Generator
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from torch import Tensor

from starling.learner import Handle
from starling.training.replica import given_away

T = TypeVar("T")
Mean = Callable[[Tensor], Tensor]


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
    """The threads of a learner by name, each created when it is first needed; they end together."""

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

    @property
    def error(self) -> BaseException | None:
        """Why the learner has failed, if it has."""
        return self._failed.exception() if self._failed.done() else None

    def fail(self, error: BaseException) -> None:
        """End all waits with `error`, or with the error of an earlier call. May be called by any thread."""
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


class _Started(threading.local):
    """Counts what this thread has started or awaited, where its learner asks for that."""

    count: list[int] = [0]  # noqa: RUF012 - each thread that counts sets its own


STARTED = _Started()


class ProcessHandle(Handle[T]):
    """Work under way in this process. The first call of `result()` waits for it; later calls return the same result.

    `finish_in` waits by `wait_long`, if given, in another thread than the strategy's and without a time-out. The work
    may need the gradient `of` a user's loop.
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
        """Wait here, because the thread that runs the strategy has nothing else to do; but let a user's loop compute
        first."""
        if self.of is not None and not self.of.is_supplied:
            yield self
        result = self.result()
        STARTED.count[0] += 1
        return result

    @property
    def is_finished(self) -> bool:
        return bool(self._results)

    def finish_in(self, worker: Worker, tell: "Callable[[ProcessHandle[T]], object]") -> None:
        """Wait in a thread, without a time-out, which then calls `tell`; `result` waits for that. Further calls do
        nothing."""
        if not self._is_finishing:
            self._is_finishing = True
            finished = worker.submit(self._wait_long)
            self._wait = finished.result
            finished.add_done_callback(lambda _: tell(self))

    def result(self) -> T:
        if not self._results:
            self._results.append(self._wait())
            self._wait = self._wait_long  # a worker's future would keep this handle, and what it holds, in a cycle
        return self._results[0]


class GradientHandle(ProcessHandle[Tensor]):
    """A gradient, computed when it is awaited; before that, `mean` may request the sync group's mean instead."""

    def __init__(self, rank: int, compute: Callable[[Mean | None], Tensor], is_supplied: bool = True) -> None:
        """Make the handle of a gradient that is computed later. `compute` returns the gradient or, given a `Mean`, the
        mean over the sync group: by that `Mean`, which may overwrite the gradient, or computed while backward runs."""
        super().__init__(lambda: compute(None))
        self._rank, self._compute = rank, compute
        self.is_supplied = is_supplied
        """False until a user's loop has computed the gradient: awaiting it, or a mean of it, waits for the loop."""
        self._is_given_away = False

    @property
    def of(self) -> "GradientHandle":
        return self  # kept as an attribute, it would be a cycle, which holds a snapshot until the next collection

    def averaged(self, mean: Mean) -> Handle[Tensor]:
        """The mean over the sync group in place of the gradient, which must no longer be awaited."""
        self._is_given_away = True
        return ProcessHandle(lambda: self._compute(mean), of=self)

    def result(self) -> Tensor:
        if self._is_given_away:
            raise given_away(self._rank)
        return super().result()
