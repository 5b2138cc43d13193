"""Join requests to the launcher of a run, as files in the experiment's folder.

    joins/open                  locked by the launcher while it takes requests; its content identifies the launcher
    joins/request-<id>.json     a `JoinRequest`; removed by the launcher once it has been read
    joins/answer-<id>.json      a `JoinAnswer`; removed by the process that sent the request

Files are written under a temporary name and renamed. Any user with write access to the folder can send a request.
"""

import fcntl
import secrets
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from starling.errors import ProtocolError
from starling.launch.messages import JoinAnswer, JoinRequest, decode_file, encode_file
from starling.timeouts import LOCK, REQUESTS_EVERY

_LOCK, _REQUEST, _ANSWER = "open", "request-{}.json", "answer-{}.json"


@dataclass(eq=False)
class Request:
    """A request at the launcher's end, from its arrival to its answer."""

    learners: int
    """How many to add; 0, which is refused, if it could not be read."""
    path: Path
    """The file of its answer."""
    open: list[int] = field(default_factory=list)
    """The learners that have neither joined nor failed yet."""
    joined: list[int] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def settle(self, num_members: int) -> None:
        """Answer with what became of its learners."""
        self.answer(JoinAnswer("", tuple(sorted(self.joined)), tuple(self.failed), num_members))

    def answer(self, answer: JoinAnswer) -> None:
        """Write the answer."""
        with suppress(OSError):  # a full disk must not end the run
            _write(self.path, answer)


class Requests:
    """The launcher's end, in a folder that it has locked."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._next_look = 0.0

    def take(self) -> list[Request]:
        """Remove and return the new requests. Looks only every `REQUESTS_EVERY` seconds."""
        if time.monotonic() < self._next_look:
            return []
        self._next_look = time.monotonic() + REQUESTS_EVERY
        found = []
        for path in sorted(self._folder.glob(_REQUEST.format("*"))):
            answer = self._folder / _ANSWER.format(path.stem.removeprefix("request-"))
            with suppress(OSError):
                content = path.read_bytes()
                path.unlink()
                try:
                    found.append(Request(decode_file(JoinRequest, content).learners, answer))
                except ProtocolError:
                    found.append(Request(0, answer))
        return found


@contextmanager
def taking_requests(folder: Path) -> Generator[Requests | None, None, None]:
    """Take requests inside the context; None if the folder cannot be written, or another launcher takes requests
    there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / _LOCK).open("ab")
    except OSError:
        yield None
        return
    with lock:
        deadline = time.monotonic() + LOCK
        while not (is_ours := _lock(lock.fileno(), fcntl.LOCK_EX)) and time.monotonic() < deadline:
            time.sleep(0.01)
        if not is_ours:
            yield None
            return
        for old in (*folder.glob(_REQUEST.format("*")), *folder.glob(_ANSWER.format("*"))):
            old.unlink(missing_ok=True)
        with suppress(OSError):  # the disk may be full
            lock.truncate(0)
            lock.write(secrets.token_hex(8).encode())
            lock.flush()
        yield Requests(folder)


def launcher_id(folder: Path) -> bytes | None:
    """Identifies the launcher that takes requests in this folder now; None if there is none."""
    try:
        with (folder / _LOCK).open("rb") as lock:
            # a shared lock, so that several processes can look at the same time
            return None if _lock(lock.fileno(), fcntl.LOCK_SH) else lock.read()
    except OSError:
        return None


def ask(folder: Path, learners: int) -> JoinRequest:
    """Write a request for more learners."""
    request = JoinRequest(learners, f"{time.time_ns():020d}-{secrets.token_hex(4)}")
    _write(folder / _REQUEST.format(request.id), request)
    return request


def take_answer(folder: Path, request: JoinRequest) -> JoinAnswer | None:
    """Remove and return the answer to a request; None if there is none yet. Raises ProtocolError for an invalid
    file."""
    path = folder / _ANSWER.format(request.id)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    path.unlink(missing_ok=True)
    return decode_file(JoinAnswer, content)


def withdraw(folder: Path, request: JoinRequest) -> None:
    """Remove the files of a request and its answer, if they still exist."""
    for name in (_REQUEST, _ANSWER):
        (folder / name.format(request.id)).unlink(missing_ok=True)


def _write(path: Path, content: JoinRequest | JoinAnswer) -> None:
    aside = path.with_name(f".{path.name}.partial")
    aside.write_text(encode_file(content), encoding="utf-8")
    aside.replace(path)


def _lock(descriptor: int, kind: int) -> bool:
    """Try to lock an open file until it is closed; return whether that succeeded."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
