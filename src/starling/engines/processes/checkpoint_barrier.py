"""Checkpoint barriers on which learners agree while they train.

A learner requests a barrier, by the clock or because it was asked to stop, under a key of the membership's store. In
each learner a thread polls that key, and answers with the first portion that its learner has not reached. Learner 0
places the barrier a margin above the highest answer. Meanwhile each learner may reach the portions below its own answer
plus the margin, and then waits for the barrier's place: so no learner passes a barrier unknowingly, and none waits for
a slow learner, whose thread answers for it.
"""

import json
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from torch.distributed import DistError, DistStoreError
from torch.distributed.distributed_c10d import Store

from starling.engines.processes.handshake import await_keys, do_nothing
from starling.engines.processes.stalls import Waits

LOOK_SECONDS = 0.2
"""Time between two looks for a request."""
MARGIN_SECONDS = 0.5
"""Seconds of computing that the margin leaves to learners while they agree, so that none of them waits."""
WAKE_SECONDS = 0.05


@dataclass
class SaveRequests:
    """The checkpoint barriers that a learner process requests, in all memberships. Any thread may call `stop`."""

    minutes: float | None = None
    """Minutes between two barriers, on the clock of learner 0; None: none."""
    on_ready: Callable[[], None] = do_nothing
    """Called once the learners are connected, so that they can stop together."""
    ignores_signals: bool = False
    """Whether this process, and therefore its loading processes, survive a SIGTERM or SIGINT for a while."""
    stopped_by: int | None = None
    """The signal by which the run, all learners together, is asked to end."""
    is_ready: bool = False
    _before: float = field(default_factory=time.monotonic)

    def stop(self, number: int) -> None:
        """Request that all learners end at one barrier, because of a signal of this number."""
        self.stopped_by = self.stopped_by or number

    def ready(self) -> None:
        """The learners are connected."""
        if not self.is_ready:
            self.is_ready = True
            self._before = time.monotonic()
            self.on_ready()

    def wanted(self, is_first: bool) -> int | None:
        """The signal that stops the run; 0 for a barrier after which it continues; None if none is wanted now."""
        if self.stopped_by is not None:
            return self.stopped_by
        is_due = self.minutes is not None and time.monotonic() - self._before >= 60.0 * self.minutes
        return 0 if is_first and is_due else None

    def agreed(self) -> None:
        """A barrier was agreed on."""
        self._before = time.monotonic()


class _Over(Exception):  # noqa: N818 - it is no error
    """Ends the thread of a membership that is over."""


class CheckpointBarrier(threading.Thread):
    """One learner's part in the checkpoint barriers of a membership.

    `on_barrier` is called with the first portion after each new barrier, and the signal to stop there or 0; by the thread,
    before this learner reaches that portion. Without `save_requests` there are no barriers.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world: int,
        save_requests: SaveRequests | None,
        on_barrier: Callable[[int, int], None],
        timeout_seconds: float = math.inf,
        waits: Waits | None = None,
    ) -> None:
        super().__init__(name=f"starling-barriers-{rank}", daemon=True)  # it must not keep a failed learner alive
        self._store: Store | None = None
        if save_requests is not None:  # its own connection: a store serves one request at a time
            self._store = store.clone()  # type: ignore[attr-defined]
        self._rank, self._world = rank, world
        self._wishes = save_requests or SaveRequests()
        self._on_barrier = on_barrier
        self._timeout_seconds = timeout_seconds
        self._waits = waits
        self._changed = threading.Condition()
        self._reached = 0  # the first portion that this learner has not reached
        self._limit: int | None = None  # the first portion that it may not reach before it knows the barrier's place
        self._error: DistError | None = None
        self._is_over = threading.Event()
        self._begin = time.monotonic()

    def start(self) -> None:
        if self._store is not None:
            super().start()
            self._wishes.ready()

    def close(self) -> None:
        """End the thread; a barrier that is not agreed on is dropped."""
        self._is_over.set()
        if self.is_alive():
            self.join(10.0 * LOOK_SECONDS)

    def reach(self, portion: int, look_around: Callable[[], None] = do_nothing) -> None:
        """This learner is about to begin a portion: wait if there may be a barrier before it. Meanwhile `look_around`
        is called now and then, and may raise. `DistError` when no barrier is agreed on within the time-out."""
        with self._changed:
            self._wait(lambda limit: portion >= limit, look_around)
            self._reached = max(self._reached, portion + 1)

    def settle(self, look_around: Callable[[], None] = do_nothing) -> None:
        """All learners have reached their last portions: wait until they agree on the barrier under way, if any."""
        with self._changed:
            self._wait(lambda limit: True, look_around)

    def _wait(self, may_be_beyond: Callable[[int], bool], look_around: Callable[[], None]) -> None:
        begin = time.monotonic()
        while self._limit is not None and may_be_beyond(self._limit):
            if self._error is not None:
                raise self._error
            if time.monotonic() - begin > self._timeout_seconds:
                raise DistStoreError(f"Timed out: no checkpoint barrier was agreed on for {self._timeout_seconds:g} s")
            look_around()
            self._changed.wait(WAKE_SECONDS)

    def run(self) -> None:
        try:
            for number in count():
                signal_number, margin = self._request(number)
                self._agree(number, signal_number, margin)
                if signal_number:
                    return
        except _Over:
            pass
        except DistError as error:  # the store is gone; waiting threads are told
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _request(self, number: int) -> tuple[int, int]:
        """Wait for the request of the barrier of this number: the signal that stops the run, or 0, and the margin."""
        key = f"barriers/{number}"
        while True:
            self._look_around()
            wanted = self._wishes.wanted(self._rank == 0)
            if wanted is not None:
                said = self._asked.compare_set(key, "", json.dumps([wanted, self._margin()]))
                break
            if self._asked.check([key]):
                said = self._asked.get(key)
                break
            self._is_over.wait(LOOK_SECONDS)
        signal_number, margin = json.loads(said)
        return signal_number, margin

    def _agree(self, number: int, signal_number: int, margin: int) -> None:
        store, key = self._asked, f"barriers/{number}/{{}}".format
        with self._changed:
            answer, self._limit = self._reached, self._reached + margin
        store.set(key(self._rank), str(answer))
        if self._rank == 0:
            keys = [key(rank) for rank in range(self._world)]
            what, ranks = "all to answer where a checkpoint barrier can be", range(self._world)
            await_keys(store, keys, math.inf, self._look_around, what, ranks, self._waits)
            store.set(key("place"), str(max(int(store.get(each)) for each in keys) + margin))
            self._forget(number - 1)  # all have answered, so all know the barrier before
        await_keys(
            store, [key("place")], math.inf, self._look_around, "the place of a checkpoint barrier", [0], self._waits
        )
        barrier = int(store.get(key("place")))
        with self._changed:
            if signal_number:
                self._wishes.stop(signal_number)
            self._wishes.agreed()
            self._on_barrier(barrier, signal_number)
            self._limit = None
            self._changed.notify_all()

    @property
    def _asked(self) -> Store:
        """The thread's own connection to the store."""
        if self._store is None:
            raise _Over
        return self._store

    def _margin(self) -> int:
        """The portions that all learners together reach while they agree."""
        seconds = max(time.monotonic() - self._begin, MARGIN_SECONDS)
        return max(1, math.ceil(MARGIN_SECONDS * self._reached / seconds))

    def _forget(self, number: int) -> None:
        for word in ("", "/place", *(f"/{rank}" for rank in range(self._world))):
            self._asked.delete_key(f"barriers/{number}{word}")

    def _look_around(self) -> None:
        if self._is_over.is_set():
            raise _Over
