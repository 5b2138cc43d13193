"""How learners go on when some are lost or come: who goes on, how far the run has come, and who takes whose state."""

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from starling.errors import ConfigError, PeerLost
from starling.training.job import Job
from starling.training.membership import Membership
from starling.training.tickets import SyncGroupTickets, position_after
from starling.workload import Position, Ticket


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
    position: Position
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
        position = read.pop("position")
        outstanding = tuple(Ticket(**each) for each in position["outstanding"])
        takers = tuple(read.pop("takers"))
        return cls(position=Position(Ticket(**position["next_ticket"]), outstanding), takers=takers, **read)


def next_membership(job: Job, view: Membership, change: Membership, is_ordered: bool = False) -> Membership:
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
        job.validate(len(members))
    except (ConfigError, PeerLost) as error:
        raise PeerLost(f"{change.reason}; {job.strategy.name} cannot go on without: {error}") from error
    return replace(change, members=members)


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
        newest = first_with_a_state(members)
        current = [each.view is not None for each in members]
    takers = tuple(rank for rank, is_current in enumerate(current) if not is_current)
    return Plan(
        world=len(members),
        position=position_after(before.position, job.workload, done),
        minutes=max(each.minutes for each in members),
        source=newest if takers else None,
        takers=takers,
    )


def first_with_a_state(members: Sequence[Past]) -> int:
    """The first of these members, by rank, that has computed before; PeerLost if none has."""
    with_state = [rank for rank, each in enumerate(members) if each.view is not None]
    if not with_state:
        raise PeerLost("learners were lost before anybody had begun; start again")
    return with_state[0]


def _done_by_all(before: Plan, num_portions: int, job: Job) -> set[int]:
    """The tickets of a view's first portions, which all learners have computed."""
    tickets = SyncGroupTickets(job.workload, before.position, job.budget, before.world)
    return {tickets.ticket(*each).step for each in product(range(num_portions), range(before.world))}
