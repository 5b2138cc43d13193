"""The process that holds the store and announces memberships for loops joined with `on_loss="continue"`.

It outlives every learner: learner 0 starts it detached, and it ends with the last learner, so that any of them may be
lost. It never starts or kills a learner. A learner is lost when its connection closes or is silent for too long. Only
learners that reach this process can continue or finish, so two halves of a split network never both do.
"""

import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Generator
from contextlib import closing, contextmanager
from subprocess import DEVNULL, Popen
from typing import TYPE_CHECKING

from starling.engines.processes.run_token import own_token
from starling.errors import ProtocolError
from starling.launch.link import Line, letting_in
from starling.launch.messages import Ended, Greeted, LearnerMessage
from starling.launch.process import LearnerProcess
from starling.launch.roster import LearnerRecord, LearnerState, Roster
from starling.launch.switchboard import Switchboard
from starling.timeouts import READ

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

Seconds = float
LINK = "coordinator/link"
"""Key in the store that holds the port on which the coordinator hears learners."""
OVER = "the run is ending"
PATIENCE: Seconds = 9.0
"""Time without an answer after which the machine of a learner, or the coordinator's, is lost."""
_TOGETHER: Seconds = 0.01
"""Time between changes below which they make one membership."""


class Coordinator:
    """Lets learners in at `listener`, and announces memberships until the last learner has gone.

    The first membership needs as many learners as they say the run has. The process that started this one holds the
    other end of `parent` until it has connected.
    """

    def __init__(self, listener: socket.socket, parent: socket.socket) -> None:
        self._listener, self._parent = listener, parent
        self._roster = Roster(0)
        """Roster of the learners, whose lock also guards the following attributes."""
        self._switchboard = Switchboard(self._roster, self._hear)
        self._patience: dict[int, Seconds] = {}
        """Silence after which each learner is lost."""
        self._lost: dict[int, str] = {}
        """Members that were lost since the last announcement, with the reasons."""
        self._world = 0
        self._is_over = False

    def serve(self) -> None:
        """Serve until no learner is left."""
        with closing(self._switchboard), letting_in(self._listener, own_token(), PATIENCE, self._admit):
            while self._is_needed():
                self._switchboard.read_for(READ)
                self._switchboard.read_for(_TOGETHER)
                with self._roster.lock:
                    self._note_losses()
                    self._announce()

    def _is_needed(self) -> bool:
        """Whether learners are here, or the process that started this one has not connected yet."""
        with self._roster.lock:
            is_anyone_here = any(record.process.is_running for record in self._roster.learners.values())
        poll = select.poll()  # `select.select` refuses files above 1,023
        poll.register(self._parent, select.POLLIN)
        return is_anyone_here or not poll.poll(0)

    def _admit(self, who: tuple[str, ...], connection: socket.socket, welcome: Greeted) -> None:
        """Admit a learner. `who` is its id, the number of learners with which its run starts, and the silence after
        which it is lost."""
        learner_id, world, silence = int(who[0]), int(who[1]), float(who[2])
        process = LearnerProcess(line=Line(connection))
        with self._roster.lock:
            self._note_losses()  # perhaps of the same learner, whose process was restarted
            self._world = self._world or world
            if self._is_over:
                raise ProtocolError(OVER)
            if world != self._world:
                raise ProtocolError(f"WORLD_SIZE is {world}, but {self._world} in the run")
            if learner_id in self._roster.learners and self._roster.learners[learner_id].process.is_running:
                raise ProtocolError(f"RANK {learner_id} is already in the run; give it the RANK of a lost learner")
            self._patience[learner_id] = silence
            self._roster.start(learner_id, process)
            process.line.tell(welcome)

    def _hear(self, record: LearnerRecord, message: LearnerMessage, is_newest: bool) -> None:
        self._roster.hear(record.learner_id, message)
        if isinstance(message, Ended):
            self._end()

    def _end(self) -> None:
        """Refuse joiners: no learner would wait for them."""
        with self._roster.lock:
            self._is_over = True
            for record in self._roster.present():
                if record.learner_id not in self._roster.members:
                    record.process.line.tell(Greeted(OVER))
                    record.process.line.hang_up()

    def _note_losses(self) -> None:
        """Note which learners were lost: their connection has closed, or they were silent for too long."""
        for record in self._roster.learners.values():
            learner_id, process = record.learner_id, record.process
            self._roster.kill_if_silent(record, self._patience[learner_id])
            if record.is_present and not process.is_running:
                self._roster.lose(learner_id)
                if learner_id in self._roster.members and not self._is_over:
                    how = f"failed: {process.error}" if process.error else "was lost: its connection closed"
                    self._lost[learner_id] = process.killed_because or how

    def _announce(self) -> None:
        """Announce the next membership if learners were lost or are ready to join."""
        before = self._roster.membership
        is_first = before.number < 0
        ready = {record.learner_id for record in self._roster.present() if record.state is LearnerState.READY}
        if self._is_over or (is_first and not ready.issuperset(range(self._world))):
            return
        living = [each for each in (range(self._world) if is_first else before.members) if each not in self._lost]
        joined = [] if is_first else sorted(ready.difference(living))
        members = (*living, *joined)
        if members and members != before.members:
            reasons = [f"learner {each} {how}" for each, how in self._lost.items()]
            reasons += [f"learner {each} joined" for each in joined]
            self._switchboard.announce(members, "; ".join(reasons))
            self._lost.clear()


def listen(address: str, port: int) -> socket.socket:
    """A socket that listens on loopback, or on all interfaces if `address` is empty."""
    if not address and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=128, dualstack_ipv6=True)
    return socket.create_server((address, port), backlog=128)


def store_at(listener: socket.socket, address: str) -> "TCPStore":
    """A store whose connections come in at `listener`, which `address` reaches from this process. Passing a socket is
    the only way to keep a store off other interfaces."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    port, copy = int(listener.getsockname()[1]), os.dup(listener.fileno())
    return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=copy)


@contextmanager
def started_coordinator(address: str, port: int) -> Generator[int, None, None]:
    """Start a coordinator whose store listens on `port`, or on any port if that is 0; yields the port. The coordinator
    runs within this context, and as long as learners are there. `ProtocolError` if nothing can listen there."""
    ours, theirs = socket.socketpair()
    with ours:
        try:
            with theirs, listen(address, port) as store, listen(address, 0) as link:
                numbers = [each.fileno() for each in (store, link, theirs)]
                process = Popen(
                    [sys.executable, "-m", __name__, *map(str, numbers)],
                    env={name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")},
                    stdin=DEVNULL,
                    stdout=DEVNULL,
                    stderr=DEVNULL,
                    pass_fds=numbers,
                    start_new_session=True,  # a signal to this process's group does not reach it
                )
                port = int(store.getsockname()[1])
        except OSError as error:
            raise ProtocolError(f"no store can be started on port {port}: {error}; is the port free?") from error
        threading.Thread(target=process.wait, name="starling-coordinator", daemon=True).start()  # leaves no zombie
        yield port


def main(store: int, link: int, parent: int) -> None:
    """Run a coordinator, given the descriptors of two sockets that listen, for the store and for learners, and of one
    that the parent process holds."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # learners decide when the run ends
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=store) as listener, socket.socket(fileno=link) as hearing:
        held = store_at(listener, "127.0.0.1")
        held.set(LINK, str(hearing.getsockname()[1]))
        Coordinator(hearing, socket.socket(fileno=parent)).serve()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
