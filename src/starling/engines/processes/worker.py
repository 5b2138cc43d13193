"""Threads that keep no process alive."""

import atexit
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


def end_with_threads(exit_code: int) -> None:
    """Let this process end well although threads wait in it for what will not come.

    Python leaves such a thread alone when it ends, and aborts the process when the thread comes back meanwhile. So once
    all else that is to happen at the end has happened, the process ends here: with 1 after an exception that nobody
    caught, else with `exit_code`.
    """

    def end() -> None:
        atexit.unregister(end)
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(1 if hasattr(sys, "last_value") else exit_code)

    atexit.register(end)


class Worker:
    """Does what it is given in a thread of its own, one after the other.

    Python waits for the threads of a `ThreadPoolExecutor` before it exits, so that one which waits for a lost learner
    would keep a failed process alive; this thread is a daemon.
    """

    def __init__(self, name: str) -> None:
        self._tasks: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def submit(self, task: Callable[[], T]) -> "Future[T]":
        """Do `task` after all that was given before. Who waits may be released by giving the future an exception."""
        if self._thread.ident is None:
            self._thread.start()
        future: Future[T] = Future()
        self._tasks.put((task, future))
        return future

    def abandon(self) -> None:
        """Leave what was not begun, and let the thread end when what was begun ends, if ever."""
        with suppress(Empty):
            while (given := self._tasks.get_nowait()) is not None:
                given[1].cancel()
        self._tasks.put(None)

    def close(self) -> None:
        """Let what was begun end, leave the rest, and end the thread."""
        with suppress(Empty):
            while (given := self._tasks.get_nowait()) is not None:
                given[1].cancel()
        if self._thread.ident is not None:
            self._tasks.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (given := self._tasks.get()) is not None:
            task, future = given
            with suppress(InvalidStateError):  # somebody released those who wait
                try:
                    result = task()
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)
            del given, task, future
