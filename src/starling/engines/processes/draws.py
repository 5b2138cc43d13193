"""The portions of tickets that a sync group draws through the store: the next one while a gradient is computed.

A draw takes one or several round trips to the store. Where the link to it is full of weights, or long, a round trip
takes as long as many packets, and the learner would spend it idle before every gradient.
"""

import threading
import time
from collections import deque
from dataclasses import replace
from queue import Empty, SimpleQueue

from torch.distributed import DistStoreError

from starling.engines.processes.forks import clone_store
from starling.engines.processes.handshake import Peers
from starling.engines.processes.stalls import Waits

CLAIMING = "claiming"
KEPT_CLAIMS = 1024
"""Claims of a sync group kept in the store. Its members differ only by the mini-batches they have loaded ahead."""
POLL_SECONDS = 0.5
CLOSE_SECONDS = 10.0


class _Closed(Exception):  # noqa: N818 - not an error
    """Ends the thread after `close`."""


class Draws(threading.Thread):
    """The portions of one member of a sync group, drawn by a thread with its own connection to the store.

    The group's first learner draws for all members and writes what it drew; the others read that. Without others
    nothing is written.
    """

    def __init__(self, peers: Peers, group: range) -> None:
        super().__init__(name="starling-draws", daemon=True)  # it must not keep a failed learner alive
        self._peers, self._group = peers, group
        self._is_first = peers.rank == group.start
        self._asked: SimpleQueue[bool] = SimpleQueue()
        self._drawn: SimpleQueue[int | Exception] = SimpleQueue()
        self._is_closed = threading.Event()
        self._begun_at: deque[float] = deque()  # of the draws that were not taken
        self.drawn_at = 0.0
        """When the draw that was taken last had begun, on the clock `time.monotonic`."""

    @property
    def num_under_way(self) -> int:
        """Draws that have begun and were not taken."""
        return len(self._begun_at)

    @property
    def num_known(self) -> int:
        """How many can be taken without waiting."""
        return self._drawn.qsize()

    def begin(self) -> None:
        """Begin one more draw."""
        if self.ident is None:
            store = clone_store(self._peers.store)
            self._own = self._peers.but(
                place=replace(self._peers.place, store=store),
                timeout_seconds=float("inf"),
                waits=Waits(),
                look_around=self._check_closed,
            )
            self.start()
        self._begun_at.append(time.monotonic())
        self._asked.put(True)

    def take(self) -> int:
        """The next portion, in the order of the draws; waits for it if need be. `DistStoreError` after the time-out."""
        peers = self._peers
        if self.num_under_way == 0:
            self.begin()
        begin = time.monotonic()
        with peers.waits.waiting(CLAIMING, () if self._is_first else [self._group.start]):
            while True:
                try:
                    drawn = self._drawn.get(timeout=POLL_SECONDS)
                    break
                except Empty:
                    peers.look_around()
                    if time.monotonic() - begin > peers.timeout_seconds:
                        raise DistStoreError(f"Timed out: no draw for {peers.timeout_seconds:g} s") from None
        if isinstance(drawn, Exception):
            raise drawn
        self.drawn_at = self._begun_at.popleft()
        return drawn

    def close(self) -> None:
        """End the thread. The store has counted the draws that were not taken."""
        self._is_closed.set()
        self._asked.put(False)
        if self.is_alive():
            self.join(CLOSE_SECONDS)

    def run(self) -> None:
        number = 0
        try:
            while self._asked.get():
                self._drawn.put(self._draw(number))
                number += 1
        except _Closed:
            pass
        except Exception as error:  # raised by `take`
            self._drawn.put(error)

    def _draw(self, claim: int) -> int:
        store, key = self._own.store, f"claims/{self._group.start}/{{}}".format
        if not self._is_first:
            self._own.await_keys([key(claim)])
            return int(store.get(key(claim)))
        drawn = int(store.add("claims", 1)) - 1
        if len(self._group) > 1:
            store.set(key(claim), str(drawn))
            if claim >= KEPT_CLAIMS:
                store.delete_key(key(claim - KEPT_CLAIMS))
        return drawn

    def _check_closed(self) -> None:
        if self._is_closed.is_set():
            raise _Closed
