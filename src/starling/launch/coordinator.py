"""The process that holds the store and announces memberships for loops joined with `on_loss="continue"`, and a loop's
connection to it.

The coordinator outlives every learner, so that any learner may be lost: learner 0 starts it as a detached process,
which ends with the last learner. It never starts or kills a learner. A learner counts as lost when its connection
closes or is silent for too long. Only learners that reach the coordinator can continue or finish, so if the network
splits in two, at most one half continues.

The coordinator listens on MASTER_PORT. If something else holds a store there (torchrun's agent, or learner 0 for the
process group of a host framework), the coordinator listens on any free port, which learner 0 publishes in that store.
"""

import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Generator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from datetime import timedelta
from subprocess import DEVNULL, Popen

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from starling.engines.processes.backend import check_files
from starling.engines.processes.place import Place
from starling.engines.processes.process_group import Connections
from starling.engines.processes.run_token import own_token
from starling.errors import PeerLost, ProtocolError
from starling.launch import rendezvous
from starling.launch.link import Line, Link, knock, letting_in
from starling.launch.messages import Ended, Failed, Greeted, LearnerMessage, NewMembership, Reached
from starling.launch.process import LearnerProcess
from starling.launch.roster import LearnerRecord, LearnerState, Roster, Switchboard
from starling.timeouts import DOOR, READ, Seconds
from starling.training.membership import Membership, MembershipFeed

LINK = "coordinator/link"
"""Key in the store under which the coordinator's port for learners is published."""
OVER = "the run is ending"
PATIENCE: Seconds = 9.0
"""Time without an answer after which a learner's machine, or the coordinator's machine, counts as lost."""
_TOGETHER: Seconds = 0.01
"""Changes that follow each other within this time are announced as one membership."""


class Coordinator:
    """Admits learners that connect to `listener`, and announces memberships until the last learner has gone.

    Each learner states the number of learners with which the run starts; the first membership waits for that many. The
    process that started the coordinator keeps the other end of `parent` open until it has connected as a learner.
    """

    def __init__(self, listener: socket.socket, parent: socket.socket) -> None:
        self._listener, self._parent = listener, parent
        self._roster = Roster(0)
        """Roster of the learners. Its lock also guards the following attributes."""
        self._switchboard = Switchboard(self._roster, self._hear)
        self._patience: dict[int, Seconds] = {}
        """Silence after which each learner counts as lost, by `learner_id`."""
        self._lost: dict[int, str] = {}
        """Members that were lost since the last announcement, each with the reason."""
        self._world = self._size = 0
        """Number of learners with which the run starts, and how many of them are lost and join together."""
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
        """Whether any learner is connected, or the process that started the coordinator has not connected yet."""
        with self._roster.lock:
            is_anyone_here = any(record.process.is_running for record in self._roster.learners.values())
        poll = select.poll()  # `select.select` refuses files above 1,023
        poll.register(self._parent, select.POLLIN)
        return is_anyone_here or not poll.poll(0)

    def _admit(self, who: tuple[str, ...], connection: socket.socket, welcome: Greeted) -> None:
        """Admit a learner. `who` contains the learner's id, the number of learners with which its run starts, the
        silence after which the learner counts as lost, and the number of learners that are lost and join together."""
        learner_id, world, silence, size = int(who[0]), int(who[1]), float(who[2]), int(who[3])
        process = LearnerProcess(line=Line(connection))
        with self._roster.lock:
            self._note_losses()  # perhaps of the same learner, whose process was restarted
            self._world, self._size = self._world or world, self._size or size
            if self._is_over:
                raise ProtocolError(OVER)
            if world != self._world:
                raise ProtocolError(f"WORLD_SIZE is {world}, but {self._world} in the run")
            if size != self._size:
                raise ProtocolError(f"its super-learner has {size} learners, but {self._size} in the run")
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
        """Record which learners were lost, because their connection has closed or they were silent for too long."""
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
        broken = {each // self._size for each in self._lost}
        present = range(self._world) if is_first else before.members
        living = [each for each in present if each // self._size not in broken]
        # a restarted learner joins after its loss, which would otherwise go unnoticed
        joined = [] if is_first else sorted(ready.difference(living, self._lost))
        whole = Counter(each // self._size for each in joined)
        joined = [each for each in joined if whole[each // self._size] == self._size]
        members = (*living, *joined)
        if members != before.members and (members or self._size > 1):
            reasons = [f"learner {each} {how}" for each, how in self._lost.items()]
            reasons += [f"learner {each} joined" for each in joined]
            self._switchboard.announce(members, "; ".join(reasons))
            self._lost.clear()
            if not members:
                self._end()


def listen(address: str, port: int) -> socket.socket:
    """Return a socket that listens on the loopback interface, or on all interfaces if `address` is empty."""
    if not address and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=128, dualstack_ipv6=True)
    return socket.create_server((address, port), backlog=128)


def store_at(listener: socket.socket, address: str) -> TCPStore:
    """Return a store that accepts connections at `listener`. This process reaches the listener at `address`. Passing a
    socket is the only way to keep a store off other interfaces."""
    port, copy = int(listener.getsockname()[1]), os.dup(listener.fileno())
    return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=copy)


@contextmanager
def started_coordinator(address: str, port: int) -> Generator[int, None, None]:
    """Start a coordinator whose store listens on `port`, or on any free port if `port` is 0, and yield the port. The
    coordinator runs within this context, and afterwards as long as any learner is connected.

    Raises `ProtocolError` if the port cannot be used."""
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
    """Run a coordinator. `store` and `link` are the descriptors of listening sockets for the store and for learners;
    `parent` is the descriptor of a socket whose other end the parent process holds."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # learners decide when the run ends
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=store) as listener, socket.socket(fileno=link) as hearing:
        held = store_at(listener, "127.0.0.1")
        held.set(LINK, str(hearing.getsockname()[1]))
        Coordinator(hearing, socket.socket(fileno=parent)).serve()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))


_LOG = logging.getLogger("starling")
_PUBLISHED = "coordinator/port"
_RETRY_SECONDS = 0.05


class CoordinatorFeed(MembershipFeed):
    """The memberships that the coordinator announces to this learner. The learner's place has the coordinator's
    store."""

    def __init__(self, place: Place, line: socket.socket, store_connections: Connections, seconds: float) -> None:
        super().__init__(place.rank, None, is_watched=True)
        self.place, self._store_connections, self._seconds = place, store_connections, seconds
        self._refused = ""
        store_connections.note()
        self._link = Link(line, self._lose)
        self._link.listen(Greeted, self._refuse)
        self._link.listen(NewMembership, lambda message: self.announce(message.membership))

    def first(self) -> Membership:
        store = self.place.store
        store.set(f"came/{self.name}", "")
        self._link.send(Reached("ready", self.latest.number))
        if (first := self.beyond(Membership(-1, ()), self._seconds)) is None:
            absent = [rank for rank in range(self.place.world) if not store.check([f"came/{rank}"])]
            missing = " and ".join(f"learner {rank}" for rank in absent) or "the others"
            raise PeerLost(
                f"learner {self.name} waited {self._seconds:g} s for {missing} to join; see their logs, or give more "
                "timeout_seconds"
            )
        return first

    def leave(self, error: BaseException | None) -> None:
        self._link.close(Ended(0) if error is None else Failed(type(error).__name__, str(error).partition("\n")[0]))

    def _refuse(self, message: Greeted) -> None:
        self._refused = message.refused

    def _lose(self, error: Exception) -> None:
        why = f"lost the coordinator of its run ({error}): its process or machine has ended, or the network to it; "
        why += "learners that reach it continue"
        if self._refused:
            why = f"cannot join: {self._refused}, and no learner is left to continue with"
        self.fail(PeerLost(f"learner {self.name} {why}"))
        self._store_connections.cut()


def connect(seconds: float, host_store: Store | None = None, size_of_unit: int = 1) -> CoordinatorFeed:
    """Connect to the coordinator of learners that survive losses; learner 0 starts it if there is none.

    `host_store` is the store at MASTER_PORT, if all learners have already connected to one. `size_of_unit` is the
    number of learners with successive ids that are lost and join together.

    Raises `ConfigError` for an invalid environment variable, `ProtocolError` if no coordinator answers or admits the
    learner.
    """
    own = rendezvous.place_of_environment(may_join=True)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    agent_store = rendezvous.find_place(seconds).store if os.environ.get(rendezvous.AGENT) == "True" else host_store
    begin, has_said = time.monotonic(), False
    with ExitStack() as stack:  # a coordinator that this process starts stays until it has connected
        has_started = False
        while True:
            connections = Connections()
            try:
                if agent_store is not None and not agent_store.check([_PUBLISHED]):
                    raise ConnectionError("learner 0 has not started it")
                where = port if agent_store is None else int(agent_store.get(_PUBLISHED))
                store, line = _connect(own.rank, own.world, address, where, seconds, size_of_unit)
            except OSError as error:
                reason = error.strerror or str(error)
            else:
                return CoordinatorFeed(replace(own, store=store), line, connections, seconds)
            if own.rank == 0 and not has_started and reason != OVER:
                has_started = True
                listening = "127.0.0.1" if address in rendezvous.LOOPBACK else ""
                started = started_coordinator(listening, port if agent_store is None else 0)
                started_port = stack.enter_context(started)
                if agent_store is not None:
                    agent_store.set(_PUBLISHED, str(started_port))
            elif time.monotonic() - begin > seconds:
                raise ProtocolError(
                    f"learner {own.rank} cannot reach the coordinator at {address}:{port}: {reason}; is learner 0 "
                    "alive, and is the port free?"
                )
            elif time.monotonic() - begin > rendezvous.USUAL_SECONDS and not has_said:
                has_said = True
                what = "learner %d waits for the coordinator at %s:%d, which learner 0 starts (%s); %g s at most"
                _LOG.warning(what, own.rank, address, port, reason, seconds)
            time.sleep(_RETRY_SECONDS)


def _connect(
    rank: int, world: int, address: str, port: int, seconds: float, size_of_unit: int
) -> tuple[Store, socket.socket]:
    """Return the coordinator's store, and a connection over which the coordinator has admitted this learner.

    Raises `OSError` if no coordinator answers yet, or if a coordinator answers whose run is ending.
    """
    rendezvous.check_store(rank, address, port, seconds)
    try:
        store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=seconds))
        store.set_timeout(timedelta(seconds=DOOR))
        link = int(store.get(LINK))
        store.set_timeout(timedelta(seconds=seconds))
    except (DistError, RuntimeError) as error:
        raise ProtocolError(
            f"learner {rank}: what listens at {address}:{port} is not the coordinator of a run "
            f"({str(error).splitlines()[0]}); choose another MASTER_PORT"
        ) from error
    try:
        who = str(rank), str(world), str(seconds), str(size_of_unit)
        return store, knock(address, link, own_token(), PATIENCE, *who)
    except OSError:
        check_files(rank)
        raise
    except ProtocolError as error:
        if str(error) == OVER:
            raise ConnectionError(OVER) from None
        raise ProtocolError(f"learner {rank} cannot join the run at {address}:{port}: {error}") from error
