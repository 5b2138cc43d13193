"""The connection of a joined loop that survives losses to its coordinator: finding or starting it, and hearing of
memberships.

The coordinator listens on MASTER_PORT. If something else holds a store there (torchrun's agent, or learner 0 for the
process group of a host framework), it takes any free port, which learner 0 publishes in that store.
"""

import logging
import os
import socket
import time
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from starling.engines.processes.backend import check_files
from starling.engines.processes.place import Place
from starling.engines.processes.process_group import Connections
from starling.engines.processes.run_token import own_token
from starling.errors import PeerLost, ProtocolError
from starling.launch import rendezvous
from starling.launch.coordinator import LINK, OVER, PATIENCE, started_coordinator
from starling.launch.link import Link, knock
from starling.launch.messages import Ended, Failed, Greeted, NewMembership, Reached
from starling.timeouts import DOOR
from starling.training.membership import Membership, MembershipFeed

_LOG = logging.getLogger("starling")
_PUBLISHED = "coordinator/port"
_RETRY_SECONDS = 0.05


class CoordinatorFeed(MembershipFeed):
    """The memberships that the coordinator announces to this learner, whose place has the coordinator's store."""

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


def connect(seconds: float, host_store: Store | None = None) -> CoordinatorFeed:
    """Connect to the coordinator of learners that survive losses; learner 0 starts it if there is none.

    `host_store` is the store at MASTER_PORT, if all learners have already connected to one.

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
                store, line = _connect(own.rank, own.world, address, where, seconds)
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


def _connect(rank: int, world: int, address: str, port: int, seconds: float) -> tuple[Store, socket.socket]:
    """The coordinator's store, and a connection over which it has admitted this learner.

    Raises `OSError` if no coordinator answers yet, or the run of the one that answers is ending.
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
        return store, knock(address, link, own_token(), PATIENCE, str(rank), str(world), str(seconds))
    except OSError:
        check_files(rank)
        raise
    except ProtocolError as error:
        if str(error) == OVER:
            raise ConnectionError(OVER) from None
        raise ProtocolError(f"learner {rank} cannot join the run at {address}:{port}: {error}") from error
