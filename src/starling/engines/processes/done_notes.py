"""Records in the store of the tickets that each learner has done, so that those of a lost learner are not repeated."""

from collections import deque
from collections.abc import Mapping, Sequence

from torch.distributed.distributed_c10d import Store

from starling.training.tickets import DoneTickets
from starling.workload import Position, Ticket

_DONE, _REACHED, _KEPT = "done/{}/{}", "done/{}/reached", "done/{}/kept"
_CHUNK = 64
"""Tickets that a learner records under one key."""


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
    """Of each learner, the first chunk that it has kept, and the first ticket of which its chunks tell."""
    found = _read(store, {rank: _KEPT.format(rank) for rank in ranks})
    pairs = {rank: found.get(rank, b"0 0").split() for rank in ranks}
    return {rank: (int(chunk), int(below)) for rank, (chunk, below) in pairs.items()}


def _read(store: Store, keys: Mapping[int, str]) -> dict[int, bytes]:
    """The values of those of the keys that exist; the fewer do not exist, the fewer round trips."""
    if store.check(list(keys.values())):
        return dict(zip(keys, store.multi_get(list(keys.values())), strict=True))
    if len(keys) == 1:
        return {}
    items = list(keys.items())
    half = len(items) // 2
    return _read(store, dict(items[:half])) | _read(store, dict(items[half:]))
