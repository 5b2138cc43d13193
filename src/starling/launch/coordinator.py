"""The process that holds the store and announces memberships for loops joined with `on_loss="continue"`.

It outlives every learner: learner 0 starts it detached, and it ends with the last learner, so that any of them may be
lost. It never starts or kills a learner. A learner is lost when its connection closes or is silent for too long. Only
learners that reach this process can continue or finish, so two halves of a split network never both do.
"""

import errno
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta

from starling.engines.processes.run_token import VARIABLE, is_proof, new_challenge, own_token, proof
from starling.errors import ProtocolError
from starling.launch.link import Line
from starling.launch.messages import (
    Ended,
    Failed,
    Greeted,
    Hello,
    LearnerMessage,
    NewMembership,
    Ready,
    decode_from_learner,
)
from starling.timeouts import COORDINATOR_LOOKS, FULL_PAUSE

Seconds = float
LINK = "coordinator/link"
"""The key in the store that holds the port on which the coordinator hears learners."""
OVER = "the run is ending"
FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""The errors of a process or a machine that can open no more files."""
PATIENCE = (3, 2, 3)
"""For `keep_alive`: the machine of a learner, or the coordinator's, is lost after 9 s without an answer."""
_LONGEST_LINE = 1 << 16


@dataclass(eq=False)
class _Loop:
    """The connection of one learner."""

    line: Line
    challenge: str = field(default_factory=new_challenge)
    learner_id: int | None = None
    silence_limit: Seconds = 60.0
    is_ready: bool = False
    heard_at: Seconds = field(default_factory=time.monotonic)


class Coordinator:
    """Hears learners on `listener`, and announces memberships until the last learner has gone.

    The first membership needs as many learners as they say the run has. `parent`, a pipe, is held open by the process
    that started this one until it has connected; without one, the first learner has `wait` seconds to connect.
    """

    def __init__(self, listener: socket.socket, parent: int | None, wait: Seconds) -> None:
        self._listener, self._parent = listener, parent
        self._deadline = time.monotonic() + (0.0 if parent is not None else wait)
        self._selector = selectors.DefaultSelector()
        self._loops: set[_Loop] = set()
        self._learners: dict[int, _Loop] = {}
        self._has_changed = False
        """Whether learners have become ready or were lost since the last announcement."""
        self._reasons: list[str] = []
        """How they were lost."""
        self._looked_at = 0.0
        self._world = 0
        self._membership = NewMembership(-1, ())
        self._is_over = False
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        if parent is not None:
            self._selector.register(parent, selectors.EVENT_READ)

    def serve(self) -> None:
        """Serve until no learner is left."""
        while self._loops or self._parent is not None or time.monotonic() < self._deadline:
            self._reasons = []
            for key, _ in self._selector.select(COORDINATOR_LOOKS):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj == self._parent:
                    self._selector.unregister(key.fileobj)
                    self._parent = None
                elif key.data in self._loops:
                    self._read(key.data)
            if time.monotonic() - self._looked_at >= COORDINATOR_LOOKS:
                self._look_after_all()
            if self._has_changed and not self._is_over:  # not for each message: it takes as long as there are learners
                self._announce()

    def _look_after_all(self) -> None:
        now = self._looked_at = time.monotonic()
        for loop in list(self._loops):
            loop.line.tell_rest()
            if now - loop.heard_at > loop.silence_limit:
                self._drop(loop, f"was silent for {loop.silence_limit:g} s")

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in FULL:  # the connection remains in the queue: without a pause this would be tried for ever
                time.sleep(FULL_PAUSE)
            return
        with suppress(OSError):
            keep_alive(connection, *PATIENCE)
            loop = _Loop(Line(connection))
            connection.sendall(loop.challenge.encode() + b"\n")
            self._loops.add(loop)
            self._selector.register(loop.line, selectors.EVENT_READ, loop)

    def _read(self, loop: _Loop) -> None:
        try:
            messages = loop.line.hear()
        except BlockingIOError:
            return
        except EOFError:
            self._drop(loop, "was lost: its connection closed")
            return
        loop.heard_at = time.monotonic()
        for each in messages:
            if loop in self._loops:
                try:
                    self._hear(loop, decode_from_learner(each, -1 if loop.learner_id is None else loop.learner_id))
                except ProtocolError as error:
                    self._refuse(loop, str(error))
        if loop in self._loops and len(loop.line.unread) > _LONGEST_LINE:
            self._drop(loop, "was lost: its connection closed")

    def _hear(self, loop: _Loop, message: LearnerMessage) -> None:
        match message:
            case Hello():
                self._greet(loop, message)
            case _ if loop.learner_id is None:
                self._refuse(loop, "a learner must first say which it is")
            case Ready():
                loop.is_ready = self._has_changed = True
            case Failed():
                self._drop(loop, f"failed: {message.error}: {message.text}")
            case Ended():
                self._is_over = True
                for other in self._loops.difference(self._present()):
                    self._refuse(other, OVER)  # joiners, for whom no learner would wait
            case _:
                pass

    def _present(self) -> list[_Loop]:
        """The members of the newest membership that are connected."""
        return [self._learners[each] for each in self._membership.members if each in self._learners]

    def _greet(self, loop: _Loop, hello: Hello) -> None:
        name, token = str(hello.learner_id), own_token()
        if not is_proof(hello.proof, token, "learner", loop.challenge, name, str(hello.world), hello.challenge):
            raise ProtocolError(
                f"learner {name} does not belong to this run: its run token is another one; set {VARIABLE} to the same "
                "value for all learners of a run, or for none of them"
            )
        self._world = self._world or hello.world
        if self._is_over:
            self._refuse(loop, OVER)
        elif hello.world != self._world:
            self._refuse(loop, f"WORLD_SIZE is {hello.world}, but {self._world} in the run")
        elif hello.learner_id in self._learners:
            self._refuse(loop, f"RANK {hello.learner_id} is already in the run; give it the RANK of a lost learner")
        else:
            loop.learner_id, loop.silence_limit = hello.learner_id, hello.timeout_seconds
            self._learners[hello.learner_id] = loop
            self._deadline = 0.0
            loop.line.tell(Greeted(proof=proof(token, "coordinator", hello.challenge, name)))

    def _refuse(self, loop: _Loop, why: str) -> None:
        loop.line.tell(Greeted(why))
        self._drop(loop)

    def _drop(self, loop: _Loop, why: str = "") -> None:
        self._loops.discard(loop)
        self._selector.unregister(loop.line)
        loop.line.close()
        if loop.learner_id is not None and self._learners.pop(loop.learner_id, None) is not None:
            self._has_changed = True
            if why and loop.learner_id in self._membership.members and not self._is_over:
                self._reasons.append(f"learner {loop.learner_id} {why}")

    def _announce(self) -> None:
        """Announce the next membership if learners were lost or are ready to join."""
        self._has_changed = False
        ready = {learner_id for learner_id, loop in self._learners.items() if loop.is_ready}
        before, joined = self._membership, list[int]()
        if before.generation < 0:
            if self._world == 0 or not ready.issuperset(range(self._world)):
                return
            living = list(range(self._world))
        else:
            living = [each for each in before.members if each in ready]
            joined = sorted(ready.difference(before.members))
        members = (*living, *joined)
        if members == before.members or not members:
            return
        reasons = [*self._reasons, *(f"learner {each} joined" for each in joined)]
        self._membership = NewMembership(before.generation + 1, members, "; ".join(reasons))
        for loop in self._present():
            loop.line.tell(self._membership)


def keep_alive(connection: socket.socket, idle: int, every: int, times: int) -> None:
    """Let waits on a connection fail once the other machine has not answered for `idle + every * times` seconds. The
    kernel of a machine answers even while its processes are stopped or busy."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": idle, "TCP_KEEPINTVL": every, "TCP_KEEPCNT": times}
    for name, value in (options | {"TCP_USER_TIMEOUT": 1000 * (idle + every * times)}).items():
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def listen(address: str, port: int) -> socket.socket:
    """A socket that listens on loopback, or on all interfaces if `address` is empty."""
    if not address and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=128, dualstack_ipv6=True)
    return socket.create_server((address, port), backlog=128)


_running: list["subprocess.Popen[bytes]"] = []
"""Coordinators that this process has started."""


@contextmanager
def started_coordinator(address: str, port: int) -> Generator[int, None, None]:
    """Start a coordinator whose store listens on `port`, or on any if that is 0; yields that. It stays within this
    context, and as long as learners are there. `ProtocolError` if it cannot be started."""
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, address, str(port), "--parent"],
        env={name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a signal to this process's group does not reach it
    )
    _running[:] = [each for each in _running if each.poll() is None] + [process]
    try:
        said: dict[str, int | str] = json.loads((process.stdout and process.stdout.readline()) or b"{}")
        if "port" not in said:
            raise ProtocolError(
                f"no store can be started on port {port}: {said.get('error', 'its process ended')}; is the port free?"
            )
        yield int(said["port"])
    finally:
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def await_coordinator(seconds: Seconds) -> None:
    """Wait a moment for coordinators of this process that are about to end, so that no zombie is left."""
    for process in _running:
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)


def main(arguments: list[str]) -> None:
    """Be a coordinator: `ADDRESS PORT [--parent | SECONDS]`."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # learners decide when the run ends
        signal.signal(number, signal.SIG_IGN)
    address, port, last = arguments[0], int(arguments[1]), arguments[2]
    try:
        listener = listen(address, port)
    except OSError as error:
        sys.stdout.write(json.dumps({"error": str(error)}) + "\n")
        return
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    with listener, listen(address, 0) as link:
        port = int(listener.getsockname()[1])
        store = TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=60),
            master_listen_fd=os.dup(listener.fileno()),
        )
        store.set(LINK, str(link.getsockname()[1]))
        sys.stdout.write(json.dumps({"port": port}) + "\n")
        sys.stdout.flush()
        Coordinator(link, 0 if last == "--parent" else None, 0.0 if last == "--parent" else float(last)).serve()
        del store


if __name__ == "__main__":
    main(sys.argv[1:])
