"""What learner processes share through the store: tickets, i.e. the portions that a sync group draws and the records of
each learner's done tickets, so that those of a lost learner are not repeated; and their averaging rounds.

A sync group draws its next portion while a gradient is computed. A draw takes one or several round trips to the store.
If the link to it is long, or full of weights, a round trip takes as long as many packets, and the learner would be idle
for that time before every gradient.
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
"""Number of a sync group's claims kept in the store. Its members differ only by the mini-batches they have loaded
ahead."""
POLL_SECONDS = 0.5
CLOSE_SECONDS = 10.0
_DONE, _REACHED, _KEPT = "done/{}/{}", "done/{}/reached", "done/{}/kept"
_CHUNK = 64
"""Number of tickets that a learner records under one key."""


class Draws:
    """The portions of one member of a sync group, drawn by a thread with its own connection to the store.

    The group's first learner draws for all members and writes the numbers, which the others read. A group of one writes
    nothing.
    """

    def __init__(self, peers: Peers, group: range) -> None:
        self._peers, self._group = peers, group
        self._is_first = peers.rank == group.start
        self._worker = Worker("starling-draws")
        self._own: Peers | None = None
        self._is_closed = threading.Event()
        self._claims = count()
        self._begun_at: deque[float] = deque()  # of the draws that were not taken
        # a queue, because waiting for a future takes as long as a draw
        self._drawn: SimpleQueue[int | Exception] = SimpleQueue()
        self._taken: int | Exception = 0
        self.drawn_at = 0.0
        """Time at which the draw that was taken last had begun, on the clock `time.monotonic`."""

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
        """The next portion, in the order of the draws; waits for it if necessary. `DistStoreError` after the
        time-out."""
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

    Each learner receives its tickets in the order of their numbers and does them in that order. So all tickets below
    the lowest number that the `num_workers` learners have reached are done, and their records are removed.
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
        if not self._store.check(keys):  # a learner has not yet filled a chunk
            return
        below = min(int(number) for number in self._store.multi_get(keys))
        full = [chunk for chunk, last in self._chunks if last < below]
        if full:  # before the deletion, so that a concurrent reader finds each chunk, or that its tickets are done
            self._store.set(_KEPT.format(self._rank), f"{full[-1] + 1} {below}")
        for chunk in full:
            self._store.delete_key(_DONE.format(self._rank, chunk))
            self._chunks.popleft()


def noted(store: Store, world: int, start: Position) -> DoneTickets:
    """The tickets that the learners of a membership, which began at `start`, have recorded as done.

    All learners' records are read together: the next membership waits for this, and a round trip to the store may take
    milliseconds.
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
        ranks = [rank for rank in ranks if after[rank] != kept[rank]]  # presumed lost, it may still remove records
    return done


def _kept(store: Store, ranks: Sequence[int]) -> dict[int, tuple[int, int]]:
    """The first chunk that each learner has kept, and the first ticket that its chunks record."""
    found = _read(store, {rank: _KEPT.format(rank) for rank in ranks})
    pairs = {rank: found.get(rank, b"0 0").split() for rank in ranks}
    return {rank: (int(chunk), int(below)) for rank, (chunk, below) in pairs.items()}


def _read(store: Store, keys: Mapping[int, str]) -> dict[int, bytes]:
    """The values of the existing keys; the fewer keys are missing, the fewer round trips are needed."""
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
"""Values that the store has for a round that a learner wants to enter: whether it is the cut of a checkpoint
barrier."""
SAVING = "saving a checkpoint"
DRIFT = 1024
"""Maximum number of rounds that one learner may be ahead of another; older keys are removed from the store. Neighbours
wait for each other in every round, so with any connected topology learners stay much closer."""


class StoreBoard:
    """Which rounds have opened, and which is the last, in the store: each round is a key, for which all backgrounds
    wait without polling.

    A background that opens a round learns from the store's answer that it is open, and need not ask: a round trip to
    the store can take long if weights fill the link.
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
        """Wait until a round opens. False if it never will. Called by the background."""
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
    """The cuts of a membership's checkpoint barriers, in the store.

    Learners that have passed a barrier mark each round that they enter. The last to pass places the cut at the first
    round that is not marked and that no learner entered before it passed. The store decides which of the two comes
    first.
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
        if self._behind is None:  # entering a round names the lost
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
        """The number of rounds that each learner had entered when it passed a barrier."""
        return [int(self._store.get(f"cuts/{barrier}/entered/{rank}")) for rank in range(self._world)]


class ProcessRounds(Rounds):
    """The rounds of a learner that is a process, whose background waits in them."""

    def __init__(self, board: StoreBoard | LinkBoard) -> None:
        super().__init__(board)
        self._own_board = board

    def next(self, period: float) -> int | None:
        """Called by the background: wait for the next round. Returns its number, or None after the last."""
        number, is_open = self.begin(period)
        return self.enter(number, self._own_board.await_open(number) if is_open is None else is_open)


def _key(number: int) -> str:
    return f"rounds/{number}"
