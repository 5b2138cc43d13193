"""Tickets and averaging rounds, which learner processes share through the store.

The store contains the portions of tickets that sync groups draw, and records of each learner's done tickets, so that
the done tickets of a lost learner are not repeated.

A sync group draws its next portion while a gradient is computed. A draw takes one or several round trips to the store.
If the link to the store is long, or busy with weights, a round trip takes as long as sending many packets. Without
drawing ahead, the learner would be idle for that time before every gradient.
"""

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue

from torch.distributed.distributed_c10d import Store

from starling.engines.processes.forks import clone_store
from starling.engines.processes.handshake import Peers
from starling.engines.processes.links import LinkBoard
from starling.engines.processes.stalls import Waits
from starling.engines.processes.threads import Worker
from starling.training.pace import Rounds
from starling.training.succession import CutAgreement
from starling.training.tickets import DoneTickets
from starling.workload import Position, Ticket

CLAIMING = "claiming"
KEPT_CLAIMS = 1024
"""Number of a sync group's claims that are kept in the store. The group's members are only as far apart as the number
of mini-batches that they have loaded ahead."""
POLL_SECONDS = 0.5
CLOSE_SECONDS = 10.0
_DONE, _REACHED, _KEPT = "done/{}/{}", "done/{}/reached", "done/{}/kept"
_CHUNK = 64
"""Number of tickets that a learner records under one key."""


class Draws:
    """The portions of one member of a sync group. A thread with its own connection to the store draws them.

    The group's first learner draws for all members and writes the numbers to the store, from which the other members
    read them. In a group of one learner, nothing is written.
    """

    def __init__(self, peers: Peers, group: range) -> None:
        self._peers, self._group = peers, group
        self._is_first = peers.rank == group.start
        self._worker = Worker("starling-draws")
        self._own: Peers | None = None
        self._is_closed = threading.Event()
        self._claims = count()
        self._begun_at: deque[float] = deque()  # start times of the draws that were not taken
        # a queue, because waiting for a future takes as long as a draw
        self._drawn: SimpleQueue[int | Exception] = SimpleQueue()
        self._taken: int | Exception = 0
        self.drawn_at = 0.0
        """Time on the clock `time.monotonic` at which the draw that was taken last had begun."""

    @property
    def num_under_way(self) -> int:
        """Number of draws that have begun and were not taken."""
        return len(self._begun_at)

    @property
    def num_known(self) -> int:
        """Number of draws that can be taken without waiting."""
        return self._drawn.qsize()

    def begin(self) -> None:
        """Begin one more draw."""
        if self._own is None:
            self._own = self._peers.beside(self._is_closed, Waits())
        self._begun_at.append(time.monotonic())
        self._worker.submit(partial(self._draw, self._own))

    def take(self) -> int:
        """Return the next portion in the order of the draws, waiting for it if necessary. Raises `DistStoreError` after
        the time-out."""
        peers = self._peers
        if self.num_under_way == 0:
            self.begin()
        with peers.waits.waiting(CLAIMING, () if self._is_first else [self._group.start]):
            peers.await_done(self._has_come, "no draw")
        if isinstance(self._taken, Exception):
            raise self._taken
        self.drawn_at = self._begun_at.popleft()
        return self._taken

    def _has_come(self) -> bool:
        try:
            self._taken = self._drawn.get(timeout=POLL_SECONDS)
        except Empty:
            return False
        return True

    def close(self) -> None:
        """End the thread. The store has counted the draws that were not taken."""
        self._is_closed.set()
        self._worker.close(CLOSE_SECONDS)

    def _draw(self, own: Peers) -> None:
        try:
            self._drawn.put(self._drawn_from(own, next(self._claims)))
        except Exception as error:  # raised by `take`
            self._drawn.put(error)

    def _drawn_from(self, own: Peers, claim: int) -> int:
        store, key = own.store, f"claims/{self._group.start}/{{}}".format
        if not self._is_first:
            own.await_keys([key(claim)])
            return int(store.get(key(claim)))
        drawn = int(store.add("claims", 1)) - 1
        if len(self._group) > 1:
            store.set(key(claim), str(drawn))
            if claim >= KEPT_CLAIMS:
                store.delete_key(key(claim - KEPT_CLAIMS))
        return drawn


class DoneNotes:
    """Records which tickets learner `rank` of a membership has done.

    Each learner receives its tickets in the order of their numbers and does them in that order. Therefore all tickets
    below the lowest number that the `num_workers` learners have reached are done, and their records are removed.
    """

    def __init__(self, store: Store, rank: int, num_workers: int) -> None:
        self._store = store
        self._rank, self._num_workers = rank, num_workers
        self._num_noted = 0
        self._chunks: deque[tuple[int, int]] = deque()  # full chunks, each with its last ticket's number
        store.set(_DONE.format(rank, 0), "")
        store.set(_KEPT.format(rank), "0 0")

    def add(self, ticket: Ticket) -> None:
        """Record that the learner has done a mini-batch: its gradient is in the weights."""
        chunk, place = divmod(self._num_noted, _CHUNK)
        self._store.append(_DONE.format(self._rank, chunk), f"{ticket.step} ")  # type: ignore[attr-defined]
        self._num_noted += 1
        if place == _CHUNK - 1:
            self._chunks.append((chunk, ticket.step))
            self._store.set(_REACHED.format(self._rank), str(ticket.step))
            self._forget()

    def _forget(self) -> None:
        keys = [_REACHED.format(rank) for rank in range(self._num_workers)]
        if not self._store.check(keys):  # some learner has not filled a chunk yet
            return
        below = min(int(number) for number in self._store.multi_get(keys))
        full = [chunk for chunk, last in self._chunks if last < below]
        if full:  # before the deletion, so that a concurrent reader finds each chunk, or finds that it is done
            self._store.set(_KEPT.format(self._rank), f"{full[-1] + 1} {below}")
        for chunk in full:
            self._store.delete_key(_DONE.format(self._rank, chunk))
            self._chunks.popleft()


def noted(store: Store, world: int, start: Position) -> DoneTickets:
    """Return the tickets that the learners of a membership have recorded as done. The membership began at `start`.

    The records of all learners are read together, because the next membership waits for them, and a round trip to the
    store may take milliseconds.
    """
    done, ranks = DoneTickets(start), list(range(world))
    while ranks:
        kept = _kept(store, ranks)
        done.add_all_below(max(below for _, below in kept.values()))
        chunks = {rank: first for rank, (first, _) in kept.items()}
        while chunks:
            found = _read(store, {rank: _DONE.format(rank, chunk) for rank, chunk in chunks.items()})
            for steps in found.values():
                for step in steps.split():
                    done.add(int(step))
            chunks = {rank: chunks[rank] + 1 for rank, steps in found.items() if len(steps.split()) >= _CHUNK}
        after = _kept(store, ranks)
        ranks = [rank for rank in ranks if after[rank] != kept[rank]]  # a learner presumed lost may still remove some
    return done


def _kept(store: Store, ranks: Sequence[int]) -> dict[int, tuple[int, int]]:
    """Return, for each learner, the first chunk that it has kept, and the first ticket that its chunks record."""
    found = _read(store, {rank: _KEPT.format(rank) for rank in ranks})
    pairs = {rank: found.get(rank, b"0 0").split() for rank in ranks}
    return {rank: (int(chunk), int(below)) for rank, (chunk, below) in pairs.items()}


def _read(store: Store, keys: Mapping[int, str]) -> dict[int, bytes]:
    """Return the values of the keys that exist. The fewer keys are missing, the fewer round trips are needed."""
    if store.check(list(keys.values())):
        return dict(zip(keys, store.multi_get(list(keys.values())), strict=True))
    if len(keys) == 1:
        return {}
    items = list(keys.items())
    half = len(items) // 2
    return _read(store, dict(items[:half])) | _read(store, dict(items[half:]))


ENDED = 1 << 30
"""Number added to a round's key if the round will never open."""
_CUT, _ENTERED = "cut", "entered"
"""Values in the store for a round that a learner wants to enter. They say whether the round is the cut of a checkpoint
barrier."""
SAVING = "saving a checkpoint"
DRIFT = 1024
"""Maximum number of rounds that one learner may be ahead of another; older keys are removed from the store. Neighbours
wait for each other in every round, so with any connected topology learners stay much closer."""


class StoreBoard:
    """Record in the store of the rounds that have opened, and of the last round. Each round is a key, for which all
    backgrounds wait without polling.

    A background that opens a round learns from the store's answer that the round is open, and need not ask again. This
    matters because a round trip to the store can take long if the link is busy with weights.
    """

    def __init__(self, store: Store, rank: int, world: int) -> None:
        self._store = store
        self._own = clone_store(store)
        self._own.set_timeout(timedelta(days=20))
        self._rank, self._world = rank, world

    def open(self, number: int, is_behind: bool) -> bool:
        if not is_behind:
            return int(self._store.add(_key(number), 1)) < ENDED
        return self._enter(number, int(self._own.add(_key(number), 1)))

    def await_open(self, number: int) -> bool:
        """Wait until a round opens, and return whether it opens; False means that it never will. The background calls
        this method."""
        return self._enter(number, int(self._own.get(_key(number))))

    def _enter(self, number: int, value: int) -> bool:
        has_opened = value < ENDED
        if has_opened and number >= DRIFT and number % self._world == self._rank:
            self._own.delete_key(_key(number - DRIFT))
        return has_opened

    def finish(self, first_unopened: int) -> None:
        if self._store.add("rounds/finished", 1) < self._world:
            return
        while self._store.check([_key(first_unopened)]):
            first_unopened += 1
        self._store.add(_key(first_unopened), ENDED)


class StoreCuts(CutAgreement):
    """The cuts of a membership's checkpoint barriers, agreed on through the store.

    Learners that have passed a barrier mark each round that they enter. The last learner to pass the barrier places the
    cut at the first round that is not marked and that no learner entered before it passed the barrier. If one learner
    marks a round while another places the cut there, the store decides which of the two comes first.
    """

    def __init__(self, peers: Peers) -> None:
        self._store, self._rank, self._world = peers.store, peers.rank, peers.world
        self._naming_the_lost = peers.naming_the_lost
        self._behind: Store | None = None  # the background's own connection

    def passed(self, barrier: int, num_entered: int) -> None:
        store, key = self._store, f"cuts/{barrier}/{{}}".format
        with self._naming_the_lost(SAVING):
            store.set(key(f"entered/{self._rank}"), str(num_entered))
            if int(store.add(key("passed"), 1)) < self._world:
                return
            number = max(self._entered(barrier))
            while store.compare_set(key(number), "", _CUT) != _CUT.encode():
                number += 1
            store.set(key("place"), str(number))

    def is_cut(self, barrier: int, number: int) -> bool:
        if self._behind is None:  # the caller, which enters a round, names lost learners
            self._behind = clone_store(self._store)
        return bool(self._behind.compare_set(f"cuts/{barrier}/{number}", "", _ENTERED) == _CUT.encode())

    def cut(self, barrier: int) -> int | None:
        key = f"cuts/{barrier}/place"
        with self._naming_the_lost(SAVING):
            return int(self._store.get(key)) if self._store.check([key]) else None

    def saved(self, barrier: int) -> None:
        store, key = self._store, f"cuts/{barrier}/{{}}".format
        with self._naming_the_lost(SAVING):
            if int(store.add(key("saved"), 1)) < self._world:
                return
            marked = range(min(self._entered(barrier)), int(store.get(key("place"))) + 1)
            names = ["passed", "place", "saved", *marked, *(f"entered/{rank}" for rank in range(self._world))]
            for name in names:
                store.delete_key(key(name))

    def _entered(self, barrier: int) -> list[int]:
        """Return the number of rounds that each learner had entered when it passed a barrier."""
        return [int(self._store.get(f"cuts/{barrier}/entered/{rank}")) for rank in range(self._world)]


class ProcessRounds(Rounds):
    """The rounds of a learner that is a process. The learner's background waits in them."""

    def __init__(self, board: StoreBoard | LinkBoard) -> None:
        super().__init__(board)
        self._own_board = board

    def next(self, period: float) -> int | None:
        """Wait for the next round. Returns its number, or None after the last round. The background calls this
        method."""
        number, is_open = self.begin(period)
        return self.enter(number, self._own_board.await_open(number) if is_open is None else is_open)


def _key(number: int) -> str:
    return f"rounds/{number}"
