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
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta

from starling.engines.processes.run_token import VARIABLE, is_proof, new_challenge, own_token, proof
from starling.errors import ProtocolError
from starling.launch.messages import (
    Ended,
    Failed,
    Greeted,
    Hello,
    LearnerMessage,
    NewMembership,
    Ready,
    decode_from_learner,
    encode,
)
from starling.timeouts import COORDINATOR_LOOKS, COORDINATOR_TELLS, FULL_PAUSE

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
class _Line:
    """The connection of one learner."""

    connection: socket.socket
    challenge: str = field(default_factory=new_challenge)
    unread: bytearray = field(default_factory=bytearray)
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
        self._lines: set[_Line] = set()
        self._learners: dict[int, _Line] = {}
        self._has_changed = False
        """Whether learners have become ready or were lost since the last announcement."""
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
        while self._lines or self._parent is not None or time.monotonic() < self._deadline:
            reasons: list[str] = []
            for key, _ in self._selector.select(COORDINATOR_LOOKS):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj == self._parent:
                    self._selector.unregister(key.fileobj)
                    self._parent = None
                elif key.data in self._lines:
                    self._read(key.data, reasons)
            self._drop_silent(reasons)
            if self._has_changed and not self._is_over:  # not for each message: it takes as long as there are learners
                self._announce(reasons)

    def _drop_silent(self, reasons: list[str]) -> None:
        now = time.monotonic()
        if now - self._looked_at >= COORDINATOR_LOOKS:
            self._looked_at = now
            for line in [each for each in self._lines if now - each.heard_at > each.silence_limit]:
                self._drop(line, f"was silent for {line.silence_limit:g} s", reasons)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in FULL:  # the connection remains in the queue: without a pause this would be tried for ever
                time.sleep(FULL_PAUSE)
            return
        with suppress(OSError):
            keep_alive(connection, *PATIENCE)
            connection.settimeout(COORDINATOR_TELLS)
            line = _Line(connection)
            connection.sendall(line.challenge.encode() + b"\n")
            self._lines.add(line)
            self._selector.register(connection, selectors.EVENT_READ, line)

    def _read(self, line: _Line, reasons: list[str]) -> None:
        try:
            received = line.connection.recv(1 << 12)
        except TimeoutError:
            return
        except OSError:
            received = b""
        line.heard_at = time.monotonic()
        line.unread += received
        while line in self._lines and b"\n" in line.unread:
            text, _, rest = line.unread.partition(b"\n")
            line.unread = bytearray(rest)
            try:
                self._hear(line, decode_from_learner(bytes(text), -1 if line.learner_id is None else line.learner_id))
            except ProtocolError as error:
                self._refuse(line, str(error))
            except _Gone as gone:
                self._drop(line, str(gone), reasons)
        if line in self._lines and (not received or len(line.unread) > _LONGEST_LINE):
            self._drop(line, "was lost: its connection closed", reasons)

    def _hear(self, line: _Line, message: LearnerMessage) -> None:
        match message:
            case Hello():
                self._greet(line, message)
            case _ if line.learner_id is None:
                self._refuse(line, "a learner must first say which it is")
            case Ready():
                line.is_ready = self._has_changed = True
            case Failed():
                raise _Gone(f"failed: {message.error}: {message.text}")
            case Ended():
                self._is_over = True
                for other in set(self._lines).difference(self._learners[each] for each in self._present()):
                    self._refuse(other, OVER)  # joiners, for whom no learner would wait
            case _:
                pass

    def _present(self) -> list[int]:
        """The members of the newest membership that are connected."""
        return [each for each in self._membership.members if each in self._learners]

    def _greet(self, line: _Line, hello: Hello) -> None:
        name, token = str(hello.learner_id), own_token()
        if not is_proof(hello.proof, token, "learner", line.challenge, name, str(hello.world), hello.challenge):
            raise ProtocolError(
                f"learner {name} does not belong to this run: its run token is another one; set {VARIABLE} to the same "
                "value for all learners of a run, or for none of them"
            )
        self._world = self._world or hello.world
        if self._is_over:
            self._refuse(line, OVER)
        elif hello.world != self._world:
            self._refuse(line, f"WORLD_SIZE is {hello.world}, but {self._world} in the run")
        elif hello.learner_id in self._learners:
            self._refuse(line, f"RANK {hello.learner_id} is already in the run; give it the RANK of a lost learner")
        else:
            line.learner_id, line.silence_limit = hello.learner_id, hello.timeout_seconds
            self._learners[hello.learner_id] = line
            self._deadline = 0.0
            with suppress(OSError):
                line.connection.sendall(encode(Greeted(proof=proof(token, "coordinator", hello.challenge, name))))

    def _refuse(self, line: _Line, why: str) -> None:
        with suppress(OSError):
            line.connection.sendall(encode(Greeted(why)))
        self._drop(line, "", [])

    def _drop(self, line: _Line, why: str, reasons: list[str]) -> None:
        self._lines.discard(line)
        self._selector.unregister(line.connection)
        line.connection.close()
        if line.learner_id is not None and self._learners.pop(line.learner_id, None) is not None:
            self._has_changed = True
            if line.learner_id in self._membership.members and not self._is_over:
                reasons.append(f"learner {line.learner_id} {why}")

    def _announce(self, reasons: list[str]) -> None:
        """Announce the next membership if learners were lost or are ready to join."""
        self._has_changed = False
        ready = {learner_id for learner_id, line in self._learners.items() if line.is_ready}
        before = self._membership
        if before.generation < 0:
            if self._world == 0 or len(ready) < self._world or not ready.issuperset(range(self._world)):
                return
            members: tuple[int, ...] = tuple(range(self._world))
        else:
            living = [each for each in before.members if each in ready]
            joined = sorted(ready.difference(before.members))
            members = (*living, *joined)
            reasons += [f"learner {each} joined" for each in joined]
        if members == before.members or not members:
            return
        self._membership = NewMembership(before.generation + 1, members, "; ".join(reasons))
        announcement = encode(self._membership)
        for line in [self._learners[each] for each in self._present()]:
            try:
                sent = line.connection.send(announcement, socket.MSG_DONTWAIT)
            except BlockingIOError:
                sent = 0
            except OSError:  # its end is read from its connection
                continue
            if sent < len(announcement):  # waiting for it would delay the others; its end is read from its connection
                with suppress(OSError):
                    line.connection.shutdown(socket.SHUT_RDWR)


class _Gone(Exception):  # noqa: N818 - not an error
    """A learner leaves."""


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


class StartedCoordinator:
    """A coordinator that this process has started; it stays as long as this is not closed or learners are there."""

    def __init__(self, address: str, port: int) -> None:
        """Start one whose store listens on `port`, or on any if that is 0. `ProtocolError` if it cannot."""
        environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, address, str(port), "--parent"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a signal to this process's group does not reach it
        )
        _running[:] = [each for each in _running if each.poll() is None] + [self._process]
        said: dict[str, int | str] = json.loads((self._process.stdout and self._process.stdout.readline()) or b"{}")
        if "port" not in said:
            raise ProtocolError(
                f"no store can be started on port {port}: {said.get('error', 'its process ended')}; is the port free?"
            )
        self.port = int(said["port"])

    def close(self) -> None:
        """Let it end with the last learner."""
        for pipe in (self._process.stdin, self._process.stdout):
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
