"""The launcher's record of each learner of a run, from the learner's first start to the end of the run; and the
`Switchboard`, through which launchers and coordinators hear their learners.

A learner keeps its `learner_id` even if it is lost and its process is restarted; its `rank` is its place in the present
membership. The state of a learner is defined here only. It is derived from the learner's messages, the time since the
last one, and what the launcher observes of its process.

    starting ──────────────► training ──► ended
       │                       ▲  │
       └──► ready (a joiner) ──┘  ├──► left     its sync group lost a member
                                  └──► lost     it was killed, was silent for too long, or did not join
    lost, left ──► starting                     its process is restarted

A ready or training learner that has sent nothing for `SILENT_AFTER` seconds is silent until it sends something.
"""

import selectors
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum

from starling import errors
from starling.engines.processes.stalls import Stall
from starling.errors import ProtocolError, StarlingError, Stopped
from starling.launch.messages import (
    Activity,
    CanStop,
    Ended,
    Failed,
    Heartbeat,
    LearnerMessage,
    NewMembership,
    Progress,
    Reached,
    Saved,
    Stretch,
    decode_from_learner,
)
from starling.launch.process import LearnerProcess, signal_name
from starling.timeouts import HEARTBEAT_EVERY, SILENT_AFTER
from starling.training.membership import Membership

Seconds = float
LONGEST_MESSAGE = 1 << 26
"""Length of the longest message in bytes. A learner that sent more without the end of a line would fill this process's
memory."""
_NONE = Membership(-1, ())


class LearnerState(Enum):
    """The state of a learner, as in the diagram above."""

    STARTING = "starting"
    READY = "ready"
    TRAINING = "training"
    ENDED = "ended"
    LEFT = "left"
    LOST = "lost"


_OUT = (LearnerState.LEFT, LearnerState.LOST)


@dataclass
class Attempt:
    """The state of a learner's newest process. Times are on the roster's clock."""

    started_at: float
    doing_since: float
    is_joiner: bool = False
    """Whether the process was started as a joiner."""
    generation: int = -1
    """Generation of the last membership that the process has entered; -1 before the first."""
    arrived: int = -1
    """Generation of the last membership in which the process began to wait for the other members; -1 before the
    first."""
    arrived_at: float = 0.0
    heard_at: float | None = None
    """Time of the process's last message; None before the first."""
    doing: str = "starting"
    """Activity of the process as text."""
    has_computed: bool = False
    """Whether the process has reported progress since it entered a membership."""
    wait: Stall | None = None
    """Current long wait of the process, as last reported."""
    num_unshared: float = 0.0
    """Number of mini-batches whose effect only this process has, as last reported."""
    wait_began_at: float = 0.0
    ended_at: float | None = None
    """Time at which the process ended, or was lost; None while it lives."""

    def does(self, doing: str, now: float) -> None:
        """Record the activity of the process from now on."""
        self.doing, self.doing_since = doing, now
        self.has_computed = self.has_computed or self.generation >= 0


@dataclass
class LearnerRecord:
    """The record of one learner, over all its processes."""

    learner_id: int
    attempt: Attempt
    process: LearnerProcess = field(default_factory=LearnerProcess)
    """Newest process of the learner; in a roster that only follows messages, a process without a connection."""
    state: LearnerState = LearnerState.STARTING
    rank: int | None = None
    """Rank of the learner in the present membership; None if it is not a member."""
    num_steps: int = 0
    """Number of mini-batches that all processes of the learner have computed."""
    num_before: int = 0
    """Number of mini-batches that its earlier processes have computed."""
    num_lost: float = 0.0
    """Number of mini-batches whose effect was lost with its earlier processes."""
    earlier_life: Seconds = 0.0
    """Time for which its earlier processes existed."""
    stopped: Seconds = 0.0
    """Time for which processes had been stopped that were then given up."""
    entering: Seconds = 0.0
    """Time for which its processes started, or agreed on a membership with the others."""
    num_joins: int = 0
    """Number of the learner's processes that have joined the run after the start."""
    newest: Progress | None = None
    """Last progress with gradients."""
    done: Stretch = field(default_factory=Stretch)
    """Work of all processes of the learner, as far as they have reported it."""
    epochs: list[Progress] = field(default_factory=list)
    """Ends of epochs that the learner has reported."""

    @property
    def loss(self) -> float | None:
        """The training loss of the learner's last progress."""
        return None if self.newest is None else self.newest.new.loss

    def report(self, progress: Progress) -> None:
        """Record the learner's progress."""
        self.done.add(progress.new)
        if progress.new.frames:
            self.newest = progress
        if progress.ended_at is not None:
            self.epochs.append(progress)

    @property
    def has_failed(self) -> bool:
        """Whether the learner's process exited with an error or was killed."""
        return bool(self.process.exit_code)

    @property
    def was_killed(self) -> bool:
        """Whether a signal ended the learner's process before it reported an error."""
        return (self.process.exit_code or 0) < 0 and self.process.error is None

    @property
    def is_out(self) -> bool:
        """Whether the others train without the learner."""
        return self.state in _OUT

    @property
    def is_joining(self) -> bool:
        """Whether the learner's process was started as a joiner, and has neither trained nor failed since."""
        return self.attempt.is_joiner and self.attempt.generation < 0 and self.state is not LearnerState.LOST

    @property
    def is_present(self) -> bool:
        """Whether the learner is starting, ready or training."""
        return self.state not in (*_OUT, LearnerState.ENDED)

    def kill(self, because: str = "") -> None:
        """Kill the learner's process, and note the reason."""
        self.process.killed_because = because
        self.process.kill()

    def describe_exit(self) -> str:
        """A text that says how the learner's process ended, and what it last reported."""
        name, last, process = f"learner {self.learner_id}", f"(last reported: {self.attempt.doing})", self.process
        if process.killed_because:
            return f"{name} {process.killed_because} and was killed {last}"
        if self.was_killed:
            how = process.lost or f"was killed by {signal_name(-(process.exit_code or 0))}"
            return f"{name} {how} {last}"
        if process.exit_code == 0:
            return f"{name} exited: its sync group lost a member"
        how = f": {process.error}" if process.error else f" exited with code {process.exit_code} {last}"
        return f"{name}{how}; its log: {process.log}"


@dataclass(frozen=True)
class Loss:
    """The loss of a learner that the others survived; the learner may have joined again since."""

    learner: int
    reason: str
    """Cause of the loss, as text."""
    at: float


@dataclass
class Roster:
    """All learners of a run, by `learner_id`.

    `start`, `announce`, `hear` and `lose` hold `lock` while they change records. The reading methods do not; a thread
    that reads several values which must be consistent must hold `lock` itself.
    """

    world: int
    """Number of learners at the start; 0 if none is known before it comes."""
    clock: Callable[[], float] = time.monotonic
    learners: dict[int, LearnerRecord] = field(default_factory=dict)
    membership: Membership = _NONE
    """Newest membership that was announced."""
    lost: list[Loss] = field(default_factory=list)
    """All losses of learners that trained, in order."""
    saved: str = ""
    """Newest checkpoint."""
    saved_at: float = 0.0
    num_saved: int = 0
    """Number of checkpoints completed so far."""
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    def __post_init__(self) -> None:
        self.began_at = self.announced_at = self.clock()
        for learner_id in range(self.world):
            self.start(learner_id)
        if self.world:
            self.announce(Membership(0, tuple(range(self.world))))

    @property
    def members(self) -> tuple[int, ...]:
        """The members of the newest membership, in rank order."""
        return self.membership.members

    @property
    def generation(self) -> int:
        """The generation of the newest membership that a learner has entered; -1 before the first."""
        return max((each.attempt.generation for each in self.learners.values()), default=-1)

    def start(self, learner_id: int, process: LearnerProcess | None = None, is_joiner: bool = False) -> LearnerRecord:
        """Record that a process was started for a learner: its first one or a restart."""
        with self.lock:
            now = self.clock()
            attempt = Attempt(now, now, is_joiner)
            record = self.learners.setdefault(learner_id, LearnerRecord(learner_id, attempt))
            if record.attempt is not attempt:
                record.earlier_life = self.life(record)
            record.process, record.attempt = process or LearnerProcess(), attempt
            record.state, record.num_before = LearnerState.STARTING, record.num_steps
            return record

    def announce(self, membership: Membership) -> None:
        """Replace the present membership. Its members that are not in the new membership leave."""
        ranks = {learner_id: rank for rank, learner_id in enumerate(membership.members)}
        with self.lock:
            for record in self.learners.values():
                rank = ranks.get(record.learner_id)
                if rank is None and record.rank is not None and record.state is not LearnerState.LOST:
                    record.state = LearnerState.LEFT
                    self._end(record)
                record.rank = rank
            self.membership, self.announced_at = membership, self.clock()

    def hear(self, learner_id: int, message: LearnerMessage) -> None:
        """Record a message from a learner."""
        with self.lock:
            record = self.learners.get(learner_id) or self.start(learner_id)
            attempt, now = record.attempt, self.clock()
            attempt.heard_at = now
            match message:
                case Heartbeat() if message.num_steps is not None:
                    record.num_steps = record.num_before + message.num_steps
                    if message.num_steps and record.state is LearnerState.STARTING:
                        record.state = LearnerState.TRAINING  # an unwatched learner reports no membership
                    attempt.wait, attempt.num_unshared = message.stall, message.num_unshared
                    attempt.wait_began_at = now - message.stall.seconds if message.stall else 0.0
                case Progress():
                    epoch = message.epoch + 1
                    is_under_way = message.ended_at is None
                    place = f"batch {message.batch + 1} of epoch {epoch}"
                    attempt.does(f"computing {place}" if is_under_way else f"saving after epoch {epoch}", now)
                    record.report(message)
                case Activity() if message.doing:
                    attempt.does(message.doing, now)
                case Reached("ready"):
                    _advance(record, LearnerState.READY)
                case Reached("arrived", generation):
                    attempt.arrived, attempt.arrived_at = generation, now
                case Reached("entered", generation):
                    record.num_joins += attempt.generation < 0 < generation
                    record.entering += now - (attempt.started_at if attempt.generation < 0 else self.announced_at)
                    attempt.generation = generation
                    _advance(record, LearnerState.TRAINING)
                case Ended():
                    attempt.doing, attempt.doing_since = "ending", now
                    record.num_steps, attempt.wait = record.num_before + message.num_steps, None
                    attempt.num_unshared = 0.0  # all learners agree at the end
                    self._end(record)
                    _advance(record, LearnerState.ENDED)
                case Failed():
                    record.process.error = _error_from(message)
                case Saved():
                    self.saved, self.saved_at, self.num_saved = message.folder, now, self.num_saved + 1
                case CanStop():
                    record.process.can_stop = True
                case _:
                    pass

    def lose(self, learner_id: int, reason: str = "") -> None:
        """Record that a learner was lost, and the others train without it. A joiner that never trained has no `reason`,
        and does not count among `lost`."""
        with self.lock:
            if (record := self.learners.get(learner_id)) is not None:  # it has started
                record.state, record.rank, record.attempt.wait = LearnerState.LOST, None, None
                self._end(record)
                if reason:
                    self.lost.append(Loss(learner_id, reason, self.clock()))

    def life(self, record: LearnerRecord) -> Seconds:
        """The time for which a learner's processes have existed."""
        attempt = record.attempt
        ended_at = self.clock() if attempt.ended_at is None else attempt.ended_at
        return record.earlier_life + ended_at - attempt.started_at

    def _end(self, record: LearnerRecord) -> None:
        if record.attempt.ended_at is None:
            record.attempt.ended_at = self.clock()
            record.num_lost += record.attempt.num_unshared

    def records(self, learner_ids: Collection[int]) -> list[LearnerRecord]:
        """The records of these learners, without those that were lost or left."""
        chosen = set(learner_ids)
        return [each for each in self.learners.values() if not each.is_out and each.learner_id in chosen]

    def joining(self, is_member: bool) -> list[LearnerRecord]:
        """The joiners under way, in the order in which they were started: those for which the other members wait, or
        those that are not members yet."""
        found = [each for each in self.learners.values() if each.is_joining and (each.rank is not None) is is_member]
        return sorted(found, key=lambda each: each.attempt.started_at)

    def waiting(self) -> dict[int, Stall]:
        """The long waits of learners, by `learner_id`."""
        return {each.learner_id: wait for each in self.present() if (wait := each.attempt.wait) is not None}

    def present(self) -> list[LearnerRecord]:
        """The learners that are starting, ready or training."""
        return [each for each in self.learners.values() if each.is_present]

    def silence(self, record: LearnerRecord) -> Seconds | None:
        """Return the time for which a ready or training learner has been silent, or None if it is at most
        `SILENT_AFTER`, and in other states."""
        if record.state not in (LearnerState.READY, LearnerState.TRAINING):
            return None
        silence = self.since_heard(record)
        return silence if silence > SILENT_AFTER else None

    def since_heard(self, record: LearnerRecord) -> Seconds:
        """The time since a learner sent anything, or since its process was started."""
        attempt = record.attempt
        return self.clock() - (attempt.started_at if attempt.heard_at is None else attempt.heard_at)

    def kill_if_silent(self, record: LearnerRecord, limit: Seconds) -> None:
        """Kill a learner that has sent nothing for longer than `limit`."""
        if (silence := self.since_heard(record)) > limit and record.process.is_running:
            with self.lock:
                record.stopped += max(0.0, silence - HEARTBEAT_EVERY)
            record.kill(f"sent no heartbeat for {silence:.1f} s")


def _advance(record: LearnerRecord, state: LearnerState) -> None:
    """Set the state that a learner reports, unless the others already train without it."""
    if not record.is_out:
        record.state = state


def _error_from(message: Failed) -> StarlingError:
    """Return the error that a learner reported. It has the same class if that is one of Starling's error classes."""
    kind = getattr(errors, message.error, None)
    if isinstance(kind, type) and issubclass(kind, StarlingError) and kind is not Stopped:
        return kind(message.text)
    return StarlingError(f"{message.error}: {message.text}")


class Switchboard:
    """Hears the learners of a roster, each through its newest process's line, and announces memberships to them.

    It waits for no single learner. `hear` is called with each message, its sender, and whether that is the sender's
    newest process; it keeps the roster up to date. A process that sends an invalid message is killed.
    """

    def __init__(self, roster: Roster, hear: Callable[[LearnerRecord, LearnerMessage, bool], None]) -> None:
        self._roster, self._hear = roster, hear
        self._selector = selectors.DefaultSelector()
        self._has_one_closed = False
        """Whether a learner has closed its line since `read_for` was called."""

    def close(self) -> None:
        """Stop listening. The lines stay open."""
        self._selector.close()

    def announce(self, members: Sequence[int], reason: str) -> Membership:
        """Announce the next membership to its members, and to those of the present one, which may have to leave."""
        roster = self._roster
        told = [each for each in roster.learners.values() if each.rank is not None or each.learner_id in members]
        membership = Membership(roster.membership.number + 1, tuple(members), reason)
        roster.announce(membership)
        for record in told:
            record.process.line.tell(NewMembership(membership))
        return membership

    def read_for(self, seconds: Seconds) -> None:
        """Handle messages for `seconds`, or until a learner closes its line, which may mean that it was lost.

        A supervisor's other work takes time in proportion to the number of learners, so it must not be done for each
        message.
        """
        self._register()
        self._has_one_closed = False
        begin = now = self._roster.clock()
        while not self._has_one_closed and now - begin < seconds:
            self.read(seconds - (now - begin))
            now = self._roster.clock()

    def read(self, timeout: Seconds) -> bool:
        """Handle new messages, and return whether any data arrived."""
        ready = self._selector.select(timeout)
        for key, _ in ready:
            self._read_from(*key.data)
        return bool(ready)

    def read_rest(self, record: LearnerRecord) -> None:
        """Handle the last messages of a learner that has exited."""
        self._register()
        while record.process.line.fileno() >= 0 and self._read_from(record, record.process):
            pass

    def _register(self) -> None:
        """Prepare to read from each learner's newest process that is connected, and send it the messages for which
        there was no room."""
        with self._roster.lock:
            for record in self._roster.learners.values():
                line = record.process.line
                if line.untold:
                    line.tell_rest()
                if (number := line.fileno()) < 0:
                    continue
                if (known := self._selector.get_map().get(number)) is not None:
                    if known.fileobj is line:
                        continue
                    self._selector.unregister(number)  # a line that was closed before its end was read
                self._selector.register(line, selectors.EVENT_READ, (record, record.process))

    def _read_from(self, record: LearnerRecord, process: LearnerProcess) -> bool:
        """Handle the messages that have arrived from one learner, and return whether there were any. At end-of-file,
        close the line."""
        try:
            lines = process.line.hear()
            if len(process.line.unread) > LONGEST_MESSAGE:
                raise ProtocolError(
                    f"learner {record.learner_id} sent a message of more than {LONGEST_MESSAGE >> 20} MiB; see its "
                    f"log: {process.log}"
                )
            messages = [decode_from_learner(line, record.learner_id) for line in lines]
        except BlockingIOError:
            return False
        except (EOFError, ProtocolError) as error:
            self._has_one_closed = True
            self._selector.unregister(process.line)
            process.line.close()
            if isinstance(error, ProtocolError):
                process.error = error
                process.kill()
            return True
        is_newest = process is record.process  # and not the previous one of a learner that was restarted
        if is_newest:
            record.attempt.heard_at = self._roster.clock()
        for message in messages:
            self._hear(record, message, is_newest)
        return True
