"""The mini-batches of the learners of a virtual membership, and what its sync groups agree on at each claim."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Generic, TypeVar

from starling.training.job import Job
from starling.training.loading import Loaded, Loader
from starling.training.succession import MembershipStart
from starling.training.tickets import DoneTickets, SyncGroupTickets
from starling.workload import Ticket

T = TypeVar("T")


class SyncGroupWords(Generic[T]):
    """What the first member of a sync group finds at a claim is what all its `size` members get, each once."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._words: dict[tuple[int, int], tuple[T, int]] = {}

    def of(self, sync_group: int, claim: int, find: Callable[[], T]) -> T:
        """What a member gets at a claim; forgotten once all members have made that claim."""
        word, num_to_come = (
            self._words.pop((sync_group, claim)) if (sync_group, claim) in self._words else (find(), self._size)
        )
        if num_to_come > 1:
            self._words[sync_group, claim] = word, num_to_come - 1
        return word

    def __len__(self) -> int:
        return len(self._words)


class MembershipBatches:
    """The tickets of a membership and their mini-batches, for all its learners; `done` are the tickets done in it."""

    def __init__(self, job: Job, world: int, plan: MembershipStart, loader: Loader, clock: Callable[[], float]) -> None:
        size = job.sync_group_size(world)
        self.done = DoneTickets(plan.position)
        self.draws: SyncGroupWords[int] = SyncGroupWords(size)
        self.times: SyncGroupWords[float] = SyncGroupWords(size)
        self.clock = clock
        self._workload = job.workload
        self._num_drawn = 0  # portions that all sync groups together have drawn
        self.shares = plan.shares
        self._tickets = SyncGroupTickets(job.workload, plan.position, job.budget, size, plan.shares)
        self._batches = loader.load(self._tickets.take(count(), members=range(size)))
        self._loaded: dict[int, Loaded] = {}

    def next_number(self) -> int:
        """The number of the next portion that no sync group has."""
        self._num_drawn += 1
        return self._num_drawn - 1

    def load(self, ticket: Ticket) -> Loaded:
        """A ticket with its mini-batch. Those of undivided data are loaded in order and kept until taken."""
        if self._workload.num_parts > 1:
            return ticket, self._workload.load(ticket)
        while ticket.step not in self._loaded:
            loaded = next(self._batches)
            self._loaded[loaded[0].step] = loaded
        return self._loaded.pop(ticket.step)

    @property
    def num_portions(self) -> int:
        """The number of drawn portions that are within the budget."""
        return self._tickets.handed_out(self._num_drawn)


class VirtualBatches:
    """The `BatchSource` of one virtual learner."""

    def __init__(
        self, shared: MembershipBatches, tickets: SyncGroupTickets, sync_group: range, rank: int, part: int
    ) -> None:
        self._shared, self._tickets = shared, tickets
        self._group, self._member, self._part = sync_group.start, rank - sync_group.start, part

    def next(self, claim: int) -> Sequence[Loaded] | None:
        number = self._shared.draws.of(self._group, claim, self._shared.next_number)
        if self._tickets.is_beyond(number):
            return None
        return [
            self._shared.load(ticket if ticket.part == self._part else replace(ticket, part=self._part))
            for ticket in self._tickets.tickets(number, self._member)
        ]

    def agreed_seconds(self, claim: int) -> float:
        """The time at which the first member of the sync group made the claim."""
        return self._shared.times.of(self._group, claim, self._shared.clock)

    def reach(self, portion: int) -> None:
        """There are no checkpoint barriers to agree on."""

    def done(self, ticket: Ticket) -> None:
        self._shared.done.add(ticket.step)
