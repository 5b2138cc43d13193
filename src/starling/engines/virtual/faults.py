"""What befalls learners on the simulated clock: deaths, standing still, a network in two halves, and newcomers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from starling.engines.virtual.learner import Life
from starling.errors import PeerLost
from starling.training.faults import Fault, Join, Kill, NotFinite, Pause, Split

if TYPE_CHECKING:
    from starling.engines.virtual.engine import VirtualEngine


@dataclass(frozen=True)
class VirtualLoss:
    """A learner that died."""

    learner: int
    reason: str
    seconds: float
    """On the simulated clock."""


class VirtualFaults:
    """Lets faults happen where they are placed, and lets who watches notice them.

    The store, and who watches, are on the side of a split network that the fault does not name.
    """

    def __init__(self, engine: "VirtualEngine", faults: Sequence[Fault]) -> None:
        self.losses: list[VirtualLoss] = []
        self._engine = engine
        self._watch = engine.cluster.watch
        self._timed = [fault for fault in faults if not isinstance(fault, NotFinite) and fault.at_seconds is not None]
        self._by_event: dict[int, list[Fault]] = {}
        for fault in faults:
            if not isinstance(fault, NotFinite | Join) and fault.at_event is not None:
                self._by_event.setdefault(fault.at_event, []).append(fault)
        self._cut_off: dict[int, float] = {}  # by name, until when

    def begin(self) -> None:
        """Let the clock bring what is placed by seconds."""
        for fault in self._timed:
            self._after(fault.at_seconds or 0.0, partial(self._happen, fault))

    def after_event(self, number: int) -> None:
        """Let happen what is placed at an event of the run, from 1."""
        for fault in self._by_event.get(number, ()):
            self._happen(fault)

    def kill(self, life: Life, how: str) -> None:
        """A learner dies, here and now."""
        if life.is_dead:
            return
        life.death = f"learner {life.name} {how} after {self._now:.6g} simulated seconds"
        self.losses.append(VirtualLoss(life.name, life.death, self._now))
        self._after(self._watch.notice, lambda: self._notice(life, life.death))
        self._engine.view.end_of(life)

    def pause(self, life: Life, seconds: float) -> None:
        """A learner stands still; for too long, and it is taken for dead, and ended."""
        life.still_until = max(life.still_until, self._now + seconds)
        self._end_if_silent(life, seconds, "gave no sign of life")

    def apart(self, names: Sequence[int]) -> bool:
        """Whether not all of these learners can hear each other."""
        return len({self._is_cut_off(name) for name in names}) > 1

    def seconds_cut_off(self, life: Life) -> float:
        """For how long the store will not hear a learner."""
        return max(0.0, self._cut_off.get(life.name, 0.0) - self._now)

    def seconds_out_of_reach(self, life: Life) -> float:
        """For how long a learner will hear nothing."""
        return max(self.seconds_cut_off(life), life.still_until - self._now)

    def _happen(self, fault: Fault) -> None:
        if isinstance(fault, Split):
            self._split(fault)
            return
        if isinstance(fault, Join):
            self._join(fault)
            return
        life = self._engine.lives.get(fault.learner)
        if life is None or life.is_dead:
            return
        if isinstance(fault, Kill):
            self.kill(life, "was killed on purpose")
        elif isinstance(fault, Pause):
            self.pause(life, fault.seconds)

    def _split(self, fault: Split) -> None:
        heals = self._now + fault.seconds
        for name in fault.split:
            self._cut_off[name] = max(heals, self._cut_off.get(name, 0.0))
            if name in self._engine.lives:
                self._end_if_silent(self._engine.lives[name], fault.seconds, "was cut off from the others")
        self._after(fault.seconds, lambda: self._engine.view.network.heal())

    def _join(self, fault: Join) -> None:
        life = self._engine.lives.get(fault.join)
        if life is not None and not life.is_dead:
            return
        if fault.join in self._engine.view.view.members:  # the others are first to go on without it
            self._after(self._watch.regroup, lambda: self._join(fault))
            return
        self._notice(self._engine.bring_to_life(fault.join), f"learner {fault.join} came")

    def _end_if_silent(self, life: Life, seconds: float, how: str) -> None:
        if seconds > self._watch.silence:
            self._after(self._watch.silence, lambda: self.kill(life, f"{how} for {self._watch.silence:g} s"))

    def _notice(self, life: Life, reason: str) -> None:
        """A learner has died, or come, and the others are to hear of it, unless they began without it, or with it."""
        if all(each.is_dead for each in self._engine.lives.values()):
            raise PeerLost(f"all learners were lost; the last: {self.losses[-1].reason}")
        is_current = self._engine.lives[life.name] is life
        if is_current and (life.name in self._engine.view.view.members) == life.is_dead:
            self._engine.view.leave(reason)

    @property
    def _now(self) -> float:
        return float(self._engine.environment.now)

    def _is_cut_off(self, name: int) -> bool:
        return self._cut_off.get(name, 0.0) > self._now

    def _after(self, seconds: float, do: Callable[[], None]) -> None:
        self._engine.environment.timeout(seconds).callbacks.append(lambda _: do())
