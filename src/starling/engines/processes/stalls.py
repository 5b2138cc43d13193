"""What this process waits for, for whom and since when: the first thing that is asked when a run stands still.

A wait is noted where it happens, by the thread that waits, which costs microseconds; any other thread may look.
"""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from statistics import median
from typing import Any

Seconds = float
BACKGROUND = "starling-background"
"""What the names of threads begin with in which a learner averages behind its training."""
OWN_ROUNDS = "its last averaging rounds"
"""What a learner waits for whose background goes on when it has made its last gradient."""
OWN_ROUND = "its own averaging round"
"""What a learner waits for that is too many gradients ahead of its background."""
_REMEMBERED = 9
"""Waits of a kind from which the usual time between two of them is taken."""


@dataclass
class Wait:
    """One wait of one thread."""

    what: str
    """Such as `a mean`, or `receiving from learner 2`."""
    whom: tuple[int, ...]
    """The ranks that must come: one peer, those that have not written yet, or a whole group; empty: not known."""
    is_group: bool
    """Whether all of `whom` take part in it, so that nobody in it knows who is late."""
    is_behind: bool
    """Whether the training goes on meanwhile."""
    since: float
    """On the clock of `Waits`."""
    number: int = field(default_factory=count().__next__)


@dataclass(frozen=True)
class Stall:
    """A wait that goes on, as it can be told to others."""

    what: str
    whom: tuple[int, ...]
    """Names of learners, other than this one."""
    is_group: bool
    is_behind: bool
    seconds: Seconds
    """How long it has lasted."""
    usual: Seconds
    """The time that usually passes from one such wait to the next; 0 as long as nobody can say."""
    number: int
    """The same for the same wait, and for no other of this learner."""

    def is_unusual(self, seconds: Seconds, times: float) -> bool:
        """Whether it has lasted for more than so many seconds, and so many times as long as usual."""
        return self.seconds > seconds and self.seconds > times * self.usual


class Waits:
    """The waits of a process that is a learner; its methods may be called by any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._names: Sequence[int] | None = None
        self._own_rank: int | None = None
        self.open: dict[int, Wait] = {}
        """What each thread waits for, by its number."""
        self._begun: dict[str, float] = {}
        self._cycles: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))

    def among(self, rank: int, names: Sequence[int]) -> None:
        """This learner is `rank` among learners with these names from now on."""
        self._own_rank, self._names = rank, names

    def waiting(self, what: str, whom: Sequence[int] = (), is_group: bool = False) -> "_Waiting":
        """A context in which this thread waits for something; it gives the `Wait`."""
        return _Waiting(self, what, whom, is_group)

    def begin(self, what: str, whom: Sequence[int] = (), is_group: bool = False) -> None:
        """This thread waits from now on, until `end`."""
        self.open[threading.get_ident()] = self.note(what, whom, is_group)

    def end(self) -> None:
        """What this thread began has ended, if it began anything."""
        self.open.pop(threading.get_ident(), None)

    def forget(self, seconds: Seconds) -> None:
        """This process stood still for so long, in which it waited for nobody."""
        now = self._clock()
        for wait in list(self.open.values()):
            wait.since = min(now, wait.since + seconds)

    def longest(self, than: Seconds = 0.0) -> Stall | None:
        """The wait that says most about why this learner stands still, if any has lasted for so long.

        One of the training comes before one behind it, but who waits for its own background waits for whom that does.
        """
        now = self._clock()
        waits = [wait for wait in list(self.open.values()) if now - wait.since >= than]
        own_rounds = (OWN_ROUND, OWN_ROUNDS)
        wait = min(waits, key=lambda each: (each.what in own_rounds, each.is_behind, each.since), default=None)
        if wait is None:
            return None
        own = [each for each in waits if not each.is_behind]
        cycles = list(self._cycles[_kind(wait.what)])
        return Stall(
            what=wait.what,
            whom=tuple(self._name(rank) for rank in wait.whom if rank != self._own_rank),
            is_group=wait.is_group,
            is_behind=not own,
            seconds=now - wait.since,
            usual=median(cycles) if len(cycles) >= 3 else 0.0,
            number=wait.number,
        )

    def note(self, what: str, whom: Sequence[int], is_group: bool) -> Wait:
        """A wait that begins now, and that its thread keeps in `open`."""
        now, kind = self._clock(), _kind(what)
        if kind in self._begun:
            self._cycles[kind].append(now - self._begun[kind])
        self._begun[kind] = now
        is_behind = threading.current_thread().name.startswith(BACKGROUND)
        return Wait(what, tuple(whom), is_group, is_behind, now)

    def _name(self, rank: int) -> int:
        return rank if self._names is None or rank >= len(self._names) else self._names[rank]


class _Waiting:
    """A wait as long as the context lasts; as a generator it would cost twice as much, at each step of a learner."""

    __slots__ = ("_given", "_outer", "_waits")

    def __init__(self, waits: Waits, *given: Any) -> None:
        self._waits = waits
        self._given = given

    def __enter__(self) -> Wait:
        thread, waits = threading.get_ident(), self._waits
        self._outer = waits.open.get(thread)
        wait = waits.open[thread] = waits.note(*self._given)
        return wait

    def __exit__(self, *error: object) -> None:
        thread = threading.get_ident()
        if self._outer is None:
            self._waits.open.pop(thread, None)
        else:
            self._waits.open[thread] = self._outer


def _kind(what: str) -> str:
    return what.partition(" learner ")[0]


WAITS = Waits()
"""Those of this process."""
