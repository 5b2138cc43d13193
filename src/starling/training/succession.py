"""How learners continue after a membership change: which of them, from where in the data, and with whose state."""

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import Any

import torch

from starling.checkpoint.state import LearnerState
from starling.errors import ConfigError, PeerLost
from starling.training.faults import FaultsOf
from starling.training.job import Job, Tally
from starling.training.membership import Membership
from starling.training.stragglers import Delays
from starling.training.tickets import SyncGroupTickets, position_after
from starling.workload import Position, Ticket


@dataclass(frozen=True)
class Past:
    """What a member of a new membership has done before."""

    membership: int | None = None
    """The number of the last membership it computed in; None: it is new, and has no state."""
    num_done: int = 0
    """Mini-batches that it did in that membership."""
    minutes: float = 0.0
    """Time spent training."""


@dataclass(kw_only=True)
class Life:
    """What one learner carries from membership to membership."""

    name: int
    delays: Delays
    """Injected slowness."""
    faults: FaultsOf
    """Injected faults."""
    state: LearnerState | None = None
    """Its state when it left the last membership, or when it was resumed; None: it has none yet."""
    past: Past = field(default_factory=Past)
    tally: Tally | None = None
    """What it had counted of an epoch that a membership change interrupted."""

    @staticmethod
    def begin(job: Job, name: int, is_new: bool) -> "Life":
        """The life of a learner of a job; one that is new, or was restarted, suffers none of the injected faults."""
        return Life(
            name=name,
            delays=Delays(job.stragglers, job.seed, name),
            faults=FaultsOf(() if is_new else job.faults, name),
        )


@dataclass(frozen=True)
class Plan:
    """How the members of a membership begin."""

    world: int
    position: Position
    minutes: float
    """Time spent training, the same for all."""
    source: int | None = None
    """The rank whose state others take; None: all have their own."""
    takers: tuple[int, ...] = ()
    """The ranks that take it."""

    def encode(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str | bytes) -> "Plan":
        """The inverse of `encode`."""
        read: dict[str, Any] = json.loads(text)
        position = read.pop("position")
        outstanding = tuple(Ticket(**each) for each in position["outstanding"])
        takers = tuple(read.pop("takers"))
        return cls(position=Position(Ticket(**position["next_ticket"]), outstanding), takers=takers, **read)

    def state(self, rank: int, own: LearnerState | None) -> LearnerState:
        """The state with which learner `rank` begins. One that has none gets its weights from `source` later."""
        own = own or LearnerState(rank, self.world, self.position, self.minutes, torch.empty(0), {}, {})
        return replace(
            own, rank=rank, world=self.world, position=self.position, minutes=self.minutes, epochs_ended=None
        )


def next_membership(job: Job, before: Membership, change: Membership, is_ordered: bool = False) -> Membership:
    """The membership that follows `before` when `change` lists the living: those that the strategy can continue with.

    `Strategy.successors` orders their ranks, unless `is_ordered`: then `change` has them in order already, perhaps
    computed through several memberships, not all of which this learner has heard of. Raises PeerLost when the strategy
    cannot continue.
    """
    lost = [name for name in before.members if name not in change.members]
    came = [name for name in change.members if name not in before.members]
    try:
        if not is_ordered:
            return replace(change, members=job.strategy.successors(job.options, before.members, lost, came))
        ranks = job.strategy.survivors(job.options, len(before.members), [before.members.index(name) for name in lost])
        leaving = set(before.members) - {before.members[rank] for rank in ranks}
        members = tuple(name for name in change.members if name not in leaving)
        job.validate(len(members))
    except (ConfigError, PeerLost) as error:
        raise PeerLost(f"{change.reason}; {job.strategy.name} cannot continue without: {error}") from error
    return replace(change, members=members)


def plan_after(before: Plan, members: Sequence[Past], job: Job, all_noted: Callable[[], Collection[int]]) -> Plan:
    """The plan of a membership whose members have these pasts, by rank. `before` is the plan of the last membership
    that any of them computed in, and `all_noted` gives the tickets that were done in it."""
    last = max(each.membership for each in members if each.membership is not None)
    newest = max(
        range(len(members)), key=lambda rank: (members[rank].membership == last, members[rank].num_done, -rank)
    )
    if job.strategy.has_one_model:
        done: Collection[int] = _done_by_all(before, members[newest].num_done, job)
        current = [each.membership == last and each.num_done == members[newest].num_done for each in members]
    else:
        done = all_noted()
        newest = first_with_a_state(members)
        current = [each.membership is not None for each in members]
    takers = tuple(rank for rank, is_current in enumerate(current) if not is_current)
    return Plan(
        world=len(members),
        position=position_after(before.position, job.workload, done),
        minutes=max(each.minutes for each in members),
        source=newest if takers else None,
        takers=takers,
    )


def first_with_a_state(members: Sequence[Past]) -> int:
    """The lowest rank that has computed before; PeerLost if none has."""
    with_state = [rank for rank, each in enumerate(members) if each.membership is not None]
    if not with_state:
        raise PeerLost("learners were lost before any had begun; start again")
    return with_state[0]


def _done_by_all(before: Plan, num_portions: int, job: Job) -> set[int]:
    """The tickets in the first portions of a membership, which all learners have computed."""
    tickets = SyncGroupTickets(job.workload, before.position, job.budget, before.world)
    return {tickets.ticket(*each).step for each in product(range(num_portions), range(before.world))}
