"""Which mini-batch is whose: tickets in order, and the budget that ends them."""

from bisect import bisect_right
from collections.abc import Iterator
from itertools import count
from typing import Any

from starling.budget import Budget, Progress
from starling.errors import DataError
from starling.workload import Ticket, Workload


class TicketSequence:
    """All tickets of a run, from `start` on, by their number (`Ticket.step`). A pure function of the workload."""

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

    @property
    def _last_epoch(self) -> int:
        return self._first_epoch + len(self._first_steps) - 1

    def progress(self, ticket: Ticket, minutes: float) -> Progress:
        """How far the run has come when `ticket` is the first that nobody has claimed."""
        return Progress(ticket.step, ticket.epoch + ticket.index / self.num_batches(ticket.epoch), minutes)


def round_tickets(sequence: TicketSequence, budget: Budget, start: Ticket, world: int) -> Iterator[Ticket]:
    """The tickets of all learners of a synchronous strategy: round k holds `world` consecutive ones, one a learner.

    The budget in steps and epochs is checked at the beginning of each round, so that all learners agree without a
    word; the last round is a whole one. Minutes are the engine's to check.
    """
    for first in count(start.step, world):
        if budget.is_spent(sequence.progress(sequence[first], minutes=0.0)):
            return
        for rank in range(world):
            yield sequence[first + rank]
