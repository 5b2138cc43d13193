"""How learners go on when a view of them is over: what was done in it, and whose state counts.

Each learner notes in the store which tickets it has done. The first of the members of the next view that has a state
reads these notes, so that what a lost learner had done counts, and what it had not is handed out again. It writes a
plan for all: how far the run has come, and who takes the state of whom.

Learners that have one model between them may have been lost in the middle of a step: those who had come one step less
far than the newest then take its state. Others keep their own; who is new takes that of a neighbour.
"""

import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict

from torch.distributed.distributed_c10d import PrefixStore, Store

from starling.engines.processes.handshake import await_keys
from starling.training.job import Job
from starling.training.membership import Membership
from starling.training.succession import Past, Plan, first_with_a_state, plan_after
from starling.workload import Position, Ticket

LookAround = Callable[[], None]
_PLAN, _CAME = "plan", "came/{}"
_DONE, _REACHED, _KEPT = "done/{}/{}", "done/{}/reached", "done/{}/kept"
_CHUNK = 64
"""Tickets that a learner notes under one key."""


def begin(store: Store, rank: int, plan: Plan) -> None:
    """Write down how the first view begins; `store` is the view's."""
    if rank == 0:
        store.set(_PLAN, plan.encode())


class DoneNotes:
    """The notes that learner `rank` of a view keeps in the store: which tickets it has done.

    Learners are given tickets in the order of their numbers, and do them in that order. So whatever lies below the
    number that all `num_workers` learners have reached is done, and the notes of it are removed.
    """

    def __init__(self, store: Store, rank: int, num_workers: int) -> None:
        self._store = store
        self._rank, self._num_workers = rank, num_workers
        self._num_noted = 0
        self._chunks: deque[tuple[int, int]] = deque()  # those that are full: each with the last number in it

    def add(self, ticket: Ticket) -> None:
        """Learner `rank` has done a mini-batch: it is in its weights."""
        chunk, place = divmod(self._num_noted, _CHUNK)
        self._store.append(_DONE.format(self._rank, chunk), f"{ticket.step} ")  # type: ignore[attr-defined]
        self._num_noted += 1
        if place == _CHUNK - 1:
            self._chunks.append((chunk, ticket.step))
            self._store.set(_REACHED.format(self._rank), str(ticket.step))
            self._forget()

    def _forget(self) -> None:
        keys = [_REACHED.format(rank) for rank in range(self._num_workers)]
        if not self._store.check(keys):  # somebody has done few
            return
        below = min(int(number) for number in self._store.multi_get(keys))
        full = [chunk for chunk, last in self._chunks if last < below]
        if full:  # say so first: who reads meanwhile finds each of them or that they are done
            self._store.set(_KEPT.format(self._rank), f"{full[-1] + 1} {below}")
        for chunk in full:
            self._store.delete_key(_DONE.format(self._rank, chunk))
            self._chunks.popleft()


def noted(store: Store, world: int, start: Position) -> set[int]:
    """The tickets that the learners of a view, which began at `start`, have noted as done."""
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
    return found if is_unchanged else _noted_by(store, rank, start)  # one that was taken for lost still removes notes


def agree(
    root: Store,
    view: Membership,
    rank: int,
    past: Past,
    job: Job,
    timeout_seconds: float,
    look_around: LookAround,
    on_plan: Callable[[Plan], None],
) -> Plan:
    """The plan for a view that follows another. Who makes it calls `on_plan` before the others hear of it."""
    store, world = PrefixStore(view.key, root), len(view.members)
    store.set(_CAME.format(rank), json.dumps(asdict(past)))
    keys = [_CAME.format(other) for other in range(world)]
    await_keys(store, keys, timeout_seconds, look_around, "all to come to the next view", range(world))
    members = [Past(**json.loads(store.get(key))) for key in keys]
    if rank == first_with_a_state(members):
        plan = _plan(root, members, job)
        on_plan(plan)
        store.set(_PLAN, plan.encode())
    await_keys(store, [_PLAN], timeout_seconds, look_around, "the plan of the next view")
    return Plan.decode(store.get(_PLAN))


def _plan(root: Store, members: Sequence[Past], job: Job) -> Plan:
    last = max(each.view for each in members if each.view is not None)
    store = PrefixStore(Membership(last, ()).key, root)
    before = Plan.decode(store.get(_PLAN))
    return plan_after(before, members, job, lambda: noted(store, before.world, before.position))
