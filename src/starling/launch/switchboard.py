"""The common part of a launcher and a coordinator: the connections to their learners, and the roster of these."""

import selectors
from collections.abc import Callable, Sequence

from starling.errors import ProtocolError
from starling.launch.messages import LearnerMessage, NewMembership, decode_from_learner
from starling.launch.process import LearnerProcess
from starling.launch.roster import LearnerRecord, Roster
from starling.training.membership import Membership

LONGEST_MESSAGE = 1 << 26
"""Length of the longest message in bytes. A learner that sent more without the end of a line would fill this process's
memory."""
Seconds = float


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
        """Handle new messages; return whether any data came."""
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
        """Handle the messages that have come from one learner; return whether any have. At end-of-file, close the
        line."""
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
