"""Notes in the store of which tickets each learner has done, so that what a lost learner had done counts."""

from collections import deque

from torch.distributed.distributed_c10d import Store

from starling.workload import Position, Ticket

_DONE, _REACHED, _KEPT = "done/{}/{}", "done/{}/reached", "done/{}/kept"
_CHUNK = 64
"""Tickets that a learner notes under one key."""


class DoneNotes:
    """The notes of learner `rank` of a membership: which tickets it has done.

    Learners get tickets in the order of their numbers, and do them in that order. So all tickets below the number that
    all `num_workers` learners have reached are done, and the notes about them are removed.
    """

    def __init__(self, store: Store, rank: int, num_workers: int) -> None:
        self._store = store
        self._rank, self._num_workers = rank, num_workers
        self._num_noted = 0
        self._chunks: deque[tuple[int, int]] = deque()  # the full ones, each with its last number

    def add(self, ticket: Ticket) -> None:
        """The learner has done a mini-batch: its gradient is in the weights."""
        chunk, place = divmod(self._num_noted, _CHUNK)
        self._store.append(_DONE.format(self._rank, chunk), f"{ticket.step} ")  # type: ignore[attr-defined]
        self._num_noted += 1
        if place == _CHUNK - 1:
            self._chunks.append((chunk, ticket.step))
            self._store.set(_REACHED.format(self._rank), str(ticket.step))
            self._forget()

    def _forget(self) -> None:
        keys = [_REACHED.format(rank) for rank in range(self._num_workers)]
        if not self._store.check(keys):  # some learner has done few
            return
        below = min(int(number) for number in self._store.multi_get(keys))
        full = [chunk for chunk, last in self._chunks if last < below]
        if full:  # first of all, so that a concurrent reader finds each chunk, or that its tickets are done
            self._store.set(_KEPT.format(self._rank), f"{full[-1] + 1} {below}")
        for chunk in full:
            self._store.delete_key(_DONE.format(self._rank, chunk))
            self._chunks.popleft()


def noted(store: Store, world: int, start: Position) -> set[int]:
    """The tickets that the learners of a membership, which began at `start`, have noted as done."""
    return {step for rank in range(world) for step in _noted_by(store, rank, start)}


def _noted_by(store: Store, rank: int, start: Position) -> set[int]:
    """What learner `rank` has noted, and what was done where it has removed notes."""
    key = _KEPT.format(rank)
    kept = store.get(key) if store.check([key]) else b"0 0"
    chunk, below = (int(each) for each in kept.split())
    found = {*range(start.next_ticket.step, below), *(each.step for each in start.outstanding if each.step < below)}
    while store.check([_DONE.format(rank, chunk)]):
        found.update(int(step) for step in store.get(_DONE.format(rank, chunk)).split())
        chunk += 1
    is_unchanged = kept == (store.get(key) if store.check([key]) else b"0 0")
    return found if is_unchanged else _noted_by(store, rank, start)  # a learner taken for lost still removes notes
