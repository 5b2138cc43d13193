"""Records in the store of the tickets that each learner has done, so that those of a lost learner are not repeated."""

from collections import deque

from torch.distributed.distributed_c10d import Store

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


def noted(store: Store, world: int, start: Position) -> set[int]:
    """The tickets that the learners of a membership, which began at `start`, have recorded as done."""
    return {step for rank in range(world) for step in _noted_by(store, rank, start)}


def _noted_by(store: Store, rank: int, start: Position) -> set[int]:
    """The tickets that learner `rank` has recorded, and all those below the records it has removed."""
    key = _KEPT.format(rank)
    kept = store.get(key) if store.check([key]) else b"0 0"
    chunk, below = (int(each) for each in kept.split())
    found = {*range(start.next_ticket.step, below), *(each.step for each in start.outstanding if each.step < below)}
    while store.check([_DONE.format(rank, chunk)]):
        found.update(int(step) for step in store.get(_DONE.format(rank, chunk)).split())
        chunk += 1
    is_unchanged = kept == (store.get(key) if store.check([key]) else b"0 0")
    return found if is_unchanged else _noted_by(store, rank, start)  # a learner presumed lost may still remove records
