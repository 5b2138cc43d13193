"""The mini-batches of one learner process: its sync group claims portions of tickets through the store, and loading
processes prepare mini-batches ahead."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count, islice

from starling.engines.processes.checkpoint_barrier import CheckpointBarrier
from starling.engines.processes.communicator import ConnectedLearner
from starling.engines.processes.tickets import CLAIMING, DoneNotes, Draws
from starling.training.job import Job
from starling.training.loading import Loaded, Loader, Lookahead
from starling.training.tickets import SyncGroupTickets
from starling.workload import Ticket

KEPT_TIMES = 1 << 16
"""Claims of a sync group whose time stays in the store: learners that agree every H steps are up to H claims apart."""


class ProcessBatches:
    """The `BatchSource` of a learner process. With `notes` it records in the store which tickets are done."""

    def __init__(
        self,
        job: Job,
        tickets: SyncGroupTickets,
        part: int,
        loader: Loader,
        learner: ConnectedLearner,
        barrier: CheckpointBarrier,
        notes: DoneNotes | None,
        clock: Callable[[], float],
    ) -> None:
        peers = self._peers = learner.peers
        sync_groups = job.sync_groups(peers.world)
        self._budget, self._tickets, self._part = job.budget, tickets, part
        self._sync_group = sync_groups.of(peers.rank)
        self._is_whole = len(self._sync_group) == peers.world
        self._is_worker = peers.rank < sync_groups.num_workers
        self._member = peers.rank - self._sync_group.start
        self._naming_the_lost = learner.naming_the_lost
        self._barrier, self._notes = barrier, notes
        self._statistics, self._clock = learner.statistics, clock
        self._drawn_ahead: set[int] = set()  # portions that this sync group has drawn and not yet claimed
        self._newest_drawn = 0
        self._draws = Draws(peers, self._sync_group)
        self._resumed_at: float | None = None  # when the last mini-batch was given out
        is_counted = job.budget.steps is not None or job.budget.epochs is not None
        self._loader, self._lookahead = loader, Lookahead(is_counted)
        self._batches = loader.load(self._drawn(), self._num_ahead)

    def next(self, claim: int) -> Sequence[Loaded] | None:
        begin = time.monotonic()
        with self._peers.waits.waiting("data"):
            loaded = list(islice(self._batches, self._tickets.shares[self._member]))
        now = time.monotonic()
        self._statistics.spent.waiting_for_data += now - begin
        if self._is_whole:  # nothing is drawn
            return loaded or None
        if self._resumed_at is not None:
            spent = self._budget.fraction(self._tickets.progress(self._newest_drawn, minutes=0.0))
            self._lookahead.began(self._draws.drawn_at, begin - self._resumed_at, spent)
        self._resumed_at = now
        if loaded:
            self._drawn_ahead.discard(self._tickets.number_of(loaded[0][0]))
            self._draw_ahead(now)
        return loaded or None

    def agreed_seconds(self, claim: int) -> float:
        """The clock of the sync group's first learner, through the store."""
        if len(self._sync_group) == 1:
            return self._clock()
        store, first, what = self._peers.store, self._sync_group.start, "agreeing on the time"
        key = f"clock/{first}/{{}}".format
        if self._member == 0:
            store.set(key(claim), repr(self._clock()))
            store.delete_key(key(claim - KEPT_TIMES))
        with self._naming_the_lost(what):
            self._peers.await_keys([key(claim)], what, [first])
            return float(store.get(key(claim)))

    def reach(self, portion: int) -> None:
        """Wait until it is known whether there is a checkpoint barrier before `portion`."""
        self._barrier.reach(portion)

    def done(self, ticket: Ticket) -> None:
        if self._notes is not None:
            self._notes.add(ticket)

    def drawn_by_all(self) -> tuple[int, list[int]]:
        """The number of portions drawn by all sync groups, and the portions that remain undone because they were drawn
        ahead when the time budget was spent. Waits until all learners have made their last claims."""
        if self._is_whole:
            return self._statistics.num_claimed, []
        undone = self._undone() if self._is_worker and self._member == 0 else ()
        what = "collecting the last claims"
        with self._naming_the_lost(what):
            found = self._peers.gather_all("claimed", sorted(undone), what)
        return int(self._peers.store.add("claims", 0)), sorted(number for each in found for number in each)

    def _drawn(self) -> Iterator[Ticket]:
        """Draw this learner's tickets."""
        for number in self._numbers() if self._is_worker else ():
            self.reach(number)
            if not (drawn := self._tickets.drawn(number, self._member)):
                return
            if not self._is_whole:
                self._drawn_ahead.add(number)
                self._newest_drawn = number
            for ticket in drawn:
                yield replace(ticket, part=self._part)

    def _numbers(self) -> Iterator[int]:
        """Draw portions for this sync group: their numbers."""
        if self._is_whole:
            yield from count()
        while True:
            yield self._take()

    def _take(self) -> int:
        with self._naming_the_lost(CLAIMING):
            return self._draws.take()

    def _draw_ahead(self, now: float) -> None:
        """Begin to draw what will be wanted after the mini-batch that begins, so that nothing waits for the store."""
        num_more = 1 + self._loader.is_ahead
        if self._member == 0:
            num_more = self._lookahead.num(now, self._loader.load_seconds, 1 + self._loader.is_ahead)
            num_more -= len(self._drawn_ahead)
        for _ in range(num_more - self._draws.num_under_way):
            self._draws.begin()

    def _undone(self) -> set[int]:
        """The portions that were drawn ahead and will not be claimed; draws that are under way are completed."""
        undone = set(self._drawn_ahead)
        for _ in range(self._draws.num_under_way):
            number = self._take()
            self.reach(number)
            if not self._tickets.is_beyond(number):
                undone.add(number)
        return undone

    def _num_ahead(self) -> int:
        """The number of portions that may be drawn ahead of the one that is about to begin."""
        if self._is_whole:
            return sys.maxsize  # no other learner would take them
        if self._member == 0:
            return self._lookahead.num(time.monotonic(), self._loader.load_seconds)
        # only what the first has drawn: waiting for more would keep the group from the step that the first is in
        return len(self._drawn_ahead) - 1 + self._draws.num_known

    def close(self) -> None:
        """End the thread that draws."""
        self._draws.close()
