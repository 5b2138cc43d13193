"""MemoryLinks between the learners of one machine: tensors are in shared memory, and only short notes are sent.

Each learner has an arena: anonymous memory that it passes to the others as a file descriptor. A message consists of a
slot in the sender's arena and a note about it, a few bytes over a Unix socket; the receiver reads the slot in place.
Compared with TCP on the loopback interface, this saves four copies per message and waking another thread.

Nothing is left behind: arenas and sockets have no names in a file system and disappear with the last process that holds
them. When a learner dies, its sockets close, which ends the waits of the others.
"""

import ctypes
import json
import mmap
import os
import secrets
import select
import socket
import struct
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed import DistError

from starling.engines.processes.backend import ConnectionFailed, check_files
from starling.engines.processes.handshake import Peers
from starling.errors import ConfigError, PeerLost

NUM_SLOTS = 16
"""Messages that a learner may have under way at once; the backend sends further ones."""
BACKEND = -1
"""The slot number of a message that the backend sends, because no slot was free."""
LANES = 2
"""Means that may be under way at once: one of the foreground and one of the background."""
MESSAGE = 0
"""The kind of notes about messages; notes about means of lane n have kind n + 1."""
LOOK_AROUND_SECONDS = 0.5
_RELEASED = "this learner has stopped waiting"
_NOTE = struct.Struct("<iiqq")
_HELLO = struct.Struct("<iq")
_PAGE = mmap.PAGESIZE
_OPENED, _FINISHED, _NUM_WORDS = range(3)
"""Indices of a learner's words about rounds: the number of rounds it has opened, whether the rounds have ended, and
whether it has finished opening rounds."""


class Note(NamedTuple):
    """Announces a tensor in the sender's arena, or that its part of a mean is ready."""

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
        self.notes: dict[tuple[int, int], deque[Note]] = defaultdict(deque)


class _Arena:
    """A learner's shared memory: its words, flags of which peers still read which slot, the slots, and two places for
    each lane of means."""

    def __init__(self, file: int, world: int, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._slot_bytes = -(-max(num_bytes, 1) // _PAGE) * _PAGE
        flags = _PAGE + -(-NUM_SLOTS * world * 4 // _PAGE) * _PAGE
        size = flags + (NUM_SLOTS + 2 * LANES) * self._slot_bytes
        if os.fstat(file).st_size < size:
            os.ftruncate(file, size)
        self._memory = mmap.mmap(file, size)
        self._first = flags
        self.words = np.frombuffer(self._memory, dtype=np.int64, count=_NUM_WORDS)
        flat = np.frombuffer(self._memory, dtype=np.int32, count=NUM_SLOTS * world, offset=_PAGE)
        self.is_reading = flat.reshape(NUM_SLOTS, world)

    def slot(self, number: int, num_bytes: int, on_release: Callable[[], None]) -> Tensor:
        """The bytes of a slot `[num_bytes]`; `on_release` is called once they are no longer referenced."""
        owner = (ctypes.c_char * num_bytes).from_buffer(self._memory, self._first + number * self._slot_bytes)
        weakref.finalize(owner, on_release).atexit = False
        return torch.frombuffer(owner, dtype=torch.uint8)

    def place(self, lane: int, number: int) -> Tensor:
        """The bytes of one of the two places of a lane of means."""
        start = self._first + (NUM_SLOTS + 2 * lane + number) * self._slot_bytes
        return torch.frombuffer(self._memory, dtype=torch.uint8, offset=start, count=self._slot_bytes)


class MemoryLinks:
    """A learner's links to its `peers`: all other learners on this machine that run as the same user.

    `num_bytes` is the maximum size of a message or a mean. All learners create their links together, through the store.
    Raises `DistStoreError` or `ConnectionFailed` if a learner does not.
    """

    def __init__(
        self,
        peers: Peers,
        num_bytes: int,
    ) -> None:
        rank, world = peers.rank, peers.world
        self.rank, self.timeout_seconds = rank, peers.timeout_seconds
        self._lines: dict[int, _Line] = {}
        self._lock = threading.Lock()
        self._is_held = [False] * NUM_SLOTS
        self._of_snapshot: dict[int, int] = {}
        self._own_files: tuple[int, ...] = ()
        self.machines: list[str | None] = [None] * world
        """The machine of each learner; None if it cannot be linked."""
        self.peers: frozenset[int] = frozenset()
        if world == 1:
            return
        machine = _machine()

        def meet(token: str) -> list[tuple[str | None, str]]:
            found = peers.gather_all("links", [machine, token], "linking with the others")
            self.machines = [where for where, _ in found]
            return found

        if machine is None:
            meet("")
            return
        self._released = os.eventfd(0, os.EFD_CLOEXEC)
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._own_files = self._released, self._bell
        file = os.memfd_create("starling", os.MFD_CLOEXEC)
        token = f"starling-{secrets.token_hex(16)}"
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                listener.bind(f"\0{token}")
                listener.listen(world)
                self._arena = _Arena(file, world, num_bytes)
                found = enumerate(meet(token))
                names = {each: name for each, (where, name) in found if each != rank and where == machine}
                self._connect(listener, names, [file, self._bell], peers, num_bytes)
        finally:
            os.close(file)
        self.peers = frozenset(self._lines)

    def join(self, group: Sequence[int]) -> bool:
        """Whether all members of a group are linked with each other. The result is the same on all learners."""
        machines = {self.machines[each] for each in group}
        return len(machines) == 1 and None not in machines

    def snapshot_memory(self, like: Tensor) -> Tensor | None:
        """Memory of the shape and dtype of `like` that can be sent without a copy; None if no slot is free."""
        found = self._allocate(like.nbytes)
        return None if found is None else found[1].view(like.dtype).view(like.shape)

    def send(self, peer: int, tensor: Tensor, tag: int) -> bool:
        """Send a tensor in host memory. False if no slot is free: then the backend must send it."""
        with self._lock:
            slot = self._of_snapshot.get(tensor.data_ptr())
        if slot is None or not tensor.is_contiguous():
            if (found := self._allocate(tensor.nbytes)) is None:
                self.tell(peer, Note(MESSAGE, BACKEND, tag, tensor.nbytes))
                return False
            slot, memory = found
            memory.copy_(tensor.detach().contiguous().view(-1).view(torch.uint8))
        self._arena.is_reading[slot, peer] = 1
        self.tell(peer, Note(MESSAGE, slot, tag, tensor.nbytes))
        return True

    def receive(self, peer: int, tag: int, timeout_seconds: float | None) -> Tensor | int:
        """The message of `peer` under `tag`, as bytes that must not be changed, or their number if the backend sends
        them. Raises `ConnectionFailed` if the peer is lost or does not send in time."""
        note = self.hear(peer, MESSAGE, tag, timeout_seconds)
        if note.slot == BACKEND:
            return note.num_bytes
        arena, rank, slot = self._lines[peer].arena, self.rank, note.slot

        def release() -> None:
            arena.is_reading[slot, rank] = 0

        return arena.slot(slot, note.num_bytes, release)

    def place(self, rank: int, lane: int, number: int) -> Tensor:
        """The bytes of place `number` (0 or 1) of a lane in learner `rank`'s arena; means alternate between the two."""
        return (self._arena if rank == self.rank else self._lines[rank].arena).place(lane, number)

    def tell(self, peer: int, note: Note) -> None:
        """Send a note. Raises `ConnectionFailed` if the peer is lost."""
        try:
            self._lines[peer].connection.send(_NOTE.pack(note.kind, note.slot, note.tag, note.num_bytes))
        except OSError as error:
            raise ConnectionFailed(f"the link to learner {peer} is closed ({error.strerror})") from error

    def hear(self, peer: int, kind: int, tag: int, timeout_seconds: float | None) -> Note:
        """Wait for a note from `peer`; with None as time-out, as long as it lives. Raises `ConnectionFailed`."""
        line, key = self._lines[peer], (kind, tag)
        end = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while True:
            with line.ready:
                if key in line.notes:
                    notes = line.notes[key]
                    note = notes.popleft()
                    if not notes:
                        del line.notes[key]
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
                    line.notes[received.kind, received.tag].append(received)
            finally:
                with line.ready:
                    line.is_being_read = False
                    line.ready.notify_all()

    def words(self) -> list["np.ndarray[Any, np.dtype[np.int64]]"]:
        """This learner's words about rounds, followed by those of the others."""
        return [self._arena.words, *(line.arena.words for line in self._lines.values())]

    def ring(self) -> None:
        """Wake all backgrounds, including this learner's, so that they check the words about rounds. No effect after
        `close`."""
        with self._lock:
            if self._own_files:
                for bell in (self._bell, *(line.bell for line in self._lines.values())):
                    os.eventfd_write(bell, 1)

    def await_ring(self) -> None:
        """Wait until `ring` has been called since the last call. Raises `ConnectionFailed` after `release`."""
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        poll.register(self._released, select.POLLIN)
        if self._released in dict(poll.poll()):
            raise ConnectionFailed(_RELEASED)
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
        self,
        listener: socket.socket,
        names: dict[int, str],
        files: Sequence[int],
        peers: Peers,
        num_bytes: int,
    ) -> None:
        """Connect to the learners of lower rank, accept connections from the others, and exchange arenas."""
        hello, end = _HELLO.pack(self.rank, num_bytes), time.monotonic() + peers.timeout_seconds
        lower: dict[int, socket.socket] = {}

        def wait(connection: socket.socket) -> None:
            while not select.select([connection], [], [], LOOK_AROUND_SECONDS)[0]:
                peers.look_around()
                if time.monotonic() > end:
                    raise ConnectionFailed("Timed out while the learners of this machine were linked")

        try:
            for peer in sorted(each for each in names if each < self.rank):
                lower[peer] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                lower[peer].connect(f"\0{names[peer]}")
                socket.send_fds(lower[peer], [hello], files)
            for _ in range(sum(each > self.rank for each in names)):
                wait(listener)
                connection, _ = listener.accept()
                if _user_of(connection) != os.getuid():
                    raise ConnectionFailed("a process of another user connected to a link")
                wait(connection)
                self._greet(connection, peers.world)
                socket.send_fds(connection, [hello], files)
            for connection in lower.values():
                wait(connection)
                self._greet(connection, peers.world)
        except OSError as error:
            check_files(self.rank)
            raise ConnectionFailed(f"no link to another learner of this machine ({error.strerror})") from error

    def _greet(self, connection: socket.socket, world: int) -> None:
        said, files, _, _ = socket.recv_fds(connection, _HELLO.size, 2, socket.MSG_CMSG_CLOEXEC)
        if len(said) != _HELLO.size or len(files) != 2:
            check_files(self.rank)  # what could not be opened was left out
            raise ConnectionFailed("another learner of this machine disconnected before it was linked")
        peer, num_bytes = _HELLO.unpack(said)
        try:
            self._lines[peer] = _Line(connection, _Arena(files[0], world, num_bytes), files[1])
        finally:
            os.close(files[0])

    def _allocate(self, num_bytes: int) -> tuple[int, Tensor] | None:
        """A free slot and its memory, held until the memory is no longer referenced."""
        if num_bytes > self._arena.num_bytes or num_bytes == 0:
            return None
        with self._lock:
            is_reading = self._arena.is_reading
            free = (each for each in range(NUM_SLOTS) if not self._is_held[each] and not is_reading[each].any())
            slot = next(free, None)
            if slot is None:
                return None
            self._is_held[slot] = True
        memory = self._arena.slot(slot, num_bytes, lambda: self._let_go(slot, address))
        address = memory.data_ptr()
        with self._lock:
            self._of_snapshot[address] = slot
        return slot, memory

    def _let_go(self, slot: int, address: int) -> None:
        # without the lock: garbage collection may call this in a thread that holds it; these operations are atomic
        self._of_snapshot.pop(address, None)
        self._is_held[slot] = False

    def _read(self, peer: int, line: _Line, end: float | None) -> Note:
        poll = select.poll()
        poll.register(line.connection, select.POLLIN)
        poll.register(self._released, select.POLLIN)
        left = None if end is None else max(0.0, 1e3 * (end - time.monotonic()))
        ready = dict(poll.poll(left))
        if self._released in ready:
            raise ConnectionFailed(_RELEASED)
        if not ready:
            raise ConnectionFailed(f"Timed out waiting for learner {peer}")
        try:
            said = line.connection.recv(_NOTE.size)
        except OSError as error:
            raise ConnectionFailed(f"the link to learner {peer} broke ({error.strerror})") from error
        if len(said) != _NOTE.size:
            raise ConnectionFailed(f"learner {peer} closed its link")
        return Note(*_NOTE.unpack(said))


class LinkBoard:
    """What `StoreBoard` is, for learners that are all linked: words in their arenas, and an event per learner to wake
    it."""

    def __init__(self, links: MemoryLinks) -> None:
        self._links = links
        self._words = links.words()
        self._has_left = False

    def open(self, number: int, is_behind: bool) -> bool:
        self._words[0][_OPENED] = max(self._words[0][_OPENED], number + 1)
        self._links.ring()
        return not self._has_left

    def await_open(self, number: int) -> bool:
        while not self._has_left:
            is_over = all(words[_FINISHED] for words in self._words)  # first: who has finished has opened its rounds
            if any(words[_OPENED] > number for words in self._words):
                return True
            if is_over:
                return False
            self._links.await_ring()
        return False

    def finish(self, first_unopened: int) -> None:
        self._words[0][_FINISHED] = 1
        self._links.ring()

    def leave(self, number: int) -> None:
        self._has_left = True
        self._links.ring()


_TOKEN_BYTES = 64
_MEMORY = "shared memory"


def share_memory(peers: Peers, num_bytes: int, fill: Callable[[Tensor], object]) -> Tensor:
    """A uint8 tensor `[num_bytes]`, in the same memory in all learners.

    Learner 0 creates the memory, initially 0, and calls `fill` with it. Then the others open it through /proc; it
    exists as long as any learner holds it. Unlike `MemoryLinks`, this also serves learners whose models are on a GPU.

    Raises:
        ConfigError: The learners are not on one machine.
        PeerLost: A learner does not open the memory within the time-out.
    """
    if not hasattr(os, "memfd_create"):
        raise ConfigError("strategy: hogwild needs Linux: it shares memory between processes by memfd_create")
    if peers.rank > 0:
        memory = _open_memory(peers, num_bytes)
        _await_opened(peers)
    else:
        file = os.memfd_create("starling", os.MFD_CLOEXEC)
        try:
            os.ftruncate(file, _TOKEN_BYTES + num_bytes)
            memory = mmap.mmap(file, _TOKEN_BYTES + num_bytes)
            token = secrets.token_hex(_TOKEN_BYTES // 2)
            memory[:_TOKEN_BYTES] = token.encode()
            fill(torch.frombuffer(memory, dtype=torch.uint8, offset=_TOKEN_BYTES))
            peers.store.set(_MEMORY, json.dumps([os.getpid(), file, token]))
            _await_opened(peers)  # by the number of this file
        finally:
            os.close(file)
    return torch.frombuffer(memory, dtype=torch.uint8, offset=_TOKEN_BYTES)


def _await_opened(peers: Peers) -> None:
    """Wait until all learners have opened the memory."""
    keys = [f"{_MEMORY}/{other}" for other in range(peers.world)]
    peers.store.set(keys[peers.rank], "")
    try:
        peers.await_keys(keys, "opening the shared memory", range(peers.world))
    except DistError as error:
        absent = [str(other) for other, key in enumerate(keys) if not peers.store.check([key])]
        raise PeerLost(
            f"learner {peers.rank} waited {peers.timeout_seconds:g} s for learner {' and '.join(absent)} to open the "
            "shared memory"
        ) from error


def _open_memory(peers: Peers, num_bytes: int) -> mmap.mmap:
    try:
        peers.await_keys([_MEMORY], "opening the shared memory", [0])
    except DistError as error:
        raise PeerLost(
            f"learner {peers.rank} waited {peers.timeout_seconds:g} s for learner 0 to share its memory"
        ) from error
    pid, file, token = json.loads(peers.store.get(_MEMORY))
    why = "here its process number belongs to another process"
    try:
        with Path(f"/proc/{pid}/fd/{file}").open("r+b") as opened:
            memory = mmap.mmap(opened.fileno(), _TOKEN_BYTES + num_bytes)
        if memory[:_TOKEN_BYTES] == token.encode():
            return memory
    except (OSError, ValueError) as error:
        peers.look_around()
        why = str(error)
    raise ConfigError(
        f"strategy: hogwild: learner {peers.rank} cannot share the memory of learner 0 ({why}); all learners must run "
        "on one machine, as one user: use parameter-server or adpsgd between machines"
    )


def _machine() -> str | None:
    """Equal for processes that can be linked; None if the system does not support links."""
    if not hasattr(os, "memfd_create") or not hasattr(os, "eventfd"):
        return None
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = Path("/proc/self/ns/net").stat().st_ino  # abstract Unix sockets belong to it
    except OSError:
        return None
    return f"{boot} {network} {os.getuid()}"


def _user_of(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    user: Any = struct.unpack("3i", credentials)[1]
    return int(user)
