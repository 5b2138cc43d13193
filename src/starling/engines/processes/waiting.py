"""Waiting in threads: for what a failure elsewhere ends, and for the first of several."""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from starling.engines.processes.worker import Worker

T = TypeVar("T")
H = TypeVar("H")
LOOK_AROUND_SECONDS = 1.0


class Release:
    """Ends the waits of a learner's threads when something failed in another of them."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._lock = threading.Lock()
        self._waits: set[Future[Any]] = set()

    def fail(self, error: BaseException) -> None:
        """Let everything end with this error, unless there was one before. Called by any thread."""
        with self._lock:
            self.error = self.error or error
            waits = list(self._waits)
        for wait in waits:
            with suppress(InvalidStateError):
                wait.set_exception(self.error)

    def check(self) -> None:
        """Raise what went wrong, if anything has."""
        if self.error is not None:
            raise self.error

    def wait(self, work: "Future[T]") -> T:
        """The result of work; or what failed elsewhere, so that nobody waits for those who will not come."""
        with self._lock:
            if self.error is not None and not work.done():
                raise self.error
            self._waits.add(work)
        try:
            return work.result()
        finally:
            with self._lock:
                self._waits.discard(work)


class FirstOf(Generic[H]):
    """Tells which of several handles is finished first; a thread for each key waits for it."""

    def __init__(self) -> None:
        self._watched: dict[int, H] = {}
        self._finished: SimpleQueue[tuple[int, H]] = SimpleQueue()
        self._workers: dict[int, Worker] = {}

    def of(self, handles: Mapping[int, H], look_around: Callable[[], None]) -> int:
        """The key of one that is finished, well or not. It is told once: its result is to be taken.

        While nothing comes, `look_around` is called now and then, and may raise.
        """
        for key, handle in handles.items():
            if self._watched.get(key) is not handle:
                self._watched[key] = handle
                self._workers.setdefault(key, Worker(f"starling-first-{key}")).submit(partial(self._watch, key, handle))
        while True:
            try:
                key, handle = self._finished.get(timeout=LOOK_AROUND_SECONDS)
            except Empty:
                look_around()
                continue
            if handles.get(key) is handle:
                return key

    def abandon(self) -> None:
        """Wait for nothing any more."""
        for worker in self._workers.values():
            worker.abandon()

    def close(self) -> None:
        """End the threads, when none of them waits."""
        for worker in self._workers.values():
            worker.close()

    def _watch(self, key: int, handle: Any) -> None:
        handle.finish()
        self._finished.put((key, handle))
