"""Streams of events. Each line of a stream is a JSON object with a checksum. `docs/events.md` lists the kinds of
events.

A run has several streams. The launcher writes `log/events.jsonl`, and each learner writes a stream in the experiment's
record.
"""

import json
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic_core import to_json

Event = Mapping[str, Any]
VERSION = 1
"""Version of the kinds of events and their fields. The first event of a stream contains it."""
_SEAL = ', "crc": "'
_HEX = 8

Warn = Callable[[Path, Exception], None]
"""Function that warns that a file cannot be used. Its arguments are the file and the error."""


def once(warn: Warn) -> Warn:
    """Return a function that calls `warn` only the first time that it is called. Any thread may call it."""
    left = iter([warn])
    return lambda path, error: next(left, lambda path, error: None)(path, error)


class Stream:
    """An append-only file of events. Events that have been appended survive if the process is killed. Any thread may
    append."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._descriptor: int | None = None
        self._is_torn = False
        """Whether the file ends with an incomplete line."""

    def append(self, kind: str, **fields: Any) -> None:
        """Append an event, in which non-finite numbers become null. Raises OSError if the file cannot be written, for
        example because its folder no longer exists."""
        body = to_json({"kind": kind, **fields}, inf_nan_mode="null")
        line = b'%b%b%0*x"}\n' % (body[:-1], _SEAL.encode(), _HEX, zlib.crc32(body))
        with self._lock:
            if self._descriptor is None:
                self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            left = b"\n" + line if self._is_torn else line
            while left:
                written = os.write(self._descriptor, left)
                left = left[written:]
                self._is_torn = bool(left)

    def close(self) -> None:
        """Close the file. A later `append` opens it again."""
        with self._lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None


class Events(Stream):
    """The events of a run. An event that cannot be appended is lost. `warn` is called the first time that this happens.

    `clock` returns a Unix timestamp.
    """

    def __init__(self, path: Path, warn: Warn, clock: Callable[[], float] = time.time) -> None:
        super().__init__(path)
        self.warn = once(warn)
        """Function that warns that this file, or another file that the run writes, cannot be used."""
        self._clock = clock
        self.verdict = ""
        """The reason why the model does not work, with a remedy. Empty unless a score has shown that the model does not
        work."""

    def write(self, kind: str, **fields: Any) -> None:
        """Append an event with the present time."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.append(kind, time=round(self._clock(), 3), **fields)
        except OSError as error:
            self.warn(self.path, error)

    def judge(self, verdict: str, say: Callable[[str], None]) -> None:
        """Record the verdict on the newest model, which is empty if the model works. `say` is called with the verdict
        only if the previous model worked."""
        before, self.verdict = self.verdict, verdict
        if verdict != before:
            self.write("verdict", text=verdict)
        if verdict and not before:
            say(verdict)


def read_stream(path: Path) -> Iterator[tuple[int, Event | None]]:
    """Yield the line number and the event of each line of a file. The event of a damaged line is None. An incomplete
    last line, which the process was writing when it was killed, is left out. Raises OSError if the file cannot be
    read."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            event = _event(line.removesuffix("\n"))
            if event is not None or line.endswith("\n"):
                yield number, event


def read_events(path: Path) -> list[Event]:
    """Return the events of a run in their order, without damaged events. Return no events if the file does not
    exist."""
    found: list[Event] = []
    with suppress(OSError):
        found += [event for _, event in read_stream(path) if event is not None]
    return found


def _event(line: str) -> Event | None:
    body, seal, checksum = line.rpartition(_SEAL)
    if seal:
        line = body + "}"
        if checksum != f'{zlib.crc32(line.encode()):0{_HEX}x}"}}':
            return None
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("kind"), str) else None
