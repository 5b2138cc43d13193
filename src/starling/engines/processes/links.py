"""Links between the learners on one machine. Tensors are in shared memory, and only short notes are sent.

Each learner has an arena, which is anonymous memory that it passes to the others as a file descriptor. A message
consists of a slot in the sender's arena and a note of a few bytes that is sent over a Unix socket. The receiver reads
the slot in place. Compared with TCP on the loopback interface, this saves four copies for each message, and no other
thread has to be woken.

Arenas and sockets have no names in a file system and disappear with the last process that holds them, so nothing is
left behind. When a learner dies, its sockets close, which ends the waits of the other learners.
"""

import ctypes
import mmap
import os
import secrets
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from starling.engines.processes.backend import ConnectionFailed, check_files
from starling.engines.processes.handshake import Peers
from starling.errors import ConfigError

NUM_SLOTS = 16
"""Number of messages that a learner may have under way at once. Further messages are sent through the backend."""
BACKEND = -1
"""Slot number of a message that is sent through the backend because no slot was free."""
LANES = 2
"""Number of means that may be under way at once: one in the foreground and one in the background."""
MESSAGE = 0
"""Kind of notes about messages. Notes about means of lane n have kind n + 1."""
LOOK_AROUND_SECONDS = 0.5
_NOTE = struct.Struct("<iiqq")
_HELLO = struct.Struct("<iq")
_PAGE = mmap.PAGESIZE
_OPENED, _FINISHED, _NUM_WORDS = range(3)
"""Indices of a learner's words about rounds: the number of rounds it has opened, and whether it will open no more."""


class Note(NamedTuple):
    """A note that announces a tensor in the sender's arena, or that the sender's part of a mean is ready."""

    kind: int
    slot: int
    tag: int
    num_bytes: int


class _Line:
    """The connection to one peer. The thread that reads it also receives the notes for other threads."""

    def __init__(self, connection: socket.socket, arena: "_Arena", bell: int) -> None:
        self.connection = connection
        self.arena = arena
        self.bell = bell
        self.ready = threading.Condition()
        self.is_being_read = False
        self.notes: list[Note] = []


class _Arena:
    """A learner's shared memory. It contains the learner's words about rounds, flags that say which learners still
    refer to which slot, the slots, and two places for each lane of means."""

    def __init__(self, file: int, world: int, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._slot_bytes = -(-max(num_bytes, 1) // _PAGE) * _PAGE
        flags = _PAGE + -(-NUM_SLOTS * world * 4 // _PAGE) * _PAGE
        size = flags + (NUM_SLOTS + 2 * LANES) * self._slot_bytes
        if os.fstat(file).st_size < size:
            os.ftruncate(file, size)
        self._memory = mmap.mmap(file, size)
        self._first = flags
        self._slots_at = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr() + flags
        self.words = np.frombuffer(self._memory, dtype=np.int64, count=_NUM_WORDS)
        flat = np.frombuffer(self._memory, dtype=np.int32, count=NUM_SLOTS * world, offset=_PAGE)
        self.is_reading = flat.reshape(NUM_SLOTS, world)

    def slot(self, number: int, num_bytes: int, reader: int) -> Tensor:
        """Return the bytes of a slot `[num_bytes]`. Learner `reader` counts as reading the slot until the returned
        tensor is no longer referenced."""
        owner = (ctypes.c_char * num_bytes).from_buffer(self._memory, self._first + number * self._slot_bytes)
        # without a lock, because garbage collection may call this in any thread
        weakref.finalize(owner, self.is_reading.__setitem__, (number, reader), 0).atexit = False
        return torch.frombuffer(owner, dtype=torch.uint8)

    def slot_of(self, tensor: Tensor) -> int | None:
        """The number of the slot that begins where a tensor begins; None if there is no such slot."""
        number, offset = divmod(tensor.data_ptr() - self._slots_at, self._slot_bytes)
        return number if offset == 0 and 0 <= number < NUM_SLOTS else None

    def place(self, lane: int, number: int) -> Tensor:
        """Return the bytes of one of the two places of a lane of means."""
        start = self._first + (NUM_SLOTS + 2 * lane + number) * self._slot_bytes
        return torch.frombuffer(self._memory, dtype=torch.uint8, offset=start, count=self._slot_bytes)


class MemoryLinks:
    """A learner's links to its `peers`: all other learners on this machine that run as the same user.

    `num_bytes` is the maximum size of a message or a mean; with 0 no learners are linked. All learners create their
    links together, through the store, in which `word` distinguishes several links of one learner. The constructor
    raises `DistStoreError` or `ConnectionFailed` if a learner does not create its links.
    """

    def __init__(self, peers: Peers, num_bytes: int, word: str = "links") -> None:
        rank, world = peers.rank, peers.world
        self.rank, self.timeout_seconds = rank, peers.timeout_seconds
        self._lines: dict[int, _Line] = {}
        self._lock = threading.Lock()
        self._own_files: tuple[int, ...] = ()
        self.machines: list[str | None] = [None] * world
        """Identifier of each learner's machine; None for a learner that cannot be linked."""
        self.peers: frozenset[int] = frozenset()
        if world == 1 or num_bytes == 0:
            return
        machine, token = _machine(), f"starling-{secrets.token_hex(16)}"
        with ExitStack() as stack:
            if machine is not None:
                listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                listener.bind(f"\0{token}")
                listener.listen(world)
            found = peers.gather_all(word, [machine, token], "linking with the others")
            self.machines = [where for where, _ in found]
            if machine is None:
                return
            self._released = os.eventfd(0, os.EFD_CLOEXEC)
            self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._own_files = self._released, self._bell
            file = os.memfd_create("starling", os.MFD_CLOEXEC)
            stack.callback(os.close, file)
            self._arena = _Arena(file, world, num_bytes)
            names = {each: name for each, (where, name) in enumerate(found) if each != rank and where == machine}
            self._connect(listener, names, [file, self._bell], peers, num_bytes)
        self.peers = frozenset(self._lines)

    def join(self, group: Sequence[int]) -> bool:
        """Return whether all members of a group are linked with each other. All learners get the same result."""
        machines = {self.machines[each] for each in group}
        return len(machines) == 1 and None not in machines

    def snapshot_memory(self, like: Tensor) -> Tensor | None:
        """Return memory with the shape and dtype of `like` that can be sent without a copy, or None if no slot is
        free."""
        if not 0 < like.nbytes <= self._arena.num_bytes:
            return None
        with self._lock:
            is_reading = self._arena.is_reading
            slot = next((each for each in range(NUM_SLOTS) if not is_reading[each].any()), None)
            if slot is None:
                return None
            is_reading[slot, self.rank] = 1
        return self._arena.slot(slot, like.nbytes, self.rank).view(like.dtype).view(like.shape)

    def send(self, peer: int, tensor: Tensor, tag: int) -> bool:
        """Send a tensor in host memory. Returns False if no slot is free; the caller must then send the tensor through
        the backend."""
        slot = self._arena.slot_of(tensor) if tensor.is_contiguous() else None
        if slot is None and (lent := self.snapshot_memory(tensor)) is not None:
            slot = self._arena.slot_of(lent.copy_(tensor.detach()))
        if slot is not None:
            self._arena.is_reading[slot, peer] = 1
        self.tell(peer, Note(MESSAGE, BACKEND if slot is None else slot, tag, tensor.nbytes))
        return slot is not None

    def receive(self, peer: int, tag: int, timeout_seconds: float | None) -> Tensor | None:
        """Receive the message of `peer` under `tag`, as bytes that must not be changed. Returns None if the message is
        sent through the backend. Raises `ConnectionFailed` if the peer is lost or does not send in time."""
        note = self.hear(peer, MESSAGE, tag, timeout_seconds)
        return None if note.slot == BACKEND else self._lines[peer].arena.slot(note.slot, note.num_bytes, self.rank)

    def place(self, rank: int, lane: int, number: int) -> Tensor:
        """Return the bytes of place `number` (0 or 1) of a lane in the arena of learner `rank`. Means alternate between
        the two places."""
        return (self._arena if rank == self.rank else self._lines[rank].arena).place(lane, number)

    def tell(self, peer: int, note: Note) -> None:
        """Send a note. Raises `ConnectionFailed` if the peer is lost."""
        try:
            self._lines[peer].connection.send(_NOTE.pack(*note))
        except OSError as error:
            raise ConnectionFailed(f"the link to learner {peer} is closed ({error.strerror})") from error

    def hear(self, peer: int, kind: int, tag: int, timeout_seconds: float | None) -> Note:
        """Wait for a note from `peer`. Without a time-out (None), wait as long as the peer lives. Raises
        `ConnectionFailed` if the peer is lost or sends no note in time."""
        line = self._lines[peer]
        end = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while True:
            with line.ready:
                for note in line.notes:
                    if (note.kind, note.tag) == (kind, tag):
                        line.notes.remove(note)  # removes the first equal note
                        return note
                if line.is_being_read:
                    line.ready.wait(LOOK_AROUND_SECONDS)
                    if end is not None and time.monotonic() > end:
                        raise ConnectionFailed(f"Timed out waiting for learner {peer}")
                    continue
                line.is_being_read = True
            try:
                received = self._read(peer, line, end)
                with line.ready:
                    line.notes.append(received)
            finally:
                with line.ready:
                    line.is_being_read = False
                    line.ready.notify_all()

    def words(self) -> list["np.ndarray[Any, np.dtype[np.int64]]"]:
        """Return this learner's words about rounds, followed by those of the other learners."""
        return [self._arena.words, *(line.arena.words for line in self._lines.values())]

    def ring(self) -> None:
        """Wake all backgrounds, including this learner's, so that they check the words about rounds. The call has no
        effect after `close`."""
        with self._lock:
            if self._own_files:
                for bell in (self._bell, *(line.bell for line in self._lines.values())):
                    os.eventfd_write(bell, 1)

    def await_ring(self) -> None:
        """Wait until some learner has called `ring` since the last return from this method. Raises `ConnectionFailed`
        after `release`."""
        self._await(self._bell)
        with suppress(BlockingIOError):
            os.eventfd_read(self._bell)

    def release(self) -> None:
        """End all current and later waits of this process. May be called by any thread."""
        with self._lock:
            if self._own_files:
                os.eventfd_write(self._released, 1)

    def close(self) -> None:
        """Close the connections; notes already sent still arrive."""
        with self._lock:
            files, self._own_files = self._own_files, ()
            lines, self._lines, self.peers = self._lines, {}, frozenset()
        for line in lines.values():
            line.connection.close()
            os.close(line.bell)
        for file in files:
            os.close(file)

    def _connect(
        self, listener: socket.socket, names: dict[int, str], files: Sequence[int], peers: Peers, num_bytes: int
    ) -> None:
        """Connect to the learners of lower rank, accept connections from the others, and exchange arenas."""
        end = time.monotonic() + peers.timeout_seconds
        connections: list[socket.socket] = []

        def wait(connection: socket.socket) -> None:
            poll = select.poll()  # `select.select` refuses files above 1,023
            poll.register(connection, select.POLLIN)
            while not poll.poll(1e3 * LOOK_AROUND_SECONDS):
                peers.look_around()
                if time.monotonic() > end:
                    raise ConnectionFailed("Timed out while the learners of this machine were linked")

        try:
            for peer, name in names.items():
                if peer < self.rank:
                    connections.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                    connections[-1].connect(f"\0{name}")
            while len(connections) < len(names):
                wait(listener)
                connections.append(listener.accept()[0])
                credentials = connections[-1].getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
                if struct.unpack("3i", credentials)[1] != os.getuid():
                    raise ConnectionFailed("a process of another user connected to a link")
            for connection in connections:
                socket.send_fds(connection, [_HELLO.pack(self.rank, num_bytes)], files)
            for connection in connections:
                wait(connection)
                self._greet(connection, peers.world)
        except OSError as error:
            check_files(self.rank)
            raise ConnectionFailed(f"no link to another learner of this machine ({error.strerror})") from error

    def _greet(self, connection: socket.socket, world: int) -> None:
        said, files, _, _ = socket.recv_fds(connection, _HELLO.size, 2, socket.MSG_CMSG_CLOEXEC)
        if len(said) != _HELLO.size or len(files) != 2:
            check_files(self.rank)  # descriptors that this process could not open were dropped
            raise ConnectionFailed("another learner of this machine disconnected before it was linked")
        peer, num_bytes = _HELLO.unpack(said)
        try:
            self._lines[peer] = _Line(connection, _Arena(files[0], world, num_bytes), files[1])
        finally:
            os.close(files[0])

    def _read(self, peer: int, line: _Line, end: float | None) -> Note:
        if not self._await(line.connection, end):
            raise ConnectionFailed(f"Timed out waiting for learner {peer}")
        try:
            said = line.connection.recv(_NOTE.size)
        except OSError as error:
            raise ConnectionFailed(f"the link to learner {peer} broke ({error.strerror})") from error
        if len(said) != _NOTE.size:
            raise ConnectionFailed(f"learner {peer} closed its link")
        return Note(*_NOTE.unpack(said))

    def _await(self, file: socket.socket | int, end: float | None = None) -> bool:
        """Wait until there is data to read. Returns False after the time-out. Raises `ConnectionFailed` after
        `release`."""
        poll = select.poll()
        poll.register(file, select.POLLIN)
        poll.register(self._released, select.POLLIN)
        ready = dict(poll.poll(None if end is None else max(0.0, 1e3 * (end - time.monotonic()))))
        if self._released in ready:
            raise ConnectionFailed("this learner has stopped waiting")
        return bool(ready)


class LinkBoard:
    """Replaces `StoreBoard` for learners that are all linked. It uses words in the learners' arenas, and wakes each
    learner through an event."""

    def __init__(self, links: MemoryLinks) -> None:
        self._links = links
        self._words = links.words()

    def open(self, number: int, is_behind: bool) -> bool:
        self._words[0][_OPENED] = max(self._words[0][_OPENED], number + 1)
        self._links.ring()
        return True

    def await_open(self, number: int) -> bool:
        while True:
            is_over = all(words[_FINISHED] for words in self._words)  # read first: the finished have opened all rounds
            if any(words[_OPENED] > number for words in self._words):
                return True
            if is_over:
                return False
            self._links.await_ring()

    def finish(self, first_unopened: int) -> None:
        self._words[0][_FINISHED] = 1
        self._links.ring()


def share_memory(peers: Peers, num_bytes: int, fill: Callable[[Tensor], object]) -> Tensor:
    """Return a uint8 tensor `[num_bytes]` that is in the same memory in all learners.

    Learner 0 creates the memory, which is initially 0, and calls `fill` with the tensor before the other learners see
    it. The memory exists as long as any learner holds it. The learners' models may be on a GPU.

    Raises:
        ConfigError: The learners are not on one machine.
        DistStoreError, ConnectionFailed: A learner does not open the memory.
    """
    rank, links = peers.rank, MemoryLinks(peers, num_bytes, "shared memory")
    if peers.world == 1:
        fill(memory := torch.zeros(num_bytes, dtype=torch.uint8))
        return memory
    if links.machines[rank] is None:
        raise ConfigError("strategy: hogwild needs Linux: it shares memory between processes by memfd_create")
    try:
        if elsewhere := [other for other, where in enumerate(links.machines) if where != links.machines[rank]]:
            raise ConfigError(
                f"strategy: hogwild: learner {rank} cannot share memory with learner {elsewhere[0]}; all learners must "
                "run on one machine, as one user: use parameter-server or adpsgd between machines"
            )
        memory, filled = links.place(0, 0, 0)[:num_bytes], Note(MESSAGE, 0, 0, num_bytes)
        if rank == 0:
            fill(memory)
            for peer in links.peers:
                links.tell(peer, filled)
        else:
            links.hear(0, filled.kind, filled.tag, peers.timeout_seconds)
        return memory
    finally:
        links.close()


def _machine() -> str | None:
    """Return an identifier that is equal for processes that can be linked, or None if the system does not support
    links."""
    if not hasattr(os, "memfd_create") or not hasattr(os, "eventfd"):
        return None
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = Path("/proc/self/ns/net").stat().st_ino  # the namespace to which abstract Unix sockets belong
    except OSError:
        return None
    return f"{boot} {network} {os.getuid()}"
