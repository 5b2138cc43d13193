"""Injected faults on the simulated clock: deaths, pauses, network partitions, and joiners."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import simpy

from starling.engines.virtual.cluster import WatchModel
from starling.engines.virtual.lives import Lives, VirtualLife
from starling.engines.virtual.network import Network
from starling.errors import PeerLost
from starling.training.faults import Fault, Join, Kill, NotFinite, Pause, Split
from starling.training.membership import Membership


@dataclass(frozen=True)
class VirtualLoss:
    """A learner that died."""

    learner: int
    reason: str
    seconds: float
    """On the simulated clock."""


class Affected(Protocol):
    """The learners of the present membership, as faults affect them."""

    membership: Membership
    network: Network

    def end_of(self, life: VirtualLife) -> None:
        """A learner has died: end all that it does."""

    def leave(self, reason: str) -> None:
        """The membership is over."""


class VirtualFaults:
    """Injects the faults of a job, and lets the launcher's stand-in notice them.

    The store and the launcher are on the side of a network partition that the fault does not name.
    """

    present: Affected
    """The engine sets it whenever a membership begins."""

    def __init__(
        self, environment: simpy.Environment, watch: WatchModel, lives: Lives, faults: Sequence[Fault]
    ) -> None:
        self.losses: list[VirtualLoss] = []
        self._environment, self._watch, self._lives = environment, watch, lives
        self._timed = [fault for fault in faults if not isinstance(fault, NotFinite) and fault.at_seconds is not None]
        self._by_event: dict[int, list[Fault]] = {}
        for fault in faults:
            if not isinstance(fault, NotFinite | Join) and fault.at_event is not None:
                self._by_event.setdefault(fault.at_event, []).append(fault)
        self.are_placed_at_events = bool(self._by_event)
        self._cut_off: dict[int, float] = {}  # by name, until when

    def begin(self) -> None:
        """Schedule the faults that are placed by seconds."""
        for fault in self._timed:
            self._after(fault.at_seconds or 0.0, partial(self._inject, fault))

    def after_event(self, number: int) -> None:
        """Inject the faults that are placed at an event of the run, counted from 1."""
        for fault in self._by_event.get(number, ()):
            self._inject(fault)

    def kill(self, life: VirtualLife, how: str) -> None:
        """A learner dies now."""
        if life.is_dead:
            return
        life.death = f"learner {life.name} {how} after {self._now:.6g} simulated seconds"
        self.losses.append(VirtualLoss(life.name, life.death, self._now))
        self._after(self._watch.notice, lambda: self._notice(life, life.death))
        self.present.end_of(life)

    def pause(self, life: VirtualLife, seconds: float) -> None:
        """A learner is paused; if for too long, it is treated as killed."""
        life.still_until = max(life.still_until, self._now + seconds)
        self._end_if_silent(life, seconds, "gave no sign of life")

    def apart(self, names: Sequence[int]) -> bool:
        """Whether a network partition separates some of these learners."""
        return len({self._is_cut_off(name) for name in names}) > 1

    def seconds_cut_off(self, life: VirtualLife) -> float:
        """Seconds until the store hears a learner again."""
        return max(0.0, self._cut_off.get(life.name, 0.0) - self._now)

    def seconds_out_of_reach(self, life: VirtualLife) -> float:
        """Seconds until a learner hears anything again."""
        return max(self.seconds_cut_off(life), life.still_until - self._now)

    def _inject(self, fault: Fault) -> None:
        if isinstance(fault, Split):
            self._split(fault)
            return
        if isinstance(fault, Join):
            self._join(fault)
            return
        life = self._lives.by_name.get(fault.learner)
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
            if name in self._lives.by_name:
                self._end_if_silent(self._lives.by_name[name], fault.seconds, "was cut off from the others")
        self._after(fault.seconds, lambda: self.present.network.heal())

    def _join(self, fault: Join) -> None:
        life = self._lives.by_name.get(fault.join)
        if life is not None and not life.is_dead:
            return
        if fault.join in self.present.membership.members:  # the others must first continue without it
            self._after(self._watch.regroup, lambda: self._join(fault))
            return
        self._notice(self._lives.begin(fault.join), f"learner {fault.join} came")

    def _end_if_silent(self, life: VirtualLife, seconds: float, how: str) -> None:
        if seconds > self._watch.silence:
            self._after(self._watch.silence, lambda: self.kill(life, f"{how} for {self._watch.silence:g} s"))

    def _notice(self, life: VirtualLife, reason: str) -> None:
        """A learner has died or joined: the others leave this membership, unless it already reflects that."""
        if not self._lives.living():
            raise PeerLost(f"all learners were lost; the last: {self.losses[-1].reason}")
        is_current = self._lives.by_name[life.name] is life
        if is_current and (life.name in self.present.membership.members) == life.is_dead:
            self.present.leave(reason)

    @property
    def _now(self) -> float:
        return float(self._environment.now)

    def _is_cut_off(self, name: int) -> bool:
        return self._cut_off.get(name, 0.0) > self._now

    def _after(self, seconds: float, do: Callable[[], None]) -> None:
        self._environment.timeout(seconds).callbacks.append(lambda _: do())
