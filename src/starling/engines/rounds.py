"""Averaging rounds in the background: who opens them, and how they end for all learners alike."""

import threading
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

ENDED = 1 << 30
"""What is added to a round's key when it will never open."""
DRIFT = 1024
"""Rounds that one learner may be ahead of another; older keys are removed from the store. Neighbours wait for each
other at every round, so that any connected topology keeps all learners much closer together."""


ENOUGH_GRADIENTS = 100
"""From so many gradients on a learner's rounds per gradient are judged."""
FEW_ROUNDS = 0.4
"""A learner complains of fewer than this part of the rounds that its period asks for; the default of `max_lag` keeps it
above 0.5."""


class Pace:
    """Whether a learner has made enough gradients to open another round, and how far it is ahead of its rounds.

    Each of its gradients earns it 1 / period rounds, and each round costs it one, whoever opened it: so among learners
    of one speed one of them opens the rounds for all. Neither credit nor debt grows: after a jam the rounds are not
    made up for, and when the fastest learner leaves a slower one soon opens rounds in its place.
    """

    def __init__(self) -> None:
        self.period = 1.0
        self.num_gradients = self.num_rounds = 0
        self._credit = 0.0
        self._ahead = 0  # gradients since this learner completed a round
        self._is_due = False  # whether its background has a round to do

    @property
    def may_open(self) -> bool:
        return self._credit >= 1.0

    def gradient_made(self) -> None:
        """One more gradient."""
        self.num_gradients += 1
        self._ahead += 1
        self._credit = min(self._most, self._credit + 1.0 / self.period)

    def opened(self) -> None:
        """This learner opened a round, which its background will enter."""
        self._is_due = True

    def entered(self) -> None:
        """A round began, whoever opened it."""
        self._is_due = True
        self.num_rounds += 1
        self._credit = max(-self._most, self._credit - 1.0)

    def completed(self) -> None:
        """This learner's background has done its round, if it had one to do."""
        if self._is_due:
            self._ahead = 0
        self._is_due = False

    def lags(self, most: float) -> bool:
        """Whether the background is in a round and `most` gradients or more were made since the one before."""
        return self._is_due and self._ahead >= most

    def complaint(self) -> str | None:
        """What is wrong with this pace, and the remedy, if rounds were far fewer than the period asks for."""
        if self.num_gradients < ENOUGH_GRADIENTS or self.num_rounds * self.period >= FEW_ROUNDS * self.num_gradients:
            return None
        return (
            f"made {self.num_rounds / self.num_gradients:.2g} averaging rounds per gradient, where a period of "
            f"{self.period:g} asks for {1.0 / self.period:.2g}: learners that average so rarely train nearly apart. "
            "Lower strategy.max_lag, or raise strategy.period to what the link and the cores can carry"
        )

    @property
    def _most(self) -> float:
        """What one gradient is worth, or what one round costs if that is more."""
        return max(1.0, 1.0 / self.period)


class Rounds:
    """One learner's view of the rounds of all, through the store.

    Round k is a key. Whoever has made enough gradients sets it; all backgrounds wait for it, without polling. When the
    last learner has made its last gradient no round can open any more, and it marks the first unopened one as the end:
    so everybody goes through equally many rounds, and nobody waits for a neighbour that has left.
    """

    def __init__(self, store: Store, rank: int, world: int) -> None:
        self._store = store
        self._own = store.clone()  # type: ignore[attr-defined]  # a connection of its own: a store serves one wait or one question at a time
        self._own.set_timeout(timedelta(days=20))
        self._rank, self._world = rank, world
        self._lock = threading.Lock()
        self._pace = Pace()
        self._next = 0
        self._waiting: int | None = None
        self._kept_up: tuple[float, Future[None]] | None = None
        self._is_finished = False
        self._is_over = False

    def gradient_made(self) -> None:
        """Called by the foreground after each gradient; opens the round that the background waits for."""
        with self._lock:
            self._pace.gradient_made()
            if self._waiting is not None and self._pace.may_open:
                self._store.set(_key(self._waiting), "1")
                self._waiting = None
                self._pace.opened()

    def next(self, period: float) -> int | None:
        """Called by the background: wait for the next round; its number, or None after the last."""
        with self._lock:
            self._pace.completed()
            self._look_at_lag()
            if self._is_over:
                return None
            number, self._next = self._next, self._next + 1
            self._pace.period = period
            if self._pace.may_open and not self._is_finished:
                self._own.add(_key(number), 1)
                self._pace.opened()
            else:
                self._waiting = number
        has_ended = int(self._own.get(_key(number))) >= ENDED
        with self._lock:
            self._waiting = None
            if has_ended:
                self._pace.completed()
                self._look_at_lag()
                return None
            self._pace.entered()
        if number >= DRIFT and number % self._world == self._rank:
            self._own.delete_key(_key(number - DRIFT))
        return number

    def kept_up(self, most: float) -> "Future[None] | None":
        """Called by the foreground: done when it is less than `most` gradients ahead of the last round that the
        background has completed; None if it is."""
        with self._lock:
            if not self._pace.lags(most):
                return None
            self._kept_up = most, Future()
            return self._kept_up[1]

    @property
    def pace(self) -> Pace:
        """This learner's pace."""
        return self._pace

    def _look_at_lag(self) -> None:
        if self._kept_up is not None and not self._pace.lags(self._kept_up[0]):
            kept_up, self._kept_up = self._kept_up[1], None
            with suppress(InvalidStateError):  # who waited was released
                kept_up.set_result(None)

    def leave(self) -> None:
        """Called by the foreground when these rounds are over for good, whatever the others do."""
        with self._lock:
            self._is_over = True
            waited_for = max(0, self._next - 1)
        self._store.add(_key(waited_for), ENDED)

    def finish(self) -> None:
        """Called by the foreground when it will make no more gradients."""
        with self._lock:
            self._is_finished = True
            self._waiting = None
            first_unopened = max(0, self._next - 1)
        if self._store.add("rounds/finished", 1) < self._world:
            return
        while self._store.check([_key(first_unopened)]):
            first_unopened += 1
        self._store.add(_key(first_unopened), ENDED)


def _key(number: int) -> str:
    return f"rounds/{number}"
