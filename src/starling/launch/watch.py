"""Watches the learners of a launcher: reads their messages, decides which are lost, and announces memberships."""

import selectors
import signal
import socket
from collections.abc import Callable
from itertools import chain

from starling.errors import ConfigError, PeerLost, ProtocolError, StarlingError, Stopped
from starling.launch.joiners import Changes, Joiners
from starling.launch.messages import LearnerMessage, NewMembership, Signalled, Stop, decode_from_learner
from starling.launch.process import LearnerProcess, end_loaders, signal_name
from starling.launch.roster import LearnerRecord, Loss, Roster
from starling.timeouts import ENTRY, EXPLANATION, JOINER_SILENT, NODE_LOSS, READ, STOP

Seconds = float
OnMessage = Callable[[int, LearnerMessage], None]
LONGEST_MESSAGE = 1 << 26
"""Bytes. A learner that sends more without the end of a line would fill the launcher's memory."""


class Watch:
    """Watches the learners of a roster until all have exited. `received` lists the signals to this process."""

    def __init__(
        self,
        roster: Roster,
        on_message: OnMessage,
        on_loss: Callable[[Loss], None] | None,
        silence_seconds: Seconds,
        received: "list[int]",
        changes: Changes,
        joiners: Joiners,
        is_enough: Callable[[], bool] = lambda: False,
    ) -> None:
        self._roster = roster
        self._on_message = on_message
        self._on_loss = on_loss
        self._silence_seconds = silence_seconds
        self._received = received
        self._received_by_learners: list[int] = []
        self._changes = changes
        self._joiners = joiners
        self._is_enough = is_enough
        self._all_here: float | None = None
        """Since when all members of the newest membership, except joiners, have been waiting for the others."""
        self._asked_to_stop: Seconds | None = None
        self._selector = selectors.DefaultSelector()
        self._has_one_closed = False
        """Whether a learner has closed its line since the launcher looked after its processes."""
        self._exited: set[int] = set()
        """The learners that had exited then, and not been lost before."""
        self._node_lost_at: Seconds | None = None
        """When the first learner of a lost node was noticed, while others on that node still seem to run."""

    def until_all_ended(self) -> None:
        """Handle messages until all processes have exited. Raises the first error that the run did not survive."""
        with self._selector:
            while any(record.is_running for record in self._counted()):
                self._read_for(READ)
                if number := self._signal():
                    self._stop(number)
                elif self._asked_to_stop is not None or self._is_enough():
                    self._stop(signal.SIGTERM)
                self._kill_silent()
                if not self._handle_exits():
                    break
                self._admit_joiners()
            deadline = self._roster.clock() + EXPLANATION  # learners that still run may send messages without end
            while (self._read(0.0) or _is_unexplained(self._counted())) and self._roster.clock() < deadline:
                self._register()
                self._read(READ)
        failed = [record for record in self._counted() if record.has_failed]
        if failed:
            raise _cause(failed)
        self._joiners.close(self._members)
        if number := self._signal():
            raise Stopped(f"stopped by {signal_name(number)}", number, has_saved=True)

    @property
    def _members(self) -> tuple[int, ...]:
        return self._roster.membership.members

    def _signal(self) -> int | None:
        """The first stop signal to the launcher, or else to one of its learners."""
        return next(chain(self._received, self._received_by_learners), None)

    def _stop(self, number: int) -> None:
        """Tell the learners to save and end together; raise `Stopped` if they are not able to, or take too long."""
        name, now = signal_name(number), self._roster.clock()
        if self._asked_to_stop is None:
            if not any(record.process is not None and record.process.can_stop for record in self._counted()):
                raise Stopped(f"stopped by {name}; the learners were killed", number)
            self._asked_to_stop = now
            for record in self._counted():
                record.tell(Stop(number))
        elif now - self._asked_to_stop > STOP:
            raise Stopped(f"stopped by {name}; the learners had not saved after {STOP:g} s", number)

    def _counted(self) -> list[LearnerRecord]:
        """The learners whose failure is a failure of the run: not those that the others train without, and not
        joiners."""
        return [each for each in self._roster.learners.values() if not each.is_out and each not in self._joiners]

    def _handle_exits(self) -> bool:
        """Announce a membership without the learners that have failed, if any; return False if the run cannot survive
        their loss."""
        exited = [
            record
            for record in self._roster.learners.values()
            if (not record.is_out or record in self._joiners) and not record.is_running
        ]
        self._exited = {record.learner_id for record in exited}
        deadline = self._roster.clock() + READ  # learners that still run may send messages without end
        while exited and self._read(0.0) and self._roster.clock() < deadline:
            pass
        for record in exited:
            self._read_rest(record)
            if record.attempt.error is None and record.process is not None:
                record.attempt.error = record.process.error
        failed = [record for record in exited if record.has_failed and record not in self._joiners]
        if self._others_may_follow(failed):
            return True
        if failed and (
            self._on_loss is None
            or not all(record.was_killed for record in failed)
            or any(record.attempt.generation < 0 for record in self._counted())  # not all have entered a membership yet
        ):
            return False
        never_came = self._joiners.settle(self._members, exited)
        if failed or never_came:
            return self._continue_without(failed, never_came)
        return True

    def _others_may_follow(self, failed: list[LearnerRecord]) -> bool:
        """Whether to wait for the other learners of a lost node, so that one new membership is without all of them."""
        nodes = {each.process.node for each in failed if each.process is not None and each.process.lost} - {""}
        if not nodes:
            self._node_lost_at = None
            return False
        running = [each.process for each in self._roster.learners.values() if each.is_running]
        if not any(process is not None and process.node in nodes for process in running):
            self._node_lost_at = None
            return False
        now = self._roster.clock()
        self._node_lost_at = now if self._node_lost_at is None else self._node_lost_at
        return now - self._node_lost_at < NODE_LOSS

    def _continue_without(self, failed: list[LearnerRecord], never_came: list[int]) -> bool:
        """Announce a membership without these learners; return False if no other has a state to continue from."""
        before, reasons = self._members, [record.describe_death() for record in failed]
        expected = {record.learner_id for record in self._joiners.expected(before)}
        out = {record.learner_id for record in failed}
        reason = "; ".join([*reasons, *(f"learner {learner_id} did not join" for learner_id in never_came)])
        lost = [*(record.learner_id for record in failed), *never_came]
        if not any(
            each.attempt.generation >= 0 and each.learner_id not in out for each in self._roster.records(before)
        ):
            return False
        try:
            members = self._changes.succession(before, lost, ())
        except (ConfigError, PeerLost) as error:
            raise PeerLost(f"{reason}; the run cannot continue: {error}") from error
        for record, why in zip(failed, reasons, strict=True):
            self._roster.lose(record.learner_id, why)
        self._announce(members, reason)
        end_loaders([record.process for record in failed if record.process is not None])
        for loss in self._roster.lost[len(self._roster.lost) - len(failed) :]:
            if self._on_loss is not None:
                self._on_loss(loss)
        self._joiners.drop_unusable(self._members)
        kept = {*members, *never_came, *expected}
        self._replace([each for each in before if each not in kept], failed)
        return True

    def _replace(self, gone: list[int], failed: list[LearnerRecord]) -> None:
        """Request restarts of the learners in `gone`, unless a failed one was a joiner that had computed nothing, or
        the run is about to stop."""
        if not self._changes.replaces or self._asked_to_stop is not None:
            return
        idle = [record for record in failed if record.attempt.is_joiner and not record.attempt.has_computed]
        for record in idle:
            self._changes.say(
                f"learner {record.learner_id} is not restarted, because it had computed nothing since it joined"
            )
        if not idle and gone:
            self._changes.say(f"learner {', '.join(map(str, gone))}: restarting")
            self._joiners.want(gone)

    def _admit_joiners(self) -> None:
        """Start requested joiners, and announce a membership with those that are ready. Waits until all members have
        entered the newest membership."""
        if self._asked_to_stop is not None or any(record.attempt.generation < 0 for record in self._counted()):
            return
        here = self._roster.records(self._members)
        is_ending = any(record.learner_id in self._exited for record in here)
        self._joiners.tend(self._members, is_ending)
        if is_ending or any(record.attempt.generation < self._roster.membership.generation for record in here):
            return
        joining, members = self._joiners.ready(self._members)
        if joining:
            self._announce(members, f"learner {', '.join(map(str, joining))} joined")

    def _announce(self, members: tuple[int, ...], reason: str) -> None:
        """Announce a new membership to its members, and to those of the previous one, which may have to leave."""
        told = self._roster.records({*self._members, *members})
        membership = NewMembership(self._roster.membership.generation + 1, members, reason)
        self._all_here = None
        self._roster.announce(membership)
        for record in told:
            record.tell(membership)

    def _kill_silent(self) -> None:
        """Kill learners that have sent nothing for too long, and joiners that take too long to meet the others."""
        roster, generation = self._roster, self._roster.membership.generation
        expected = self._joiners.expected(self._members)
        # a learner that has not entered a membership yet loads libraries, which may delay its heartbeats
        met = [record for record in self._counted() if record.attempt.generation >= 0]
        for record in (*met, *self._joiners.waiting(self._members)):
            if (silence := roster.since_heard(record)) > self._silence_seconds and record.is_running:
                record.kill(_silent_for(silence))
        expected_ids = {record.learner_id for record in expected}
        others = [record for record in roster.records(self._members) if record.learner_id not in expected_ids]
        if not all(max(record.attempt.arrived, record.attempt.generation) >= generation for record in others):
            self._all_here = None
        elif self._all_here is None:
            self._all_here = roster.clock()
        for record in expected:
            patience = ENTRY if record.attempt.arrived < generation else max(ENTRY, self._silence_seconds)
            if not record.is_running:
                continue
            if (silence := roster.since_heard(record)) > min(JOINER_SILENT, self._silence_seconds):
                record.kill(_silent_for(silence))
            elif self._all_here is not None and roster.clock() - self._all_here > patience:
                record.kill(f"did not meet the others within {patience:g} s")

    def _read_for(self, seconds: Seconds) -> None:
        """Handle messages for so long, or until a learner closes its line, which may mean that it was lost.

        All else that the launcher does takes time in proportion to the number of learners: it must not do so for each
        message.
        """
        self._register()
        for record in self._roster.learners.values():
            if record.process is not None and record.process.untold:
                record.process.tell_rest()
        self._has_one_closed = False
        begin = now = self._roster.clock()
        while not self._has_one_closed and now - begin < seconds:
            self._read(seconds - (now - begin))
            now = self._roster.clock()

    def _register(self) -> None:
        """Read the messages of each learner's newest process, once it is connected."""
        for record in self._roster.learners.values():
            process = record.process
            if process is None or process.line is None or process.is_read or process.line.fileno() < 0:
                continue
            process.is_read = True
            if process.line.fileno() in self._selector.get_map():  # of a line that was closed before its end was read
                self._selector.unregister(process.line.fileno())
            self._selector.register(process.line, selectors.EVENT_READ, (process.line, record, process))

    def _read(self, timeout: Seconds) -> bool:
        """Handle new messages from learners; return whether any data came."""
        ready = self._selector.select(timeout)
        for key, _ in ready:
            self._read_from(*key.data)
        return bool(ready)

    def _read_rest(self, record: LearnerRecord) -> None:
        """Handle the last messages of a learner that has exited."""
        process = record.process
        if process is not None and process.line is not None and process.is_read:
            while process.line.fileno() >= 0 and self._read_from(process.line, record, process):
                pass

    def _read_from(self, line: socket.socket, record: LearnerRecord, process: LearnerProcess) -> bool:
        """Handle what has come from one learner; return whether anything has. At end-of-file, close the socket."""
        try:
            received = line.recv(65536, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:  # it was reset, or its machine does not answer any more
            received = b""
        if not received:
            self._has_one_closed = True
            self._selector.unregister(line)
            process.hang_up()
            return True
        is_newest = process is record.process  # and not the previous one of a learner that was restarted
        if is_newest:
            record.attempt.heard_at = self._roster.clock()
        process.unread += received
        if b"\n" not in received and len(process.unread) > LONGEST_MESSAGE:
            raise ProtocolError(
                f"learner {record.learner_id} sent a message of more than {LONGEST_MESSAGE >> 20} MiB; see its "
                f"log: {record.log}"
            )
        if b"\n" in received:
            *lines, process.unread = process.unread.split(b"\n")
            for text in lines:
                message = decode_from_learner(bytes(text), record.learner_id)
                if is_newest:
                    self._roster.hear(record.learner_id, message)
                if isinstance(message, Signalled):
                    self._received_by_learners.append(message.signal_number)
                self._on_message(record.learner_id, message)
        return True


def _silent_for(silence: Seconds) -> str:
    return f"sent no heartbeat for {silence:.1f} s"


def _is_unexplained(records: list[LearnerRecord]) -> bool:
    """Whether all failed learners failed because they lost another one."""
    failed = [record for record in records if record.has_failed]
    return bool(failed) and all(isinstance(record.attempt.error, PeerLost) for record in failed)


def _cause(failed: list[LearnerRecord]) -> StarlingError:
    """The most likely cause among failures: a kill, else an exit without a message, else an error other than the loss
    of a peer, else any."""
    for record in failed:
        if record.was_killed:
            return PeerLost(f"{record.describe_death()}; its log: {record.log}")
    for record in failed:
        if record.attempt.error is None and record.process is not None:
            return StarlingError(
                f"learner {record.learner_id} exited with code {record.process.exit_code} while "
                f"{record.attempt.doing}; its log: {record.log}"
            )
    own = [record for record in failed if not isinstance(record.attempt.error, PeerLost)]
    first = (own or failed)[0]
    return first.attempt.error or StarlingError(f"learner {first.learner_id} failed; its log: {first.log}")
