"""Marks that nobody can compute: learners agree on them while they go on.

Somebody wants one, by the clock or because it was asked to stop, and says so under a key of the view's store. In each
learner a thread looks at that key, and answers with the number of the first portion that its learner has not reached.
The first learner makes the mark of these numbers: the highest, and a margin. Who has answered goes on below its own
answer and the margin, and waits for the mark before it goes further: so nobody passes a mark without knowing it, and
nobody waits for a slow learner, whose thread answers for it.
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

LOOK_SECONDS = 0.2
"""Between two looks at whether somebody wants a mark."""
MARGIN_SECONDS = 0.5
"""What learners are to have left to compute while they agree, so that none of them waits."""
WAKE_SECONDS = 0.05


@dataclass
class Wishes:
    """What marks a learner process wants, from view to view. `stop` may be called by any thread."""

    minutes: float | None = None
    """A mark after every so many minutes, on the clock of the first learner of the view; None: none."""
    on_ready: Callable[[], None] = do_nothing
    """Called when the learners have met, so that they can stop together."""
    ignores_signals: bool = False
    """Whether this process goes on after a SIGTERM or SIGINT, which its loading processes are then to outlive."""
    stopped_by: int | None = None
    """The signal by which this run, all learners together, is asked to end."""
    is_ready: bool = False
    _before: float = field(default_factory=time.monotonic)

    def stop(self, number: int) -> None:
        """Let all learners end at one mark, because of a signal of this number."""
        self.stopped_by = self.stopped_by or number

    def ready(self) -> None:
        """The learners have met."""
        if not self.is_ready:
            self.is_ready = True
            self._before = time.monotonic()
            self.on_ready()

    def wanted(self, is_first: bool) -> int | None:
        """The signal to stop because of; 0 for a mark at which to go on; None if no mark is wanted now."""
        if self.stopped_by is not None:
            return self.stopped_by
        is_due = self.minutes is not None and time.monotonic() - self._before >= 60.0 * self.minutes
        return 0 if is_first and is_due else None

    def agreed(self) -> None:
        """There is a mark."""
        self._before = time.monotonic()


class _Over(Exception):  # noqa: N818 - it is no error
    """Ends the thread of a view that is over."""


class CheckpointBarrier(threading.Thread):
    """One learner's part in the marks of a view, in which it is number `rank` of `world`.

    `on_mark` is called with the number of each new mark, the first portion behind it, and the signal to stop there or
    0; by the thread, before this learner reaches it. Without `wishes` there are no marks.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world: int,
        wishes: Wishes | None,
        on_mark: Callable[[int, int], None],
        timeout_seconds: float = math.inf,
    ) -> None:
        super().__init__(name=f"starling-marks-{rank}", daemon=True)  # it must not keep a failed learner alive
        self._store: Store | None = None
        if wishes is not None:  # a connection of its own: a store serves one question at a time
            self._store = store.clone()  # type: ignore[attr-defined]
        self._rank, self._world = rank, world
        self._wishes = wishes or Wishes()
        self._on_mark = on_mark
        self._timeout_seconds = timeout_seconds
        self._changed = threading.Condition()
        self._reached = 0  # the first portion that this learner has not reached
        self._limit: int | None = None  # the first portion that it may not reach before it knows the mark
        self._error: DistError | None = None
        self._is_over = threading.Event()
        self._begin = time.monotonic()

    def start(self) -> None:
        if self._store is not None:
            super().start()
            self._wishes.ready()

    def close(self) -> None:
        """End the thread; a mark that is not agreed on is dropped."""
        self._is_over.set()
        if self.is_alive():
            self.join(10.0 * LOOK_SECONDS)

    def reach(self, portion: int, look_around: Callable[[], None] = do_nothing) -> None:
        """This learner is about to go on to a portion; waits where a mark may be before it. Meanwhile `look_around` is
        called now and then, and may raise. `DistError` when there is no mark within the time-out."""
        with self._changed:
            self._wait(lambda limit: portion >= limit, look_around)
            self._reached = max(self._reached, portion + 1)

    def settle(self, look_around: Callable[[], None] = do_nothing) -> None:
        """All learners have reached their last portions: wait for the mark that they are agreeing on, if any."""
        with self._changed:
            self._wait(lambda limit: True, look_around)

    def _wait(self, may_be_beyond: Callable[[int], bool], look_around: Callable[[], None]) -> None:
        begin = time.monotonic()
        while self._limit is not None and may_be_beyond(self._limit):
            if self._error is not None:
                raise self._error
            if time.monotonic() - begin > self._timeout_seconds:
                raise DistStoreError(f"Timed out: no mark was agreed on for {self._timeout_seconds:g} s")
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
        except DistError as error:  # the store is gone; who waits for it hears of it
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _request(self, number: int) -> tuple[int, int]:
        """Wait until somebody wants the mark of this number: the signal to stop because of, or 0, and the margin."""
        key = f"marks/{number}"
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
        store, key = self._asked, f"marks/{number}/{{}}".format
        with self._changed:
            answer, self._limit = self._reached, self._reached + margin
        store.set(key(self._rank), str(answer))
        if self._rank == 0:
            keys = [key(rank) for rank in range(self._world)]
            await_keys(
                store, keys, math.inf, self._look_around, "all to answer where a mark can be", range(self._world)
            )
            store.set(key("mark"), str(max(int(store.get(each)) for each in keys) + margin))
            self._forget(number - 1)  # all have answered, so that all know the mark before
        await_keys(store, [key("mark")], math.inf, self._look_around, "the place of a mark", [0])
        mark = int(store.get(key("mark")))
        with self._changed:
            if signal_number:
                self._wishes.stop(signal_number)
            self._wishes.agreed()
            self._on_mark(mark, signal_number)
            self._limit = None
            self._changed.notify_all()

    @property
    def _asked(self) -> Store:
        """The thread's own connection."""
        if self._store is None:
            raise _Over
        return self._store

    def _margin(self) -> int:
        """How many portions all learners together reach while they agree."""
        seconds = max(time.monotonic() - self._begin, MARGIN_SECONDS)
        return max(1, math.ceil(MARGIN_SECONDS * self._reached / seconds))

    def _forget(self, number: int) -> None:
        for word in ("", "/mark", *(f"/{rank}" for rank in range(self._world))):
            self._asked.delete_key(f"marks/{number}{word}")

    def _look_around(self) -> None:
        if self._is_over.is_set():
            raise _Over
