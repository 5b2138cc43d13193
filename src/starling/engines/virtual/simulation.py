"""One virtual run: its clock, its events, all learners that ever existed in it, and the injected faults."""

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import simpy

from starling.engines.virtual.cluster import Cluster, ComputeTimes
from starling.errors import PeerLost
from starling.training.faults import Fault, Join, Kill, NotFinite, Pause, Split
from starling.training.job import Job
from starling.training.loading import Loader
from starling.training.membership import Membership
from starling.training.succession import Life


@dataclass(kw_only=True)
class VirtualLife(Life):
    """The life of a learner on the simulated clock."""

    times: ComputeTimes
    still_until: float = 0.0
    """Time on the simulated clock, in seconds, until which the learner is paused."""
    death: str = ""
    """Reason of the learner's death; empty while it lives."""

    @property
    def is_dead(self) -> bool:
        return bool(self.death)


@dataclass(frozen=True)
class VirtualLoss:
    """A learner that died."""

    learner: int
    reason: str
    seconds: float
    """Time of the death in seconds on the simulated clock."""
    stopped: float = 0.0
    """Time for which the learner had been paused until then."""


class Affected(Protocol):
    """The interface through which faults affect the learners of the present membership."""

    membership: Membership

    def heal(self) -> None:
        """Resume the communication that a network partition blocked, after the partition has ended."""

    def end_of(self, life: VirtualLife) -> None:
        """End all activities of a learner that has died."""

    def leave(self, reason: str) -> None:
        """End the membership."""


class Simulation:
    """The state that all memberships of a virtual run share. It injects the job's faults, and acts as the launcher: it
    notices deaths and joiners.

    In a network partition, the store and the launcher are on the side that the fault does not name.
    """

    present: Affected
    """Present membership. The engine sets it whenever a membership begins."""

    def __init__(
        self, job: Job, cluster: Cluster, times: Callable[[int], ComputeTimes] | None, ranks_per_learner: int
    ) -> None:
        self.job, self.cluster = job, cluster
        self.ranks_per_learner = ranks_per_learner
        """Number of ranks with separate mini-batches that each simulated learner, an island, represents; 1 without
        islands."""
        self.environment = simpy.Environment()
        self.loader = Loader(job.workload, job.num_workers)
        self.lives: dict[int, VirtualLife] = {}
        """Lives of the learners by name. A restarted learner has a new life."""
        self.losses: list[VirtualLoss] = []
        self.num_events = 0
        self.event_hash = hashlib.sha256()
        self._times = times or partial(ComputeTimes, cluster.compute, job.seed)
        self._cut_off: dict[int, float] = {}  # end of the partition for each learner that is cut off, by name
        for fault in job.faults:
            if not isinstance(fault, NotFinite) and fault.at_seconds is not None:
                self._after(fault.at_seconds, partial(self.inject, fault))

    @property
    def now(self) -> float:
        """Simulated seconds since the run began."""
        return float(self.environment.now)

    def record(self, name: int, kind: str, detail: bytes) -> None:
        """Add an event of a learner to the hash, and inject the faults that are due at it."""
        self.num_events += 1
        self.event_hash.update(struct.pack("<dq", self.environment.now, name) + kind.encode() + b"\0" + detail)
        for fault in self.job.faults:
            if getattr(fault, "at_event", None) == self.num_events:
                self.inject(fault)

    def begin_life(self, name: int) -> VirtualLife:
        """Start or restart a learner. Faults that are injected into single learners affect only the learners that begin
        with the run."""
        self.lives[name] = VirtualLife.begin(self.job, name, is_new=self.now > 0.0, times=self._times(name))
        return self.lives[name]

    def living(self) -> tuple[int, ...]:
        """Return the names of the living learners, in order."""
        return tuple(sorted(name for name, life in self.lives.items() if not life.is_dead))

    def apart(self, names: Sequence[int]) -> bool:
        """Return whether a network partition separates some of these learners from each other."""
        return len({self._cut_off.get(name, 0.0) > self.now for name in names}) > 1

    def seconds_cut_off(self, life: VirtualLife) -> float:
        """Return the seconds until the store receives messages from a learner again."""
        return max(0.0, self._cut_off.get(life.name, 0.0) - self.now)

    def inject(self, fault: Fault) -> None:
        """Inject a fault now, if its learner is alive."""
        if isinstance(fault, Split):
            self._split(fault)
        elif isinstance(fault, Join):
            if seconds := self.cluster.watch.start:
                self._after(seconds, partial(self._join, fault))
            else:
                self._join(fault)
        elif (life := self.lives.get(fault.learner)) is not None and not life.is_dead:
            if isinstance(fault, Kill):
                self._kill(life, "was killed on purpose")
            elif isinstance(fault, Pause):  # a learner that is paused for too long is treated as killed
                life.still_until = max(life.still_until, self.now + fault.seconds)
                self._end_if_silent(life, fault.seconds, "sent no heartbeat", is_stopped=True)
                if fault.at_seconds is not None and fault.seconds > self.cluster.watch.silence:  # as by the launcher
                    again = Join(join=life.name, at_seconds=self.now + fault.seconds)
                    self._after(fault.seconds, lambda: self.inject(again))

    def _kill(self, life: VirtualLife, how: str, stopped: float = 0.0) -> None:
        if life.is_dead:
            return
        life.death = f"learner {life.name} {how} after {self.now:.6g} simulated seconds"
        self.losses.append(VirtualLoss(life.name, life.death, self.now, stopped))
        self._after(self.cluster.watch.notice, lambda: self._notice(life, life.death))
        self.present.end_of(life)

    def _split(self, fault: Split) -> None:
        heals = self.now + fault.seconds
        for name in fault.split:
            self._cut_off[name] = max(heals, self._cut_off.get(name, 0.0))
            if name in self.lives:
                self._end_if_silent(self.lives[name], fault.seconds, "was cut off from the others")
        self._after(fault.seconds, lambda: self.present.heal())

    def _join(self, fault: Join) -> None:
        if fault.join in self.present.membership.members:  # the other learners must first continue without it
            if self.lives[fault.join].is_dead:
                self._after(self.cluster.watch.regroup, partial(self._join, fault))
        elif fault.join not in self.living():
            self._notice(self.begin_life(fault.join), f"learner {fault.join} came")

    def _end_if_silent(self, life: VirtualLife, seconds: float, how: str, is_stopped: bool = False) -> None:
        silence = self.cluster.watch.silence
        if seconds > silence:
            self._after(silence, lambda: self._kill(life, f"{how} for {silence:g} s", silence * is_stopped))

    def _notice(self, life: VirtualLife, reason: str) -> None:
        """Record that a learner has died or joined. The other learners leave this membership, unless the membership
        already reflects the change."""
        if not self.living():
            raise PeerLost(f"all learners were lost; the last: {self.losses[-1].reason}")
        is_current = self.lives[life.name] is life
        if is_current and (life.name in self.present.membership.members) == life.is_dead:
            self.present.leave(reason)

    def _after(self, seconds: float, do: Callable[[], None]) -> None:
        self.environment.timeout(seconds).callbacks.append(lambda _: do())
