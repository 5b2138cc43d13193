"""Averaging rounds in the background: who opens them, and how they end for all learners alike."""

import threading
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

ENDED = 1 << 30
"""What is added to a round's key when it will never open."""
DRIFT = 1024
"""Rounds that one learner may be ahead of another; older keys are removed from the store. Neighbours wait for each
other at every round, so that any connected topology keeps all learners much closer together."""


class Pace:
    """Whether a learner has made enough gradients to open another round.

    Each of its gradients earns it 1 / period rounds, and each round costs it one, whoever opened it: so among learners
    of one speed one of them opens the rounds for all. Neither credit nor debt grows: after a jam the rounds are not
    made up for, and when the fastest learner leaves a slower one soon opens rounds in its place.
    """

    def __init__(self) -> None:
        self.period = 1.0
        self._credit = 0.0

    @property
    def may_open(self) -> bool:
        return self._credit >= 1.0

    def gradient_made(self) -> None:
        """One more gradient."""
        self._credit = min(self._most, self._credit + 1.0 / self.period)

    def entered(self) -> None:
        """A round began, whoever opened it."""
        self._credit = max(-self._most, self._credit - 1.0)

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
        self._is_finished = False
        self._is_over = False

    def gradient_made(self) -> None:
        """Called by the foreground after each gradient; opens the round that the background waits for."""
        with self._lock:
            self._pace.gradient_made()
            if self._waiting is not None and self._pace.may_open:
                self._store.set(_key(self._waiting), "1")
                self._waiting = None

    def next(self, period: float) -> int | None:
        """Called by the background: wait for the next round; its number, or None after the last."""
        with self._lock:
            if self._is_over:
                return None
            number, self._next = self._next, self._next + 1
            self._pace.period = period
            if self._pace.may_open and not self._is_finished:
                self._own.add(_key(number), 1)
            else:
                self._waiting = number
        has_ended = int(self._own.get(_key(number))) >= ENDED
        with self._lock:
            self._waiting = None
            self._pace.entered()
        if has_ended:
            return None
        if number >= DRIFT and number % self._world == self._rank:
            self._own.delete_key(_key(number - DRIFT))
        return number

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
