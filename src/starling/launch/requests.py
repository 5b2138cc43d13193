"""Asking the launcher of a run for more learners, from another process: files in a folder of the experiment.

    joins/open                  locked by the launcher as long as it takes requests; which launcher it is
    joins/request-<id>.json     how many learners; removed when it was read
    joins/answer-<id>.json      what became of them; removed by who asked

Files are written aside and renamed. No socket listens, and who may ask is who may write to the folder.
"""

import fcntl
import json
import secrets
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

Seconds = float
LOOK_EVERY: Seconds = 0.5
"""Between two looks of the launcher."""
LOCK_PATIENCE: Seconds = 0.5
"""For those who just look whether somebody takes requests."""
_LOCK, _REQUEST, _ANSWER = "open", "request-{}.json", "answer-{}.json"


@dataclass(frozen=True)
class Request:
    """Somebody wants more learners."""

    id: str
    learners: int


@dataclass(frozen=True)
class Answer:
    """What became of a request."""

    refused: str = ""
    """Why nobody was started; empty if somebody was."""
    joined: tuple[int, ...] = ()
    """The names of those who compute."""
    failed: tuple[str, ...] = ()
    """What became of the others."""
    learners: int = 0
    """How many compute now."""


class Requests:
    """The launcher's end, in a folder that it has locked."""

    def __init__(self, folder: Path, clock: Callable[[], Seconds] = time.monotonic) -> None:
        self._folder = folder
        self._clock = clock
        self._next_look = clock()

    def take(self) -> list[Request]:
        """The requests that have come; none if it is not yet time to look again."""
        if self._clock() < self._next_look:
            return []
        self._next_look = self._clock() + LOOK_EVERY
        found = []
        for path in sorted(self._folder.glob(_REQUEST.format("*"))):
            name = path.stem.removeprefix("request-")
            with suppress(OSError):
                content = path.read_bytes()
                path.unlink()
                found.append(Request(name, _learners(content)))
        return found

    def answer(self, request: Request, answer: Answer) -> None:
        """Say what became of a request; a disk that is full takes the answer along, not the run."""
        with suppress(OSError):
            _write(self._folder / _ANSWER.format(request.id), asdict(answer))


@contextmanager
def taking_requests(folder: Path) -> Generator[Requests | None, None, None]:
    """Take requests as long as the context lasts; None where the folder cannot be written, or another run takes
    requests there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / _LOCK).open("ab")
    except OSError:
        yield None
        return
    with lock:
        deadline = time.monotonic() + LOCK_PATIENCE
        while not (is_ours := _lock(lock.fileno(), fcntl.LOCK_EX)) and time.monotonic() < deadline:
            time.sleep(0.01)
        if not is_ours:
            yield None
            return
        for old in (*folder.glob(_REQUEST.format("*")), *folder.glob(_ANSWER.format("*"))):
            old.unlink(missing_ok=True)
        with suppress(OSError):  # a disk that is full
            lock.truncate(0)
            lock.write(secrets.token_hex(8).encode())
            lock.flush()
        yield Requests(folder)


def who_takes(folder: Path) -> bytes | None:
    """Which launcher takes requests there now, the same as long as it does; None if nobody does."""
    try:
        with (folder / _LOCK).open("rb") as lock:
            return None if _lock(lock.fileno(), fcntl.LOCK_SH) else lock.read()  # others may look at the same time
    except OSError:
        return None


def ask(folder: Path, learners: int) -> Request:
    """Ask for more learners."""
    request = Request(f"{time.time_ns():020d}-{secrets.token_hex(4)}", learners)
    _write(folder / _REQUEST.format(request.id), {"learners": learners})
    return request


def answered(folder: Path, request: Request) -> Answer | None:
    """What became of a request, once that is known."""
    path = folder / _ANSWER.format(request.id)
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    path.unlink(missing_ok=True)
    return Answer(read["refused"], tuple(read["joined"]), tuple(read["failed"]), read["learners"])


def withdraw(folder: Path, request: Request) -> None:
    """Nobody waits for the answer any more."""
    for name in (_REQUEST, _ANSWER):
        (folder / name.format(request.id)).unlink(missing_ok=True)


def _learners(content: bytes) -> int:
    """How many learners a request asks for; 0 if it makes no sense."""
    try:
        read = json.loads(content)
    except ValueError:
        return 0
    wanted = read.get("learners") if isinstance(read, dict) else None
    return wanted if isinstance(wanted, int) and not isinstance(wanted, bool) else 0


def _write(path: Path, content: dict[str, object]) -> None:
    aside = path.with_name(f".{path.name}.partial")
    aside.write_text(json.dumps(content) + "\n", encoding="utf-8")
    aside.replace(path)


def _lock(descriptor: int, kind: int) -> bool:
    """Lock a file that is open, for as long as it is; whether that could be done."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
