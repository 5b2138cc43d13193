"""The assignment of mini-batches to learners: the sequence of tickets, limited by the budget.

The tickets of a run form one sequence: first the tickets that an earlier run left outstanding, then the other tickets
in the order of the epochs. Sync groups claim portions of consecutive tickets, even across the end of an epoch. A
portion contains one ticket for each learner of the group, or as many as the learner's batch share. Under a synchronous
strategy all learners form one sync group; under an asynchronous strategy each learner is a sync group of its own.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from starling.budget import Budget, Progress
from starling.errors import DataError
from starling.workload import Position, Ticket, Workload


class TicketSequence:
    """All tickets from the epoch of `start` onwards, by number (`Ticket.step`). The sequence is a pure function of the
    workload and `start`."""

    def __init__(self, workload: Workload[Any], start: Ticket) -> None:
        self._workload = workload
        self._num_batches: dict[int, int] = {}
        self._first_epoch = start.epoch
        # the number of the first ticket of each known epoch, and of the first ticket after these epochs
        self._first_steps = [start.step - start.index]

    def num_batches(self, epoch: int) -> int:
        if epoch not in self._num_batches:
            found = self._workload.num_batches(epoch)
            if found < 1:
                raise DataError(f"epoch {epoch} has {found} mini-batches; it needs at least 1; check the training data")
            self._num_batches[epoch] = found
        return self._num_batches[epoch]

    def __getitem__(self, step: int) -> Ticket:
        place = self._place(step)
        return Ticket(self._first_epoch + place, step - self._first_steps[place], step)

    def epochs_before(self, step: int) -> float:
        """Return the number of passes over the data before ticket `step`. Epochs before the epoch of `start` are
        assumed to have the same length as that epoch."""
        if step < self._first_steps[0]:
            return self._first_epoch - (self._first_steps[0] - step) / self.num_batches(self._first_epoch)
        place = self._place(step)
        first, following = self._first_steps[place : place + 2]
        return self._first_epoch + place + (step - first) / (following - first)

    def _place(self, step: int) -> int:
        """Return the number of epochs from the first known epoch to the epoch of a ticket."""
        while step >= self._first_steps[-1]:
            size = self.num_batches(self._first_epoch + len(self._first_steps) - 1)
            self._first_steps.append(self._first_steps[-1] + size)
        return bisect_right(self._first_steps, step) - 1


def position_after(start: Position, workload: Workload[Any], done: "DoneTickets") -> Position:
    """Return the position of a run that began at `start`, given the tickets that are done.

    Only tickets after the first undone ticket are examined, because a membership may last for millions of tickets.
    """
    sequence = TicketSequence(workload, start.next_ticket)
    handed_out = [*start.outstanding, *(sequence[step] for step in range(done.below, done.beyond))]
    return Position(sequence[done.beyond], tuple(ticket for ticket in handed_out if ticket.step not in done))


class DoneTickets:
    """The numbers of the done tickets after a position. Memory is needed only for tickets after the first undone
    ticket."""

    def __init__(self, start: Position) -> None:
        self._start = start
        self._first = self.below = start.next_ticket.step  # all from `_first` to `below` - 1 are done
        """First ticket, at or after the position, that is not done."""
        self.others: set[int] = set()
        """Done tickets that are stored individually."""

    def add(self, step: int) -> None:
        """Record that ticket `step` is done."""
        if step not in self:
            self.others.add(step)
        self._advance()

    def add_all_below(self, step: int) -> None:
        """Record that all tickets before `step` are done."""
        self.below = max(self.below, step)
        self.others = {each for each in self.others if not self._first <= each < self.below}
        self.others.update(each.step for each in self._start.outstanding if each.step < step)
        self._advance()

    def _advance(self) -> None:
        while self.below in self.others:
            self.others.remove(self.below)
            self.below += 1

    @property
    def beyond(self) -> int:
        """The first ticket after the position such that neither this ticket nor any later ticket is done."""
        return max([self.below, *(step + 1 for step in self.others)])

    def __contains__(self, step: object) -> bool:
        return step in self.others or step in range(self._first, self.below)


class SyncGroupTickets:
    """The tickets of a run in portions. For each learner of a sync group, a portion contains as many tickets as the
    learner's batch share, which is 1 by default. Learners that compute each mini-batch together have the same tickets.
    A learner that simulates the ranks of an island has a ticket for each rank.

    The budget in steps and epochs is checked before each portion, so that a sync group ends together, without
    communication and after a whole portion. A budget in minutes is checked elsewhere, on the engine's clock.
    """

    def __init__(
        self,
        workload: Workload[Any],
        start: Position,
        budget: Budget,
        sync_group_size: int,
        shares: Sequence[int] = (),
        learners_per_ticket: int = 1,
        ranks_per_learner: int = 1,
    ) -> None:
        self.sequence = TicketSequence(workload, start.next_ticket)
        self.ranks_per_learner = ranks_per_learner
        self.shares = tuple(shares) or (ranks_per_learner,) * sync_group_size
        """Number of tickets of each member of the sync group in a portion."""
        self._start, self._num_done_before = start, start.num_done
        self._budget, self._num_parts, self._learners_per_ticket = budget, workload.num_parts, learners_per_ticket
        groups = [range(*each) for each in pairwise(accumulate(self.shares[::learners_per_ticket], initial=0))]
        self.places = [groups[member // learners_per_ticket] for member in range(sync_group_size)]
        """Positions of each member's tickets within a portion."""
        self.portion_size = groups[-1].stop
        """Number of tickets in a portion."""
        self._outstanding_at = {ticket.step: place for place, ticket in enumerate(start.outstanding)}
        self._end: int | None = None

    def end_at(self, number: int) -> None:
        """End the run before portion `number`, as if the budget were spent there. Any thread may call this method."""
        self._end = number

    def weight(self, member: int) -> float:
        """Return the weight of a member's tickets if all tickets have the same weight. The mean over the members is
        1."""
        return len(self.shares) * self.shares[member] / sum(self.shares)

    def tickets(self, number: int, member: int) -> tuple[Ticket, ...]:
        """Return the tickets of a `member`, given by its index in the sync group, in portion `number`."""
        return tuple(self._ticket_at(number * self.portion_size + place) for place in self.places[member])

    def parts(self, learner: int) -> list[int]:
        """Return, for each of a learner's tickets in a portion, the part of divided data from which it comes. This is
        the learner's own part or, if the learner simulates an island, the part of each rank."""
        first = learner // self._learners_per_ticket * self.ranks_per_learner
        return [(first + place % self.ranks_per_learner) % self._num_parts for place in range(max(self.shares))]

    def drawn(self, number: int, member: int) -> tuple[Ticket, ...]:
        """Return the tickets of a member that has drawn portion `number`. There are none once the budget is spent."""
        return () if self.is_beyond(number) else self.tickets(number, member)

    def ticket(self, number: int, member: int = 0) -> Ticket:
        """Return the first ticket of a `member` in portion `number`."""
        return self._ticket_at(number * self.portion_size + self.places[member].start)

    def _ticket_at(self, place: int) -> Ticket:
        outstanding = self._start.outstanding
        if place < len(outstanding):
            return outstanding[place]
        return self.sequence[self._start.next_ticket.step + place - len(outstanding)]

    def number_of(self, ticket: Ticket) -> int:
        """Return the number of the portion that contains a ticket."""
        beyond = ticket.step - self._start.next_ticket.step + len(self._start.outstanding)
        return self._outstanding_at.get(ticket.step, beyond) // self.portion_size

    def position(self, number: int, undone: Iterable[int] = ()) -> Position:
        """Return the position of the run when the portions below `number`, except those in `undone`, are done."""
        num_given = number * self.portion_size
        outstanding = self._start.outstanding
        first_places = [each * self.portion_size for each in sorted(undone)]
        returned = [self._ticket_at(first + place) for first in first_places for place in range(self.portion_size)]
        return Position(
            self.sequence[self._start.next_ticket.step + max(0, num_given - len(outstanding))],
            tuple(sorted((*returned, *outstanding[num_given:]), key=lambda ticket: ticket.step)),
        )

    def num_before(self, number: int) -> int:
        """Return the number of done mini-batches when exactly the portions below `number` are done."""
        return self._num_done_before + number * self.portion_size

    def around(self, number: int, minutes: float) -> tuple[Progress, Progress]:
        """Return the progress of the run before and after portion `number`, when exactly the portions below it have
        been claimed."""
        return self.progress(number, minutes), self.progress(number + 1, minutes)

    def progress(self, number: int, minutes: float) -> Progress:
        """Return the progress of the run when exactly the portions below `number` have been claimed."""
        num_done = self.num_before(number)
        return Progress(num_done, self.sequence.epochs_before(num_done), minutes)

    def is_beyond(self, number: int) -> bool:
        """Return whether the budget is spent before portion `number`, unless the portion begins with a re-issued ticket
        that is within the budget."""
        if self._end is not None and number >= self._end:
            return True
        if not self._budget.is_spent(self.progress(number, minutes=0.0)):
            return False
        step = self.ticket(number).step
        if step not in self._outstanding_at:
            return True
        return self._budget.is_spent(Progress(step, self.sequence.epochs_before(step), minutes=0.0))

    def take(self, numbers: Iterable[int]) -> Iterator[Ticket]:
        """Yield the tickets of all members in these portions, until the budget is spent."""
        for number in numbers:
            if self.is_beyond(number):
                return
            for member in range(len(self.places)):
                yield from self.tickets(number, member)

    def handed_out(self, num_drawn: int) -> int:
        """Return the number of portions among the first `num_drawn` that are within the budget."""
        while num_drawn > 0 and self.is_beyond(num_drawn - 1):
            num_drawn -= 1
        return num_drawn


@dataclass(frozen=True)
class Barrier:
    """A checkpoint barrier, at which all learners save their state before portion `number`."""

    number: int
    ended: tuple[int, ...] = ()
    """Epochs that end at this barrier."""


class Barriers:
    """The checkpoint barriers of a run, in order. They are at epoch ends, after every `every` mini-batches, and where
    learners agree on a barrier.

    A learner passes a barrier when it claims a portion after the barrier. At that time it has done all its mini-batches
    before the barrier, so once all learners have passed, all tickets before the barrier are done. In a synchronous run
    no later ticket is done. The state of an asynchronous learner may include other learners' work after the barrier;
    `starling.training.succession` describes how this is handled.
    """

    def __init__(self, tickets: SyncGroupTickets, every: int | None = None) -> None:
        self._tickets = tickets
        self._every = every
        self._agreed: set[int] = set()
        self._next = 0  # the first portion that has not been examined
        self.epoch = tickets.ticket(0).epoch
        """First epoch that has not ended at a barrier."""

    def add(self, number: int) -> None:
        """Add a barrier before portion `number`, which no learner has claimed yet. Any thread may call this method."""
        self._agreed.add(number)

    def end_at(self, number: int) -> None:
        """End the run before portion `number`, and drop a barrier at that portion on which learners have agreed."""
        self._agreed.discard(number)

    def following(self) -> int:
        """Return the number of the portion before which the next barrier is."""
        size = 1
        while (found := self._first_barrier(range(self._next + 1, self._next + 1 + size))) is None:
            size *= 2
        return found

    def until(self, number: int) -> Iterator[Barrier]:
        """Yield the barriers up to portion `number` that have not been returned before."""
        while self._next < number:
            following = self._first_barrier(range(self._next + 1, number + 1))
            self._next = number if following is None else following
            self._agreed.difference_update([each for each in list(self._agreed) if each <= self._next])
            if following is not None:
                ended = tuple(range(self.epoch, self._tickets.ticket(following).epoch))
                self.epoch += len(ended)
                yield Barrier(following, ended)

    def _first_barrier(self, numbers: range) -> int | None:
        """Find the first barrier among consecutive portions by binary search."""
        agreed = [each for each in list(self._agreed) if each in numbers and not self._tickets.is_beyond(each)]
        first = len(numbers)
        if self._every is not None:
            first = bisect_right(numbers, self._periods_before(numbers[0] - 1), key=self._periods_before)
        if self._tickets.ticket(numbers[-1]).epoch > self.epoch:
            epoch_of = lambda number: self._tickets.ticket(number).epoch  # noqa: E731
            first = min(first, bisect_right(numbers, self.epoch, key=epoch_of))
        return min([*agreed, *numbers[first : first + 1]], default=None)

    def _periods_before(self, number: int) -> int:
        """Return the number of whole multiples of `every` mini-batches before a portion."""
        return 0 if self._every is None else self._tickets.num_before(number) // self._every
