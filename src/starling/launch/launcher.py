"""Starts learner processes, by default on this machine, watches them, and leaves no process behind.

If a learner dies, or is killed because it sent no heartbeat for too long, the other learners may be able to continue.
The launcher then announces the next membership to them.
"""

import shutil
import signal
import socket
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from starling.engines.processes import run_token
from starling.engines.processes.forks import own_connections, owned
from starling.errors import ConfigError, PeerLost, StarlingError, Stopped
from starling.launch.coordinator import listen, store_at
from starling.launch.joiners import Changes, Joiners
from starling.launch.messages import LearnerMessage, Signalled, Stop
from starling.launch.process import (
    LearnerProcess,
    Machines,
    Program,
    Site,
    end,
    end_loaders,
    end_now,
    on_stop_signal,
    preloading,
    scratch_folder,
    signal_name,
    start,
)
from starling.launch.rendezvous import loopback_interface
from starling.launch.roster import LearnerRecord, Loss, Roster, Switchboard
from starling.timeouts import ENTRY, EXPLANATION, JOINER_SILENT, NODE_LOSS, READ, STOP, Seconds

NO_CHANGES = Changes()
OnMessage = Callable[[int, LearnerMessage], None]


@contextmanager
def loopback_store(address: str = "127.0.0.1") -> Generator[int, None, None]:
    """Run a store that listens only on the interface with `address`, by default the loopback, and yield its port."""
    with owned(listen(address, 0)) as listener:
        with own_connections():
            store = store_at(listener, address)
        yield int(listener.getsockname()[1])
        del store


@contextmanager
def this_machine(program: Program, preload: Sequence[str] = ()) -> Generator[Site, None, None]:
    """Starts learners as processes on this machine, which find the modules in `preload` imported. Their store and
    sockets use its loopback interface."""
    with preloading(preload) as preloaded, loopback_store() as port:
        scratch = scratch_folder()

        def begin(learner_id: int, joins: bool) -> LearnerProcess:
            place = {
                "LOCAL_RANK": learner_id,
                "LOCAL_WORLD_SIZE": program.world,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "GLOO_SOCKET_IFNAME": loopback_interface(),
            }
            ours, theirs = socket.socketpair()
            with theirs:
                process = start(program, learner_id, joins, scratch, place, theirs, preloaded=preloaded)
            process.line.connection = owned(ours)
            return process

        def abandon() -> None:
            if preloaded:
                preloaded.close()
            shutil.rmtree(scratch, ignore_errors=True)

        yield Site(begin, abandon)


def launch(
    command: Sequence[str],
    world: int,
    log_folder: Path,
    on_message: OnMessage = lambda learner_id, message: None,
    changes: Changes = NO_CHANGES,
    roster: Roster | None = None,
    machines: Machines = this_machine,
) -> list[Loss]:
    """Run `command` in `world` learner processes until all have exited, and return the losses that the others survived.

    A learner's output is written to `log_folder/learner-<id>.log`. `on_message` is called with the messages that the
    learner sends through its `Link`. If a learner fails, the other learners are ended and the failed learner's error is
    raised.

    Args:
        command: The command line of a learner.
        world: The number of learners at the start.
        log_folder: The folder of the logs; created if it is missing.
        on_message: A function that is called with the id of the sender and each message.
        changes: Whether the other learners continue when a learner is killed, and which learners may join or be
            restarted.
        roster: The roster in which the learners are recorded. Pass a roster if you want to read it during the run.
        machines: The machines on which the learners run.

    Raises:
        PeerLost: A learner was killed, and the others cannot continue.
        Stopped: This process received SIGINT or SIGTERM. A second signal ends everything at once.
        StarlingError: A learner failed.
    """
    log_folder.mkdir(parents=True, exist_ok=True)
    roster = roster or Roster(world)
    program = Program(tuple(command), world, log_folder, run_token.new_token(), changes.on_loss != "stop")
    with machines(program) as site, ExitStack() as stack:
        stack.callback(site.abandon)
        supervisor = Supervisor(site, roster, changes, on_message)
        with on_stop_signal(supervisor.received.append, supervisor.kill_all):
            try:
                for learner_id in range(world):
                    supervisor.start(learner_id, joins=False)
                supervisor.until_all_ended()
            finally:
                end(supervisor.processes)
    return roster.lost


class Supervisor:
    """Starts learners at `site`, and watches the learners in the roster until all have exited: reads their messages,
    decides which are lost, and announces memberships. The other arguments are those of `launch`."""

    def __init__(self, site: Site, roster: Roster, changes: Changes, on_message: OnMessage) -> None:
        self.processes: list[LearnerProcess] = []
        """All processes that were started."""
        self.received: list[int] = []
        """Stop signals that this process, or one of its learners, has received."""
        self._site, self._roster, self._changes, self._on_message = site, roster, changes, on_message
        self._switchboard = Switchboard(roster, self._hear)
        self._joiners = Joiners(changes, roster, self.start)
        self._asked_to_stop: Seconds | None = None
        self._exited: set[int] = set()
        """Learners that had exited, and were not yet recorded as lost, when exits were last handled."""
        self._node_lost_at: Seconds | None = None
        """Time at which the first learner of a lost node was noticed, while others on that node still seem to run."""

    def start(self, learner_id: int, joins: bool = True) -> None:
        """Start a process for a learner that has no running process."""
        process = self._site.start(learner_id, joins)
        self.processes.append(process)
        self._roster.start(learner_id, process, joins)

    def kill_all(self, number: int) -> None:
        """Kill all learners, and end this process, after a second signal."""
        for process in self.processes:
            process.signal(signal.SIGKILL)  # a stopped process would not notice that its link is closed
            process.signal_group(signal.SIGTERM)
        self._site.abandon()
        end_now(number)

    def until_all_ended(self) -> None:
        """Handle messages until all processes have exited. Raises the first error that the run did not survive."""
        with closing(self._switchboard):
            while any(record.process.is_running for record in self._counted()):
                self._switchboard.read_for(READ)
                if self.received:
                    self._stop(self.received[0])
                elif self._asked_to_stop is not None or self._changes.is_enough():
                    self._stop(signal.SIGTERM)
                self._kill_silent()
                if not self._handle_exits():
                    break
                self._admit_joiners()
            deadline = self._roster.clock() + EXPLANATION  # learners that still run may send messages without end
            while (self._switchboard.read(0.0) or _is_unexplained(self._counted())) and self._roster.clock() < deadline:
                self._switchboard.read_for(READ)
        failed = [record for record in self._counted() if record.has_failed]
        if failed:
            raise _cause(failed)
        self._joiners.close()
        if self.received:
            raise Stopped(f"stopped by {signal_name(self.received[0])}", self.received[0], has_saved=True)

    def _stop(self, number: int) -> None:
        """Tell the learners to save and end together. Raise `Stopped` if they cannot do so, or take too long."""
        name, now = signal_name(number), self._roster.clock()
        if self._asked_to_stop is None:
            if not any(record.process.can_stop for record in self._counted()):
                raise Stopped(f"stopped by {name}; the learners were killed", number)
            self._asked_to_stop = now
            for record in self._counted():
                record.process.line.tell(Stop(number))
        elif now - self._asked_to_stop > STOP:
            raise Stopped(f"stopped by {name}; the learners had not saved after {STOP:g} s", number)

    def _counted(self) -> list[LearnerRecord]:
        """The learners whose failure is a failure of the run. Joiners, and learners that the others already train
        without, do not belong to them."""
        return [each for each in self._roster.learners.values() if not each.is_out and not each.is_joining]

    def _handle_exits(self) -> bool:
        """If learners have failed, announce a membership without them. Return False if the run cannot survive their
        loss."""
        exited = [
            record
            for record in self._roster.learners.values()
            if (record.is_joining or not record.is_out) and not record.process.is_running
        ]
        self._exited = {record.learner_id for record in exited}
        deadline = self._roster.clock() + READ  # learners that still run may send messages without end
        while exited and self._switchboard.read(0.0) and self._roster.clock() < deadline:
            pass
        for record in exited:
            self._switchboard.read_rest(record)
        failed = [record for record in exited if record.has_failed and not record.is_joining]
        if self._others_may_follow(failed):
            return True
        if failed and (
            self._changes.on_loss == "stop"
            or not all(record.was_killed for record in failed)
            or any(record.attempt.generation < 0 for record in self._counted())  # not all have entered a membership yet
        ):
            return False
        never_came = self._joiners.settle(self._exited)
        return self._continue_without(failed, never_came) if failed or never_came else True

    def _others_may_follow(self, failed: list[LearnerRecord]) -> bool:
        """Whether to wait for the other learners of a lost node, so that one new membership excludes all of them."""
        nodes = {each.process.node for each in failed if each.process.lost} - {""}
        if not any(each.process.node in nodes and each.process.is_running for each in self._roster.learners.values()):
            self._node_lost_at = None
            return False
        now = self._roster.clock()
        self._node_lost_at = now if self._node_lost_at is None else self._node_lost_at
        return now - self._node_lost_at < NODE_LOSS

    def _continue_without(self, failed: list[LearnerRecord], never_came: list[int]) -> bool:
        """Announce a membership without these learners. Return False if no other learner has a state from which to
        continue."""
        before, out = self._roster.members, [record.learner_id for record in failed]
        reasons = [record.describe_exit() for record in failed]
        reason = "; ".join([*reasons, *(f"learner {learner_id} did not join" for learner_id in never_came)])
        if not any(
            each.attempt.generation >= 0 and each.learner_id not in out for each in self._roster.records(before)
        ):
            return False
        try:
            members = self._changes.succession(before, [*out, *never_came], ())
        except (ConfigError, PeerLost) as error:
            raise PeerLost(f"{reason}; the run cannot continue: {error}") from error
        num_lost = len(self._roster.lost)
        for learner_id, why in zip(out, reasons, strict=True):
            self._roster.lose(learner_id, why)
        self._switchboard.announce(members, reason)
        end_loaders([record.process for record in failed])
        for loss in self._roster.lost[num_lost:]:
            self._changes.on_lost(loss)
        gone = [self._roster.learners[each] for each in before if each not in (*members, *never_came)]
        wanted = [record.learner_id for record in gone if not record.is_joining]  # before some of these are dropped
        self._joiners.drop_unusable()
        self._replace(wanted, failed)
        return True

    def _replace(self, gone: list[int], failed: list[LearnerRecord]) -> None:
        """Request restarts of the learners in `gone`, unless the run is about to stop, or one of the failed learners
        was a joiner that had computed nothing."""
        if self._changes.on_loss != "replace" or self._asked_to_stop is not None:
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
        """Start requested joiners, and announce a membership with those that are ready. The announcement waits until
        all members have entered the newest membership."""
        if self._asked_to_stop is not None:
            self._joiners.wake()  # they could not save otherwise
        if self._asked_to_stop is not None or any(record.attempt.generation < 0 for record in self._counted()):
            return
        here = self._roster.records(self._roster.members)
        is_ending = any(record.learner_id in self._exited for record in here)
        self._joiners.tend(is_ending)
        if is_ending or any(record.attempt.generation < self._roster.membership.number for record in here):
            return
        joining, members = self._joiners.ready()
        if joining:
            self._switchboard.announce(members, f"learner {', '.join(map(str, joining))} joined")

    def _kill_silent(self) -> None:
        """Kill learners that have sent nothing for too long, and joiners that take too long to meet the others."""
        roster, generation = self._roster, self._roster.membership.number
        # a learner that has not entered a membership yet loads libraries, which may delay its heartbeats
        met = [record for record in self._counted() if record.attempt.generation >= 0]
        for record in (*met, *roster.joining(is_member=False)):
            roster.kill_if_silent(record, self._changes.silence_seconds)
        others = [record.attempt for record in roster.records(roster.members) if not record.is_joining]
        waits = (roster.clock() - each.arrived_at if each.arrived >= generation else 0.0 for each in others)
        waiting = min(waits, default=0.0)
        for record in roster.joining(is_member=True):
            roster.kill_if_silent(record, min(JOINER_SILENT, self._changes.silence_seconds))
            patience = ENTRY if record.attempt.arrived < generation else max(ENTRY, self._changes.silence_seconds)
            if waiting > patience and record.process.is_running:
                record.kill(f"did not meet the others within {patience:g} s")

    def _hear(self, record: LearnerRecord, message: LearnerMessage, is_newest: bool) -> None:
        was_joining = record.is_joining
        if is_newest:
            self._roster.hear(record.learner_id, message)
        if isinstance(message, Signalled):
            self.received.append(message.signal_number)
        self._on_message(record.learner_id, message)
        if was_joining and not record.is_joining:
            self._joiners.joined(record.learner_id)


def _is_unexplained(records: list[LearnerRecord]) -> bool:
    """Whether all failed learners failed because they lost another learner."""
    failed = [record for record in records if record.has_failed]
    return bool(failed) and all(isinstance(record.process.error, PeerLost) for record in failed)


def _cause(failed: list[LearnerRecord]) -> StarlingError:
    """Return the most likely cause among the failures. In order of preference, it is a kill, an exit without a message,
    an error other than the loss of a peer, or any other failure."""
    for record in failed:
        if record.was_killed:
            return PeerLost(f"{record.describe_exit()}; its log: {record.process.log}")
    first = min(failed, key=lambda each: (each.process.error is not None, isinstance(each.process.error, PeerLost)))
    return first.process.error or StarlingError(first.describe_exit())
