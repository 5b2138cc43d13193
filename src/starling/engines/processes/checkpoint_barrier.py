"""Checkpoint barriers on which learners agree while they train.

A learner requests a barrier at regular intervals, or when it receives a stop request. It does so by setting a key in
the membership's store. In each learner, a thread polls that key and answers with the first portion that its learner has
not reached. Learner 0 places the barrier a margin after the highest answer. Until the place is known, each learner may
reach only the portions below its own answer plus the margin, so every learner knows of a barrier before it reaches the
barrier. The agreement does not wait for slow learners, because their threads answer for them.
"""

import json
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from itertools import count

from torch.distributed import DistError

from starling.engines.processes.handshake import Peers, do_nothing

POLL_SECONDS = 0.2
"""Interval at which the threads check for a request."""
MARGIN_SECONDS = 0.5
"""Training time that the margin covers. The margin spares learners a wait while they agree on a barrier."""
WAKE_SECONDS = 0.05
AGREEING = "agreeing on a checkpoint barrier"


@dataclass
class SaveRequests:
    """A learner process's requests for checkpoint barriers, for all memberships. Any thread may call `stop`.

    A process that has this object survives a SIGTERM or SIGINT until the run stops, and so do its loading processes.
    """

    minutes: float | None = None
    """Number of minutes between two barriers, on the clock of learner 0; None means that there are no regular
    barriers."""
    on_ready: Callable[[], None] = do_nothing
    """Function that is called once the learners are connected. From then on, a stop request reaches all of them."""
    stopped_by: int | None = None
    """Signal because of which the run must stop, or None."""
    is_ready: bool = False
    _before: float = field(default_factory=time.monotonic)

    def stop(self, number: int) -> None:
        """Request that all learners stop at the same barrier, because of the signal `number`."""
        self.stopped_by = self.stopped_by or number

    def ready(self) -> None:
        """Record that the learners are connected."""
        if not self.is_ready:
            self.is_ready = True
            self._before = time.monotonic()
            self.on_ready()

    def wanted(self, is_first: bool) -> int | None:
        """Return the signal that stops the run, 0 for a barrier after which the run continues, or None if no barrier is
        wanted now."""
        if self.stopped_by is not None:
            return self.stopped_by
        is_due = self.minutes is not None and time.monotonic() - self._before >= 60.0 * self.minutes
        return 0 if is_first and is_due else None

    def agreed(self) -> None:
        """Record that learners have agreed on a barrier."""
        self._before = time.monotonic()


class CheckpointBarrier(threading.Thread):
    """One learner's part in the checkpoint barriers of a membership.

    Before this learner reaches a new barrier, the thread calls `on_barrier` with the number of the first portion after
    the barrier, and with the signal because of which the run stops there, or 0. Without `save_requests` there are no
    barriers.
    """

    def __init__(
        self, peers: Peers, save_requests: SaveRequests | None, on_barrier: Callable[[int, int], None]
    ) -> None:
        super().__init__(name=f"starling-barriers-{peers.rank}", daemon=True)  # it must not keep a failed learner alive
        self._rank, self._world = peers.rank, peers.world
        self._peers = peers
        self._has_requests = save_requests is not None
        self._is_closed = threading.Event()
        if save_requests is not None:
            self._beside = peers.beside(self._is_closed, peers.waits)
        self._requests = save_requests or SaveRequests()
        self._on_barrier = on_barrier
        self._changed = threading.Condition()
        self._reached = 0  # the first portion that this learner has not reached
        self._limit: int | None = None  # the first portion that must wait until the barrier's place is known
        self._error: DistError | None = None
        self._begin = time.monotonic()

    def start(self) -> None:
        if self._has_requests:
            super().start()
            self._requests.ready()

    def close(self) -> None:
        """End the thread. A barrier on which learners have not agreed yet is dropped."""
        self._is_closed.set()
        if self.is_alive():
            self.join(10.0 * POLL_SECONDS)

    def reach(self, portion: int) -> None:
        """Prepare to begin a portion: wait while it is unknown whether a barrier precedes the portion. Raises
        `DistError` if learners do not agree within the time-out."""
        with self._changed:
            if self._limit is None or portion < self._limit:
                self._reached = max(self._reached, portion + 1)
                return
        self._wait(portion)
        self.reach(portion)

    def settle(self) -> None:
        """Wait, after the last portion of all learners, until they agree on the requested barrier, if any."""
        self._wait(math.inf)

    def _wait(self, portion: float) -> None:
        def is_agreed() -> bool:
            if self._limit is None or portion < self._limit:
                return True
            if self._error is not None:
                raise self._error
            self._changed.wait(WAKE_SECONDS)
            return False

        with self._peers.naming_the_lost(AGREEING), self._changed:
            self._peers.await_done(is_agreed, "no checkpoint barrier was agreed on")

    def run(self) -> None:
        try:
            for number in count():
                signal_number, margin = self._request(number)
                self._agree(number, signal_number, margin)
                if signal_number:
                    return
        except CancelledError:
            pass
        except DistError as error:  # the store is gone; tell waiting threads
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _request(self, number: int) -> tuple[int, int]:
        """Wait for the request of barrier `number`. Return the signal that stops the run, or 0, and the margin."""
        store, key = self._beside.store, f"barriers/{number}"
        while True:
            self._beside.look_around()
            wanted = self._requests.wanted(self._rank == 0)
            if wanted is not None:
                request = store.compare_set(key, "", json.dumps([wanted, self._margin()]))
                break
            if store.check([key]):
                request = store.get(key)
                break
            self._is_closed.wait(POLL_SECONDS)
        signal_number, margin = json.loads(request)
        return signal_number, margin

    def _agree(self, number: int, signal_number: int, margin: int) -> None:
        store, key = self._beside.store, f"barriers/{number}/{{}}".format
        with self._changed:
            answer, self._limit = self._reached, self._reached + margin
        store.set(key(self._rank), str(answer))
        if self._rank == 0:
            keys = [key(rank) for rank in range(self._world)]
            self._beside.await_keys(keys, AGREEING, range(self._world))
            store.set(key("place"), str(max(int(store.get(each)) for each in keys) + margin))
            self._forget(number - 1)  # all learners have answered, so all know the place of the previous barrier
        self._beside.await_keys([key("place")], AGREEING, [0])
        barrier = int(store.get(key("place")))
        with self._changed:
            if signal_number:
                self._requests.stop(signal_number)
            self._requests.agreed()
            self._on_barrier(barrier, signal_number)
            self._limit = None
            self._changed.notify_all()

    def _margin(self) -> int:
        """The estimated number of portions that all learners together reach in `MARGIN_SECONDS`; at least 1."""
        seconds = max(time.monotonic() - self._begin, MARGIN_SECONDS)
        return max(1, math.ceil(MARGIN_SECONDS * self._reached / seconds))

    def _forget(self, number: int) -> None:
        for word in ("", "/place", *(f"/{rank}" for rank in range(self._world))):
            self._beside.store.delete_key(f"barriers/{number}{word}")
