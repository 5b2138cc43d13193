"""Which learner computes which mini-batch: the tickets in order, and the budget that ends them.

The tickets of a run are one stream: first those that an earlier run left outstanding, then all others in the order of
the epochs. Sync groups claim portions: as many consecutive tickets as the group has learners, one for each, even across
the end of an epoch. Under a synchronous strategy all learners are one sync group; under an asynchronous one each
learner is its own.
"""

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from starling.budget import Budget, Progress
from starling.errors import DataError
from starling.workload import Position, Ticket, Workload


class TicketSequence:
    """All tickets from the epoch of `start` on, by their number (`Ticket.step`). A pure function of the workload."""

    def __init__(self, workload: Workload[Any], start: Ticket) -> None:
        self._workload = workload
        self._first_epoch = start.epoch
        self._first_steps = [start.step - start.index]  # the number of each epoch's first ticket

    def num_batches(self, epoch: int) -> int:
        found = self._workload.num_batches(epoch)
        if found < 1:
            raise DataError(f"epoch {epoch} has {found} mini-batches; it needs at least 1: check the training data")
        return found

    def __getitem__(self, step: int) -> Ticket:
        while step >= (following := self._first_steps[-1] + self.num_batches(self._last_epoch)):
            self._first_steps.append(following)
        place = bisect_right(self._first_steps, step) - 1
        return Ticket(self._first_epoch + place, step - self._first_steps[place], step)

    def epochs_before(self, step: int) -> float:
        """Passes over the data before ticket `step`; before the first epoch here, as if all had been like it."""
        if step < self._first_steps[0]:
            return self._first_epoch - (self._first_steps[0] - step) / self.num_batches(self._first_epoch)
        ticket = self[step]
        return ticket.epoch + ticket.index / self.num_batches(ticket.epoch)

    @property
    def _last_epoch(self) -> int:
        return self._first_epoch + len(self._first_steps) - 1


def position_after(start: Position, workload: Workload[Any], done: Collection[int]) -> Position:
    """The position of a run that began at `start`, when the tickets with these numbers are done."""
    sequence = TicketSequence(workload, start.next_ticket)
    first, beyond = start.next_ticket.step, max([start.next_ticket.step, *(step + 1 for step in done)])
    handed_out = [*start.outstanding, *(sequence[step] for step in range(first, beyond))]
    return Position(sequence[beyond], tuple(ticket for ticket in handed_out if ticket.step not in done))


class DoneTickets(Collection[int]):
    """The numbers of the done tickets after a position. Its memory grows with the number of tickets between the first
    that is not done and the last that is."""

    def __init__(self, start: Position) -> None:
        self._first = self._below = start.next_ticket.step  # all from the first to below this are done
        self._others: set[int] = set()

    def add(self, step: int) -> None:
        """Ticket `step` is done."""
        self._others.add(step)
        while self._below in self._others:
            self._others.remove(self._below)
            self._below += 1

    @property
    def num_kept(self) -> int:
        """The numbers that are kept individually."""
        return len(self._others)

    def __contains__(self, step: object) -> bool:
        return step in self._others or step in range(self._first, self._below)

    def __iter__(self) -> Iterator[int]:
        yield from self._others
        yield from range(self._first, self._below)

    def __len__(self) -> int:
        return len(self._others) + self._below - self._first


class SyncGroupTickets:
    """The tickets of a run in portions, one ticket for each learner of a sync group.

    The budget in steps and epochs is checked at the beginning of each portion, so that a sync group ends together
    without a message; the last portion is a whole one. Minutes are checked elsewhere, with the engine's clock.
    """

    def __init__(self, workload: Workload[Any], start: Position, budget: Budget, sync_group_size: int) -> None:
        self.sequence = TicketSequence(workload, start.next_ticket)
        self._start = start
        self._budget = budget
        self._group_size = sync_group_size
        self._places = {ticket.step: place for place, ticket in enumerate(start.outstanding)}
        self._end: int | None = None

    def end_at(self, number: int) -> None:
        """End the run before portion `number`, as if its budget were spent there. Called by any thread."""
        self._end = number

    def ticket(self, number: int, member: int = 0) -> Ticket:
        """The ticket of a `member` (its place in the sync group) in portion `number`."""
        place = number * self._group_size + member
        outstanding = self._start.outstanding
        if place < len(outstanding):
            return outstanding[place]
        return self.sequence[self._start.next_ticket.step + place - len(outstanding)]

    def number_of(self, ticket: Ticket) -> int:
        """The portion that a ticket is in."""
        place = self._places.get(ticket.step, ticket.step - self._start.next_ticket.step + len(self._start.outstanding))
        return place // self._group_size

    def position(self, number: int, undone: Iterable[int] = ()) -> Position:
        """The position of the run when the portions below `number` are done, except for `undone` ones."""
        num_given = number * self._group_size
        outstanding = self._start.outstanding
        returned = [self.ticket(each, member) for each in sorted(undone) for member in range(self._group_size)]
        return Position(
            self.sequence[self._start.next_ticket.step + max(0, num_given - len(outstanding))],
            tuple(sorted((*returned, *outstanding[num_given:]), key=lambda ticket: ticket.step)),
        )

    def num_before(self, number: int) -> int:
        """The number of done mini-batches when portion `number` is the first that is not done."""
        return self._start.num_done + number * self._group_size

    def progress(self, number: int, minutes: float) -> Progress:
        """The progress of the run when portion `number` is the first that is not claimed."""
        num_done = self.num_before(number)
        return Progress(num_done, self.sequence.epochs_before(num_done), minutes)

    def is_beyond(self, number: int) -> bool:
        """Whether the budget is spent before portion `number`, and the portion holds no re-issued ticket that is within
        the budget."""
        if self._end is not None and number >= self._end:
            return True
        return self._budget.is_spent(self.progress(number, minutes=0.0)) and not self._is_reissued(self.ticket(number))

    def _is_reissued(self, ticket: Ticket) -> bool:
        if ticket.step not in self._places:
            return False
        return not self._budget.is_spent(Progress(ticket.step, self.sequence.epochs_before(ticket.step), minutes=0.0))

    def take(self, numbers: Iterable[int], members: Iterable[int]) -> Iterator[Ticket]:
        """The tickets of `members` (places in a sync group) in these portions, until the budget is spent."""
        members = list(members)
        for number in numbers:
            if self.is_beyond(number):
                return
            for member in members:
                yield self.ticket(number, member)

    def handed_out(self, num_drawn: int) -> int:
        """The number of portions within the budget, when the numbers below `num_drawn` were drawn."""
        while num_drawn > 0 and self.is_beyond(num_drawn - 1):
            num_drawn -= 1
        return num_drawn


@dataclass(frozen=True)
class Barrier:
    """A checkpoint barrier: all learners save their state before portion `number`."""

    number: int
    ended: tuple[int, ...] = ()
    """The epochs that end here."""


class Barriers:
    """The checkpoint barriers of a run, in order: at epoch ends, every so many mini-batches if requested, and where
    learners agree on one.

    A learner passes a barrier when it claims a portion after it, having done all its own mini-batches before it. So
    once all have passed, all tickets before it are done. In a synchronous run no others are; an asynchronous learner
    may also have received what others did after it.
    """

    def __init__(self, tickets: SyncGroupTickets, every: int | None = None) -> None:
        self._tickets = tickets
        self._every = every
        self._agreed: set[int] = set()
        self._next = 0  # the first portion that was not looked at
        self.epoch = tickets.ticket(0).epoch
        """The epoch that portions before the last barrier, or the first portion, are in."""

    def add(self, number: int) -> None:
        """Add a barrier before portion `number`, which no learner has claimed. Called by any thread."""
        self._agreed.add(number)

    def end_at(self, number: int) -> None:
        """The run ends before portion `number`: drop a barrier that was agreed on there."""
        self._agreed.discard(number)

    def until(self, number: int) -> Iterator[Barrier]:
        """The barriers up to portion `number`, after the last one returned."""
        while self._next < number:
            following = self._first_barrier(range(self._next + 1, number + 1))
            self._next = number if following is None else following
            self._agreed.difference_update([each for each in list(self._agreed) if each <= self._next])
            if following is not None:
                ended = tuple(range(self.epoch, self._tickets.ticket(following).epoch))
                self.epoch += len(ended)
                yield Barrier(following, ended)

    def _first_barrier(self, numbers: range) -> int | None:
        """The first barrier among consecutive portions, without examining each of them."""
        agreed = [each for each in list(self._agreed) if each in numbers and not self._tickets.is_beyond(each)]
        first = len(numbers)
        if self._every is not None:
            first = bisect_right(numbers, self._periods_before(numbers[0] - 1), key=self._periods_before)
        if self._tickets.ticket(numbers[-1]).epoch > self.epoch:
            epoch_of = lambda number: self._tickets.ticket(number).epoch  # noqa: E731
            first = min(first, bisect_right(numbers, self.epoch, key=epoch_of))
        return min([*agreed, *numbers[first : first + 1]], default=None)

    def _periods_before(self, number: int) -> int:
        """How many times `every` mini-batches are before a portion."""
        return 0 if self._every is None else self._tickets.num_before(number) // self._every
