"""Records the waits of a learner process, to explain stalls: the operation, the other learners, and the start time.

The waiting thread records its wait, which takes microseconds. Any thread may read the record.
"""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from statistics import median
from typing import Self

from starling.timeouts import HEARTBEAT_EVERY, STOPPED_AFTER

Seconds = float
BACKGROUND = "starling-background"
"""Prefix of the names of threads in which learners average in the background."""
OWN_ROUNDS = "its last averaging rounds"
"""Wait of a learner, after its last gradient, for its background to finish."""
OWN_ROUND = "its own averaging round"
"""Wait of a learner that is too many gradients ahead of its background."""
_numbers = count()
_WINDOW = 9
"""Number of recent waits of one kind from which the usual time between two of them is estimated."""


class Wait:
    """One wait of one thread, and the context manager within which the thread waits. A context manager made from a
    generator would take twice as long, at each step of a learner."""

    __slots__ = ("_begin", "_outer", "_waits", "is_behind", "is_group", "number", "seconds", "since", "what", "whom")

    def __init__(self, waits: "Waits", what: str, whom: Sequence[int], is_group: bool) -> None:
        self._waits = waits
        self.what = what
        """Operation that waits, such as `a mean` or `receiving from learner 2`."""
        self.whom = tuple(whom)
        """Ranks for which the thread waits: a peer, the learners whose keys are missing, or a whole group. The tuple is
        empty if they are unknown."""
        self.is_group = is_group
        """Whether `whom` is a whole group. No member of such a group knows which of the others is late."""

    def __enter__(self) -> Self:
        waits, thread = self._waits, threading.get_ident()
        self.number, self.since, self._begin = next(_numbers), waits.began(self.what), waits.running()
        self.is_behind = threading.current_thread().name.startswith(BACKGROUND)
        """Whether the waiting thread is the background, so that training continues."""
        self._outer = waits.open.get(thread)
        waits.open[thread] = self
        return self

    def __exit__(self, *error: object) -> None:
        thread, waiting = threading.get_ident(), self._waits.open
        self.seconds = self._waits.running() - self._begin
        """Duration of the wait, without time for which the process was stopped."""
        if self._outer is None:
            waiting.pop(thread, None)
        else:
            waiting[thread] = self._outer


@dataclass(frozen=True)
class Stall:
    """A wait under way, in the form in which it is reported to other processes."""

    what: str
    whom: tuple[int, ...]
    """Names of the other learners for which the learner waits."""
    is_group: bool
    is_behind: bool
    seconds: Seconds
    """Duration of the wait so far."""
    usual: Seconds
    """Usual time from the beginning of one such wait to the next; 0 if unknown."""
    number: int
    """Number that identifies the wait among the waits of the learner."""

    def is_unusual(self, seconds: Seconds, times: float) -> bool:
        """Return whether the wait has lasted longer than `seconds` and longer than `times` the usual time."""
        return self.seconds > seconds and self.seconds > times * self.usual


class Waits:
    """The waits of one learner process; usable from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._names: Sequence[int] = ()
        self._own_rank = -1
        self._last_beat: Seconds | None = None
        self._stopped = self._stopped_until_beat = self._told = 0.0
        self._looking = threading.Lock()
        self.open: dict[int, Wait] = {}
        """The wait of each thread, by its identifier."""
        self._begun: dict[str, float] = {}
        self._cycles: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_WINDOW))

    def among(self, rank: int, names: Sequence[int]) -> None:
        """Set the membership: this learner is `rank` among learners with these names.

        The waits of other threads are forgotten. They belong to the former membership, in which a background may still
        wait, without effect, for a machine that has vanished.
        """
        self._own_rank, self._names = rank, names
        own = threading.get_ident()
        for thread in list(self.open):
            if thread != own:
                self.open.pop(thread, None)

    def waiting(self, what: str, whom: Sequence[int] = (), is_group: bool = False) -> Wait:
        """Return a context within which this thread waits."""
        return Wait(self, what, whom, is_group)

    def began(self, what: str) -> float:
        """Record that a wait begins now, and return the time on the clock of these waits."""
        now, kind = self._clock(), _kind(what)
        if kind in self._begun:
            self._cycles[kind].append(now - self._begun[kind])
        self._begun[kind] = now
        return now

    def beat(self) -> Seconds:
        """Return the time for which this process was stopped since the last call, or 0. After the first call, a thread
        must call this method every `HEARTBEAT_EVERY` seconds."""
        with self._looking:
            before, self._stopped_until_beat = self._stopped_until_beat, self._look()
            self._last_beat = self._clock()
            return self._stopped_until_beat - before

    def running(self) -> Seconds:
        """Return the time on a clock that stands still while this process is stopped, as by SIGSTOP. Without calls of
        `beat`, stops are not noticed."""
        with self._looking:
            return self._clock() - self._look()

    def running_and_stopped(self) -> tuple[Seconds, Seconds]:
        """Return the time on the clock of `running`, and the time for which this process was stopped since the last
        call."""
        with self._looking:
            before, self._told = self._told, self._look()
            return self._clock() - self._told, self._told - before

    def _look(self) -> Seconds:
        """Look for a stop that has just ended: the thread that calls `beat` has not run yet. Waiting times exclude
        it."""
        now, beat = self._clock(), self._last_beat
        if beat is not None and (late := now - beat - HEARTBEAT_EVERY) > STOPPED_AFTER:
            self._stopped, self._last_beat = self._stopped + late, now
            for wait in list(self.open.values()):
                wait.since = min(now, wait.since + late)
        return self._stopped

    def longest(self, than: Seconds = 0.0) -> Stall | None:
        """Return the wait that best explains a stall of this learner, or None if no wait has lasted at least `than`.

        Waits of the foreground take precedence over those of the background, unless the foreground waits for its own
        background.
        """
        now = self._clock()
        waits = [wait for wait in list(self.open.values()) if now - wait.since >= than]
        own_rounds = (OWN_ROUND, OWN_ROUNDS)
        wait = min(waits, key=lambda each: (each.what in own_rounds, each.is_behind, each.since), default=None)
        if wait is None:
            return None
        cycles, names = list(self._cycles[_kind(wait.what)]), self._names
        return Stall(
            what=wait.what,
            whom=tuple(names[rank] if rank < len(names) else rank for rank in wait.whom if rank != self._own_rank),
            is_group=wait.is_group,
            is_behind=all(each.is_behind for each in waits),
            seconds=now - wait.since,
            usual=median(cycles) if len(cycles) >= 3 else 0.0,
            number=wait.number,
        )


def _kind(what: str) -> str:
    return what.partition(" learner ")[0]
