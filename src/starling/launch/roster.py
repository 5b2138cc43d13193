"""What a launcher knows of the learners of a run: one record for each, from its first start to the end of the run.

A learner keeps its `learner_id` for life, also when it is lost and its process is started again; its `rank` is its
place in the present membership. This is the one place that says what a learner is: whether it trains, is silent, was
lost. It learns from three sources: the messages of the learner, the time since the last one, and the launcher, which
watches its process.

    starting ──────────────► training ──► ended
       │                       ▲  │
       └──► ready (a joiner) ──┘  ├──► left     others of its sync group were lost
                                  └──► lost     killed, silent for too long; or it never joined
    lost, left ──► starting                     its process is started again

A learner that is ready or trains, and has sent nothing for `SILENT_AFTER` seconds, is silent until it sends something.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from enum import Enum

from starling import errors
from starling.engines.processes.stalls import Stall
from starling.errors import StarlingError, Stopped
from starling.launch.messages import (
    Activity,
    Arrived,
    CanStop,
    Ended,
    Entered,
    EpochEnd,
    Failed,
    Heartbeat,
    LearnerMessage,
    NewMembership,
    Ready,
    Saved,
    Snapshot,
    Stop,
)
from starling.launch.process import LearnerProcess, signal_name
from starling.timeouts import SILENT_AFTER

Seconds = float


class LearnerState(Enum):
    """Where a learner is in its life."""

    STARTING = "starting"
    READY = "ready"
    TRAINING = "training"
    ENDED = "ended"
    LEFT = "left"
    LOST = "lost"


_OUT = (LearnerState.LEFT, LearnerState.LOST)


@dataclass
class LearnerRecord:
    """One learner. Times are those of the roster's clock."""

    learner_id: int
    process: LearnerProcess | None = None
    """The newest one; None where this is not the launcher that started it."""
    state: LearnerState = LearnerState.STARTING
    rank: int | None = None
    """Its place in the present membership; None if it is not a member."""
    is_joiner: bool = False
    """Whether the others trained already when its process was started."""
    generation: int = -1
    """The membership that its process entered last; -1 before the first."""
    arrived: int = -1
    """The membership whose other members its process last waited for."""
    started_at: float = 0.0
    heard_at: float | None = None
    """When it last sent anything."""
    doing: str = "starting"
    doing_since: float = 0.0
    has_computed: bool = False
    """Whether its process has computed anything."""
    error: StarlingError | None = None
    """What it said ended it."""
    killed_because: str = ""
    """Why the launcher killed it, if it did."""
    wait: Stall | None = None
    waits_since: float = 0.0
    num_steps: int = 0
    """Mini-batches that it has computed, in all its processes."""
    num_before: int = 0
    """Those of them that earlier processes computed."""
    loss: float | None = None
    has_joined: bool = False
    """Whether it came to a run under way."""
    seconds: Seconds = 0.0
    """Of the epochs that it has reported."""
    computing: Seconds = 0.0
    waiting_for_data: Seconds = 0.0
    waiting_for_peers: Seconds = 0.0
    num_not_finite: int = 0

    @property
    def is_running(self) -> bool:
        """Whether its process has not exited."""
        return self.process is not None and self.process.is_running

    @property
    def has_failed(self) -> bool:
        """Whether its process exited with an error or was killed."""
        return self.process is not None and bool(self.process.exit_code)

    @property
    def was_killed(self) -> bool:
        """Whether a signal ended it, and not an error of its own."""
        return self.process is not None and (self.process.exit_code or 0) < 0 and self.error is None

    @property
    def is_out(self) -> bool:
        """Whether the others train without it."""
        return self.state in _OUT

    @property
    def is_present(self) -> bool:
        """Whether it has work to do or waits for some."""
        return self.state not in (*_OUT, LearnerState.ENDED)

    @property
    def log(self) -> str:
        """Where its log is."""
        return str(self.process.log) if self.process is not None else ""

    def tell(self, message: NewMembership | Stop) -> None:
        """Send it a message."""
        if self.process is not None:
            self.process.tell(message)

    def kill(self, because: str = "") -> None:
        """End its process at once."""
        self.killed_because = because
        if self.process is not None:
            self.process.kill()

    def death(self) -> str:
        """How it was killed, and meanwhile doing what."""
        name = f"learner {self.learner_id}"
        if self.killed_because:
            return f"{name} {self.killed_because} while {self.doing} and was killed"
        code = (self.process.exit_code if self.process is not None else None) or 0
        return f"{name} was killed by {signal_name(-code)} while {self.doing}"

    def end_in_words(self) -> str:
        """How it ended, in whatever way."""
        if self.killed_because or self.was_killed:
            return self.death()
        code = self.process.exit_code if self.process is not None else None
        if code == 0:
            return f"learner {self.learner_id} exited: its sync group lost a member"
        how = self.error or f"it exited with code {code} while {self.doing}"
        return f"learner {self.learner_id}: {how}; its log: {self.log}"


@dataclass(frozen=True)
class LossAt:
    """A learner that was lost; it may have come back."""

    learner_id: int
    reason: str
    """How it was lost, in words."""
    at: float


@dataclass
class Roster:
    """All learners of a run, by `learner_id`. Each method takes the lock, which other threads hold while they read."""

    world: int
    clock: Callable[[], float] = time.monotonic
    learners: dict[int, LearnerRecord] = field(default_factory=dict)
    membership: NewMembership = field(init=False)
    """The newest one that was announced."""
    losses: list[LossAt] = field(default_factory=list)
    saved: str = ""
    """The newest checkpoint."""
    saved_at: float = 0.0
    num_saved: int = 0
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    def __post_init__(self) -> None:
        self.began_at = self.clock()
        for learner_id in range(self.world):
            self.learners[learner_id] = self._record(learner_id)
        self.announce(NewMembership(0, tuple(range(self.world))))

    @property
    def generation(self) -> int:
        """The newest membership that a learner has entered; -1 before the first."""
        return max((each.generation for each in self.learners.values()), default=-1)

    def start(self, learner_id: int, process: LearnerProcess | None = None, is_joiner: bool = False) -> LearnerRecord:
        """A process was started for a learner, its first one or one more."""
        with self.lock:
            record = self.learners.setdefault(learner_id, self._record(learner_id))
            now = self.clock()
            record.process, record.is_joiner, record.state = process, is_joiner, LearnerState.STARTING
            record.generation = record.arrived = -1
            record.started_at = record.doing_since = now
            record.heard_at, record.doing, record.has_computed = None, "starting", False
            record.error, record.killed_because, record.wait = None, "", None
            record.num_before = record.num_steps
            return record

    def announce(self, membership: NewMembership) -> None:
        """These are the members from now on; members of before that are not among them leave."""
        with self.lock:
            for record in self.learners.values():
                is_member = record.learner_id in membership.members
                if not is_member and record.rank is not None and record.state is not LearnerState.LOST:
                    record.state = LearnerState.LEFT
                record.rank = membership.members.index(record.learner_id) if is_member else None
            self.membership = membership

    def hear(self, learner_id: int, message: LearnerMessage) -> None:
        """A learner has sent a message."""
        with self.lock:
            record = self.learners.setdefault(learner_id, self._record(learner_id))
            record.heard_at = self.clock()
            match message:
                case Heartbeat():
                    self._beat(record, message)
                case Snapshot() | EpochEnd() | Activity() if message.doing:
                    self._does(record, message.doing)
                    record.has_computed = record.has_computed or record.generation >= 0
                    if isinstance(message, Snapshot):
                        record.loss = message.loss
                    elif isinstance(message, EpochEnd):
                        _add_epoch(record, message)
                case Ready():
                    _advance(record, LearnerState.READY)
                case Arrived():
                    record.arrived = message.generation
                case Entered():
                    record.has_joined = record.has_joined or (record.generation < 0 < message.generation)
                    record.generation = message.generation
                    _advance(record, LearnerState.TRAINING)
                case Ended():
                    self._does(record, "ending")
                    record.num_steps, record.wait = record.num_before + message.num_steps, None
                    _advance(record, LearnerState.ENDED)
                case Failed():
                    record.error = _revived(message)
                case Saved():
                    self.saved, self.saved_at, self.num_saved = message.folder, record.heard_at, self.num_saved + 1
                case CanStop() if record.process is not None:
                    record.process.can_stop = True
                case _:
                    pass

    def lose(self, learner_id: int, reason: str = "") -> None:
        """A learner was lost, and the others train without it; without a `reason` it never trained with them."""
        with self.lock:
            if learner_id in self.learners:
                record = self.learners[learner_id]
                record.state, record.wait = LearnerState.LOST, None
                if reason:
                    self.losses.append(LossAt(learner_id, reason, self.clock()))

    def records(self, learner_ids: Collection[int]) -> list[LearnerRecord]:
        """The records of these learners, without those that are lost or leave."""
        return [each for each in self.learners.values() if not each.is_out and each.learner_id in learner_ids]

    def waiting(self) -> dict[int, LearnerRecord]:
        """Those that wait for something, by `learner_id`."""
        return {each.learner_id: each for each in self.present() if each.wait is not None}

    def present(self) -> Iterable[LearnerRecord]:
        """Those that have work to do or wait for some."""
        return [each for each in self.learners.values() if each.is_present]

    def silence(self, record: LearnerRecord) -> Seconds | None:
        """For how long a learner that should send heartbeats has been silent; None unless that is unusual."""
        if record.state not in (LearnerState.READY, LearnerState.TRAINING):
            return None
        silence = self.since_heard(record)
        return silence if silence > SILENT_AFTER else None

    def since_heard(self, record: LearnerRecord) -> Seconds:
        """The time since a learner sent anything, or since its process was started."""
        return self.clock() - (record.started_at if record.heard_at is None else record.heard_at)

    def _record(self, learner_id: int) -> LearnerRecord:
        now = self.clock()
        return LearnerRecord(learner_id, started_at=now, doing_since=now)

    def _does(self, record: LearnerRecord, doing: str) -> None:
        record.doing, record.doing_since = doing, self.clock()

    def _beat(self, record: LearnerRecord, beat: Heartbeat) -> None:
        if beat.num_steps is None:
            return
        record.num_steps = record.num_before + beat.num_steps
        if beat.num_steps and record.state is LearnerState.STARTING:  # where no membership is watched, none is entered
            record.state = LearnerState.TRAINING
        record.wait = beat.stall
        if beat.stall is not None:
            record.waits_since = self.clock() - beat.stall.seconds


def _advance(record: LearnerRecord, state: LearnerState) -> None:
    """Move on as a learner says, unless the launcher has decided that the others train without it."""
    if not record.is_out:
        record.state = state


def _add_epoch(record: LearnerRecord, end: EpochEnd) -> None:
    record.seconds += end.seconds
    record.computing += end.computing
    record.waiting_for_data += end.waiting_for_data
    record.waiting_for_peers += end.waiting_for_peers
    record.num_not_finite += end.num_not_finite


def _revived(message: Failed) -> StarlingError:
    """The error that a learner reported, here."""
    kind = getattr(errors, message.error, None)
    if isinstance(kind, type) and issubclass(kind, StarlingError) and kind is not Stopped:
        return kind(message.text)
    return StarlingError(f"{message.error}: {message.text}")
