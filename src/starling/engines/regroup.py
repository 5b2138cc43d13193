"""How learners go on when a view of them is over: what was done in it, and whose state counts.

Each learner notes in the store which tickets it has done. The first of the members of the next view that has a state
reads these notes, so that what a lost learner had done counts, and what it had not is handed out again. It writes a
plan for all: how far the run has come, and who takes the state of whom.

Learners that have one model between them may have been lost in the middle of a step: those who had come one step less
far than the newest then take its state. Others keep their own; who is new takes that of a neighbour.
"""

import json
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store

from starling.engines.greeting import await_keys
from starling.engines.job import Job
from starling.engines.membership import View
from starling.engines.tickets import TeamTickets, standing_after
from starling.errors import ConfigError, PeerLost
from starling.workload import Standing, Ticket

LookAround = Callable[[], None]
_PLAN, _CAME = "plan", "came/{}"
_DONE, _REACHED, _KEPT = "done/{}/{}", "done/{}/reached", "done/{}/kept"
_CHUNK = 64
"""Tickets that a learner notes under one key."""


@dataclass(frozen=True)
class Past:
    """What a member of a new view comes with."""

    view: int | None = None
    """The view that it last computed in; None: it is new, and has no state."""
    num_done: int = 0
    """Mini-batches that it has done in that view."""
    minutes: float = 0.0
    """Time spent training."""


@dataclass(frozen=True)
class Plan:
    """How the members of a view begin."""

    world: int
    standing: Standing
    minutes: float
    """Time spent training, the same for all."""
    source: int | None = None
    """Whose state others take, by rank; None: nobody needs any."""
    takers: tuple[int, ...] = ()
    """Who takes it."""

    def encode(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str | bytes) -> "Plan":
        """From what `encode` gave."""
        read: dict[str, Any] = json.loads(text)
        standing = read.pop("standing")
        unfinished = tuple(Ticket(**each) for each in standing["unfinished"])
        takers = tuple(read.pop("takers"))
        return cls(standing=Standing(Ticket(**standing["position"]), unfinished), takers=takers, **read)


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


def noted(store: Store, world: int, start: Standing) -> set[int]:
    """The tickets that the learners of a view, which began at `start`, have noted as done."""
    return {step for rank in range(world) for step in _noted_by(store, rank, start)}


def _noted_by(store: Store, rank: int, start: Standing) -> set[int]:
    """What learner `rank` has noted, and what was done where it has removed notes."""
    key = _KEPT.format(rank)
    kept = store.get(key) if store.check([key]) else b"0 0"
    chunk, below = (int(each) for each in kept.split())
    found = {*range(start.position.step, below), *(each.step for each in start.unfinished if each.step < below)}
    while store.check([_DONE.format(rank, chunk)]):
        found.update(int(step) for step in store.get(_DONE.format(rank, chunk)).split())
        chunk += 1
    is_unchanged = kept == (store.get(key) if store.check([key]) else b"0 0")
    return found if is_unchanged else _noted_by(store, rank, start)  # one that was taken for lost still removes notes


def agree(
    root: Store,
    view: View,
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
    if rank == _first_with_a_state(members):
        plan = _plan(root, members, job)
        on_plan(plan)
        store.set(_PLAN, plan.encode())
    await_keys(store, [_PLAN], timeout_seconds, look_around, "the plan of the next view")
    return Plan.decode(store.get(_PLAN))


def who_goes_on(job: Job, view: View, change: View, is_ordered: bool = False) -> View:
    """The view that follows another when `change` says who lives: those of them whom the strategy can go on with.

    Their ranks are as `Strategy.successors` has it, or as `change` has it where `is_ordered`: somebody has computed
    that already, perhaps from view to view, of which a learner may not have heard of each. Raises PeerLost when the
    strategy can go on with nobody.
    """
    lost = [name for name in view.members if name not in change.members]
    came = [name for name in change.members if name not in view.members]
    try:
        if not is_ordered:
            return replace(change, members=job.strategy.successors(job.options, view.members, lost, came))
        ranks = job.strategy.survivors(job.options, len(view.members), [view.members.index(name) for name in lost])
        leaving = set(view.members) - {view.members[rank] for rank in ranks}
        members = tuple(name for name in change.members if name not in leaving)
        job.teams(len(members))
    except (ConfigError, PeerLost) as error:
        raise PeerLost(f"{change.reason}; {job.strategy.name} cannot go on without: {error}") from error
    return replace(change, members=members)


def _plan(root: Store, members: Sequence[Past], job: Job) -> Plan:
    last = max(each.view for each in members if each.view is not None)
    store = PrefixStore(View(last, ()).key, root)
    before = Plan.decode(store.get(_PLAN))
    return plan_after(before, members, job, lambda: noted(store, before.world, before.standing))


def plan_after(before: Plan, members: Sequence[Past], job: Job, all_noted: Callable[[], Collection[int]]) -> Plan:
    """The plan of a view whose members, by rank, come with these pasts. `before` is that of the last view that any of
    them computed in, and `all_noted` tells the tickets that were done in it."""
    last = max(each.view for each in members if each.view is not None)
    newest = max(range(len(members)), key=lambda rank: (members[rank].view == last, members[rank].num_done, -rank))
    if job.strategy.has_one_model:
        done: Collection[int] = _done_by_all(before, members[newest].num_done, job)
        current = [each.view == last and each.num_done == members[newest].num_done for each in members]
    else:
        done = all_noted()
        newest = _first_with_a_state(members)
        current = [each.view is not None for each in members]
    takers = tuple(rank for rank, is_current in enumerate(current) if not is_current)
    return Plan(
        world=len(members),
        standing=standing_after(before.standing, job.workload, done),
        minutes=max(each.minutes for each in members),
        source=newest if takers else None,
        takers=takers,
    )


def _first_with_a_state(members: Sequence[Past]) -> int:
    with_state = [rank for rank, each in enumerate(members) if each.view is not None]
    if not with_state:
        raise PeerLost("learners were lost before anybody had begun; start again")
    return with_state[0]


def _done_by_all(before: Plan, num_portions: int, job: Job) -> set[int]:
    """The tickets of a view's first portions, which all learners have computed."""
    tickets = TeamTickets(job.workload, before.standing, job.budget, before.world)
    return {tickets.ticket(*each).step for each in product(range(num_portions), range(before.world))}
