"""One learner's averaging rounds: the times at which it opens rounds, and a check that its background keeps up."""

import threading
from collections.abc import Callable
from typing import Protocol

from starling.training.succession import Cuts

ENOUGH_GRADIENTS = 100
"""Number of gradients below which a learner's rate of rounds is not checked."""
FEW_ROUNDS = 0.4
"""Fraction of the rounds that a learner's period specifies below which the learner warns. With the default `max_lag`
the fraction stays above 0.5."""


class Board(Protocol):
    """The board of a membership. It shows all learners which rounds have opened, and which round is the last."""

    def open(self, number: int, is_behind: bool, /) -> bool | None:
        """Open a round for all learners. `is_behind` is true if the caller is the background. Several learners may open
        the same round. Returns False if the round will never open, because the rounds have ended, and None if the board
        does not know whether it will open."""

    def finish(self, first_unopened: int, /) -> None:
        """Record that a learner opens no more rounds. The last learner to do so ends the rounds, so that the first
        unopened round from `first_unopened` on will never open."""


class Rounds:
    """One learner's part in the averaging rounds, on every engine.

    A learner that has computed enough gradients opens a round on the `board`; all backgrounds wait for this. The last
    learner to compute its last gradient marks the first unopened round as the end. Therefore all learners take part in
    the same rounds, and no learner waits for a neighbour that has left.

    Each gradient earns a credit of 1 / period rounds, and each round costs a credit of 1, whichever learner opened it.
    Each round is therefore opened once, for all learners. Credit and debt are bounded: rounds that were missed during a
    delay are not made up for, and if the fastest learner leaves, a slower learner soon opens rounds instead.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self.cuts: Cuts | None = None
        """States of this learner that wait for rounds; None if the learner saves no states."""
        self._lock = threading.Lock()
        self._period = 1.0
        self._num_gradients = self._num_rounds = 0
        self._credit = 0.0
        self._ahead = 0  # number of gradients since this learner completed a round
        self._is_due = False  # whether its background has a round to do
        self._next = 0
        self._waiting: int | None = None
        self._kept_up: tuple[float, Callable[[], object]] | None = None
        self._is_finished = False

    def gradient_made(self) -> None:
        """Count a gradient, and open the round for which the background waits if that round is due. The foreground
        calls this method after each gradient."""
        with self._lock:
            self._num_gradients += 1
            self._ahead += 1
            self._credit = min(self._most, self._credit + 1.0 / self._period)
            if self._waiting is not None and self._credit >= 1.0:
                self._board.open(self._waiting, False)
                self._waiting = None
                self._is_due = True

    def begin(self, period: float) -> tuple[int, bool | None]:
        """Record that the background has completed its round. Returns the number of the next round, for which the
        background then waits, and whether that round will open, or None if this is not known."""
        if self.cuts is not None:
            self.cuts.completed(self._next)
        with self._lock:
            self._completed()
            number, self._next, self._period = self._next, self._next + 1, period
            if self._credit < 1.0 or self._is_finished:
                self._waiting = number
                return number, None
            self._is_due = True
            return number, self._board.open(number, True)

    def recorded(self) -> int:
        """Record that the background has completed its round, as `begin` does, and return the number of the next round.
        The record contains the rounds that take place, so no round is opened."""
        if self.cuts is not None:
            self.cuts.completed(self._next)
        number, self._next = self._next, self._next + 1
        return number

    def enter(self, number: int, is_open: bool) -> int | None:
        """Record that the background enters a round that has opened. Returns the number of the round, or None if the
        round will never open."""
        with self._lock:
            self._waiting = None
            if not is_open:
                self._completed()
                return None
            self._is_due = True
            self._num_rounds += 1
            self._credit = max(-self._most, self._credit - 1.0)
        if self.cuts is not None:
            self.cuts.entered(number)
        return number

    def keeps_up(self, most: float, tell: Callable[[], object]) -> bool:
        """Return whether the learner is less than `most` gradients ahead of the last round that its background has
        completed. If it is not, `tell` is called as soon as it is. The foreground calls this method."""
        with self._lock:
            if self._lags(most):
                self._kept_up = most, tell
            return self._kept_up is None

    def _completed(self) -> None:
        if self._is_due:
            self._ahead = 0
        self._is_due = False
        if self._kept_up is not None and not self._lags(self._kept_up[0]):
            tell, self._kept_up = self._kept_up[1], None
            tell()

    def _lags(self, most: float) -> bool:
        """Return whether a round is under way and at least `most` gradients were computed since the last completed
        round."""
        return self._is_due and self._ahead >= most

    @property
    def _most(self) -> float:
        """Bound of credit and debt: the credit of one gradient, but at least one round."""
        return max(1.0, 1.0 / self._period)

    def complaint(self) -> str | None:
        """Return a warning with its remedy if there were far fewer rounds than the period specifies, else None."""
        gradients, rounds = self._num_gradients, self._num_rounds
        if gradients < ENOUGH_GRADIENTS or rounds * self._period >= FEW_ROUNDS * gradients:
            return None
        return (
            f"made {rounds / gradients:.2g} averaging rounds per gradient; a period of "
            f"{self._period:g} asks for {1.0 / self._period:.2g}. Learners that average so rarely train almost "
            "independently. Lower strategy.max_lag, or raise strategy.period to what network and cores can sustain"
        )

    def finish(self) -> None:
        """Finish the rounds of this learner. The foreground calls this method after its last gradient."""
        with self._lock:
            self._is_finished = True
            self._waiting = None
            first_unopened = max(0, self._next - 1)
        self._board.finish(first_unopened)
