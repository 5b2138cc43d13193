"""What a launcher knows of its learners from what they send: who does what, waits for whom, and was heard when."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starling.engines.processes.stalls import Stall

Seconds = float
SILENT_SECONDS = 3.0
"""Without a sign of life for so long, of which there are two a second, a learner counts as silent."""


@dataclass
class Known:
    """One learner, by all that it has said."""

    name: int
    doing: str = "starting"
    said_at: float = 0.0
    """When it said so."""
    heard_at: float | None = None
    """When it gave its last sign of life."""
    num_steps: int = 0
    """Mini-batches that it has computed, under this name."""
    num_before: int = 0
    """Those of them that it had computed when it was lost, before it came again."""
    loss: float | None = None
    wait: Stall | None = None
    waits_since: float = 0.0
    view: int = -1
    """The view of who is there that it was in last; -1 before all have met."""
    has_joined: bool = False
    """Whether it came when the run was under way."""
    has_ended: bool = False
    is_lost: bool = False
    seconds: Seconds = 0.0
    """Of the epochs that it has reported."""
    computing: Seconds = 0.0
    waiting_for_data: Seconds = 0.0
    waiting_for_peers: Seconds = 0.0
    num_not_finite: int = 0


@dataclass(frozen=True)
class LossAt:
    """A learner that was lost; it may have come again."""

    name: int
    reason: str
    """How it was lost, in words."""
    at: float


@dataclass
class Roster:
    """All learners of a run that this process has started, by name. Times are those of `clock`."""

    world: int
    clock: Callable[[], float] = time.monotonic
    learners: dict[int, Known] = field(default_factory=dict)
    losses: list[LossAt] = field(default_factory=list)
    saved: str = ""
    """The newest checkpoint."""
    saved_at: float = 0.0
    num_saved: int = 0

    def __post_init__(self) -> None:
        self.began_at = self.clock()
        for name in range(self.world):
            self.learners[name] = Known(name, said_at=self.began_at)

    @property
    def view(self) -> int:
        """The newest view of who is there that a learner was in."""
        return max((each.view for each in self.learners.values()), default=-1)

    def hear(self, name: int, message: Mapping[str, Any]) -> None:
        """Take in what a learner sent."""
        now = self.clock()
        known = self.learners.setdefault(name, Known(name))
        if known.is_lost:
            _come_again(known)
        known.heard_at = now
        if "doing" in message:
            known.doing, known.said_at = message["doing"], now
        if "view" in message:
            known.has_joined = known.has_joined or (known.view < 0 < message["view"])
            known.view = message["view"]
        if "beat" in message:
            self._beat(known, message["beat"], now)
        if "progress" in message:
            known.loss = message["progress"]["loss"]
        if "epoch" in message:
            _add_epoch(known, message["epoch"])
        if "saved" in message:
            self.saved, self.saved_at, self.num_saved = message["saved"], now, self.num_saved + 1
        known.has_ended = known.has_ended or bool(message.get("ended"))

    def lose(self, name: int, reason: str) -> None:
        """The others go on without this one."""
        known = self.learners[name]
        known.is_lost, known.wait = True, None
        self.losses.append(LossAt(name, reason, self.clock()))

    def leave_out(self, name: int) -> None:
        """One that was started did not join: nobody waits for it."""
        if name in self.learners:
            known = self.learners[name]
            known.is_lost, known.wait = True, None

    def waiting(self) -> dict[int, Known]:
        """Those who are there and wait, by name."""
        return {each.name: each for each in self.present() if each.wait is not None}

    def present(self) -> Iterable[Known]:
        """Those who are neither lost nor done."""
        return [each for each in self.learners.values() if not each.is_lost and not each.has_ended]

    def silence(self, known: Known) -> Seconds | None:
        """For how long a learner that is there has been silent; None unless it is unusual."""
        if known.heard_at is None or known.is_lost or known.has_ended:
            return None
        silence = self.clock() - known.heard_at
        return silence if silence > SILENT_SECONDS else None

    def _beat(self, known: Known, beat: Mapping[str, Any], now: float) -> None:
        known.num_steps = known.num_before + beat["steps"]
        told = beat["wait"]
        known.wait = None if told is None else Stall(**{**told, "whom": tuple(told["whom"])})
        if known.wait is not None:
            known.waits_since = now - known.wait.seconds


def _come_again(known: Known) -> None:
    """Another process has begun under the name of one that was lost."""
    known.is_lost, known.view, known.doing = False, -1, "starting"
    known.num_before = known.num_steps


def _add_epoch(known: Known, epoch: Mapping[str, Any]) -> None:
    known.seconds += epoch["seconds"]
    known.computing += epoch["computing"]
    known.waiting_for_data += epoch["waiting_for_data"]
    known.waiting_for_peers += epoch["waiting_for_peers"]
    known.num_not_finite += epoch["num_not_finite"]
