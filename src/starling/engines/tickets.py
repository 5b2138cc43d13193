"""Which mini-batch is whose: tickets in order, and the budget that ends them.

Learners claim in teams: a team takes as many consecutive tickets at once as it has learners, one for each. All learners
are one team of a synchronous strategy, each is its own where nobody waits for anybody.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Any

from starling.budget import Budget, Progress
from starling.errors import DataError
from starling.workload import Ticket, Workload


class TicketSequence:
    """All tickets of a run, from `start` on, by their number (`Ticket.step`). A pure function of the workload."""

    def __init__(self, workload: Workload[Any], start: Ticket) -> None:
        self.start = start
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

    def first_of(self, epoch: int) -> Ticket:
        """The first ticket of an epoch."""
        while epoch > self._last_epoch:
            self._first_steps.append(self._first_steps[-1] + self.num_batches(self._last_epoch))
        return Ticket(epoch, 0, self._first_steps[epoch - self._first_epoch])

    @property
    def _last_epoch(self) -> int:
        return self._first_epoch + len(self._first_steps) - 1

    def progress(self, ticket: Ticket, minutes: float) -> Progress:
        """How far the run has come when `ticket` is the first that nobody has claimed."""
        return Progress(ticket.step, ticket.epoch + ticket.index / self.num_batches(ticket.epoch), minutes)


class TeamTickets:
    """The tickets of a run in portions, one ticket for each learner of a team.

    The budget in steps and epochs is checked at the beginning of each portion, so that a team ends together without a
    word; the last portion is a whole one. Minutes are the engine's to check.
    """

    def __init__(self, sequence: TicketSequence, budget: Budget, team_size: int) -> None:
        self._sequence = sequence
        self._budget = budget
        self._team_size = team_size

    def first(self, number: int) -> Ticket:
        """The first ticket of portion `number`."""
        return self._sequence[self._sequence.start.step + number * self._team_size]

    def is_beyond(self, number: int) -> bool:
        """Whether the budget is spent before portion `number`."""
        return self._budget.is_spent(self._sequence.progress(self.first(number), minutes=0.0))

    def take(self, numbers: Iterable[int], members: Iterable[int]) -> Iterator[Ticket]:
        """The tickets of `members` (places in a team) in the portions with these numbers, until the budget is spent."""
        members = list(members)
        for number in numbers:
            if self.is_beyond(number):
                return
            first = self.first(number).step
            for member in members:
                yield self._sequence[first + member]

    def handed_out(self, num_drawn: int) -> int:
        """How many portions are within the budget when numbers below `num_drawn` were drawn."""
        while num_drawn > 0 and self.is_beyond(num_drawn - 1):
            num_drawn -= 1
        return num_drawn
