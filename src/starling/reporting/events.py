"""The events of a run as `log/events.jsonl`, one JSON object per line; `docs/events.md` lists the kinds."""

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

Event = Mapping[str, Any]


Warn = Callable[[Path, Exception], None]
"""Warns that a file cannot be used, with the error."""


def once(warn: Warn) -> Warn:
    """A function that passes only the first call on to `warn`; usable from any thread."""
    left = iter([warn])
    return lambda path, error: next(left, lambda path, error: None)(path, error)


class Events:
    """Appends events to a file. If that fails, the event is lost, and the first time `warn` is called.

    `write` may be called from any thread; `clock` returns a Unix timestamp.
    """

    def __init__(self, path: Path, warn: Warn, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self.warn = once(warn)
        """Warns that this file, or another one that the run writes beside it, cannot be used."""
        self._clock = clock
        self._lock = threading.Lock()
        self._descriptor: int | None = None
        self._is_torn = False
        """Whether the file ends with an incomplete line."""
        self.verdict = ""
        """Why the model does not work, and what to do; empty unless a score has shown that."""

    def write(self, kind: str, **fields: Any) -> None:
        """Append an event with the present time; numbers that are not finite are replaced by null."""
        event = {"time": round(self._clock(), 3), "kind": kind, **fields}
        line = json.dumps(to_jsonable_python(event, inf_nan_mode="null"), ensure_ascii=False)
        with self._lock:
            try:
                self._append(line.encode() + b"\n")
            except OSError as error:
                self.warn(self._path, error)

    def judge(self, verdict: str, say: Callable[[str], None]) -> None:
        """Record the verdict on the newest model; it is empty if the model works. `say` is called only if the model
        before it worked."""
        before, self.verdict = self.verdict, verdict
        if verdict != before:
            self.write("verdict", text=verdict)
        if verdict and not before:
            say(verdict)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None

    def _append(self, line: bytes) -> None:
        if self._descriptor is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        left = b"\n" + line if self._is_torn else line
        while left:
            written = os.write(self._descriptor, left)
            left = left[written:]
            self._is_torn = bool(left)


def read_events(path: Path) -> list[Event]:
    """The events of a run, in order; invalid lines are left out, and a missing file gives no events."""
    found: list[Event] = []
    with suppress(OSError):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError):
                event = json.loads(line)
                if isinstance(event, dict) and isinstance(event.get("kind"), str):
                    found.append(event)
    return found
