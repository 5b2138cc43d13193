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
from contextlib import contextmanager, suppress
from subprocess import DEVNULL, Popen, TimeoutExpired
from typing import TYPE_CHECKING

from starling.engines.processes.run_token import own_token
from starling.errors import ProtocolError
from starling.launch.door import letting_in
from starling.launch.link import Line
from starling.launch.messages import Ended, Failed, Greeted, NewMembership, Ready, decode_from_learner
from starling.timeouts import COORDINATOR_LOOKS

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

Seconds = float
LINK = "coordinator/link"
"""The key in the store that holds the port on which the coordinator hears learners."""
OVER = "the run is ending"
PATIENCE: Seconds = 9.0
"""The machine of a learner, or the coordinator's, is lost after so long without an answer."""
_LONGEST_LINE = 1 << 16
_TOGETHER: Seconds = 0.01
"""Changes so close to each other make one membership."""


class Coordinator:
    """Hears learners on `listener`, and announces memberships until the last learner has gone.

    The first membership needs as many learners as they say the run has. The other end of `parent` is held by the
    process that started this one until it has connected.
    """

    def __init__(self, listener: socket.socket, parent: socket.socket) -> None:
        self._listener, self._parent = listener, parent
        self._changed = threading.Condition()
        """Guards what follows; notified when learners have become ready or were lost."""
        self._lines: dict[int, Line] = {}
        """The connections of learners."""
        self._ready: set[int] = set()
        self._lost: dict[int, str] = {}
        """Members that were lost since the last announcement, and how."""
        self._world = 0
        self._membership = NewMembership(-1, ())
        self._is_over = False

    def serve(self) -> None:
        """Serve until no learner is left."""
        with letting_in(self._listener, own_token(), PATIENCE, self._admit), self._changed:
            while self._lines or not select.select([self._parent], [], [], 0.0)[0]:
                if self._changed.wait(COORDINATOR_LOOKS):
                    self._changed.wait(_TOGETHER)
                self._announce()

    def _admit(self, who: tuple[str, ...], connection: socket.socket, welcome: Greeted) -> None:
        """Hear a learner until it leaves. `who` is its id, the number of learners with which its run starts, and the
        silence after which it is lost."""
        learner_id, world, silence = int(who[0]), int(who[1]), float(who[2])
        line, why = Line(connection), "was lost: its connection closed"
        with self._changed:
            self._world = self._world or world
            if self._is_over:
                raise ProtocolError(OVER)
            if world != self._world:
                raise ProtocolError(f"WORLD_SIZE is {world}, but {self._world} in the run")
            if learner_id in self._lines:
                raise ProtocolError(f"RANK {learner_id} is already in the run; give it the RANK of a lost learner")
            self._lines[learner_id] = line
            line.tell(welcome)
        try:
            with connection.dup() as reading, reading.makefile("rb") as lines:
                reading.settimeout(silence)
                while content := lines.readline(_LONGEST_LINE):
                    with self._changed:
                        line.tell_rest()
                        match decode_from_learner(content, learner_id):
                            case Ready():
                                self._ready.add(learner_id)
                                self._changed.notify()
                            case Failed(error, text):
                                why = f"failed: {error}: {text}"
                                break
                            case Ended():
                                self._end()
                            case _:
                                pass
        except TimeoutError:
            why = f"was silent for {silence:g} s"
        except OSError:  # it was reset, or its machine does not answer any more
            pass
        finally:
            with self._changed:
                del self._lines[learner_id]
                self._ready.discard(learner_id)
                if learner_id in self._membership.members and not self._is_over:
                    self._lost[learner_id] = why
                self._changed.notify()
        line.close()

    def _end(self) -> None:
        """Refuse joiners: no learner would wait for them."""
        self._is_over = True
        for learner_id, line in self._lines.items():
            if learner_id not in self._membership.members and line.connection is not None:
                line.tell(Greeted(OVER))
                with suppress(OSError):  # it has left itself
                    line.connection.shutdown(socket.SHUT_RDWR)

    def _announce(self) -> None:
        """Announce the next membership if learners were lost or are ready to join."""
        before = self._membership
        is_first = before.generation < 0
        if is_first and not self._ready.issuperset(range(self._world)):
            return
        living = [each for each in (range(self._world) if is_first else before.members) if each not in self._lost]
        joined = [] if is_first else sorted(self._ready.difference(living))
        members = (*living, *joined)
        if self._is_over or members == before.members or not members:
            return
        reasons = [f"learner {each} {how}" for each, how in self._lost.items()]
        reasons += [f"learner {each} joined" for each in joined]
        self._membership = NewMembership(before.generation + 1, members, "; ".join(reasons))
        self._lost.clear()
        for each in members:
            self._lines[each].tell(self._membership)


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


_running: list["Popen[bytes]"] = []
"""Coordinators that this process has started."""


@contextmanager
def started_coordinator(address: str, port: int) -> Generator[int, None, None]:
    """Start a coordinator whose store listens on `port`, or on any if that is 0; yields that. It stays within this
    context, and as long as learners are there. `ProtocolError` if nothing can listen there."""
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
        _running[:] = [each for each in _running if each.poll() is None] + [process]
        yield port


def await_coordinator(seconds: Seconds) -> None:
    """Wait a moment for coordinators of this process that are about to end, so that no zombie is left."""
    for process in _running:
        with suppress(TimeoutExpired):
            process.wait(seconds)


def main(store: int, link: int, parent: int) -> None:
    """Be a coordinator, with the descriptors of two sockets that listen, for the store and for learners, and of one
    that the parent process holds."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # learners decide when the run ends
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=store) as listener, socket.socket(fileno=link) as hearing:
        held = store_at(listener, "127.0.0.1")
        held.set(LINK, str(hearing.getsockname()[1]))
        Coordinator(hearing, socket.socket(fileno=parent)).serve()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
