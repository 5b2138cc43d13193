"""Records which files of Starling a learner passes through from one optimizer step to the next.

It is active in processes that have this folder on PYTHONPATH, and the folder of the records in STARLING_TRACE. Each
process that makes eleven steps writes `PID.json` there, with a record of each mini-batch from the third step on: the
calls from one file into another in its main thread as `[caller's file, file, function]`, the number of files in the
main thread, and the number in all threads.
"""

import json
import os
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

FIRST, LAST = 3, 11
STEP = "Optimizer.profile_hook_step.<locals>.wrapper"
"""The name of torch's wrapper around the step of every optimizer."""
IN = ("src", "site-packages")
"""Names of folders that contain the package."""


class Tracer:
    """Called by Python at every call and return of a function, in every thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._num_steps = 0
        self._known: dict[str, str | None] = {}
        self._records: list[dict[str, Any]] = []
        self._begin()

    def _begin(self) -> None:
        self._of_main_thread: set[str] = set()
        self._of_all_threads: set[str] = set()
        self._changes: list[tuple[str, str, str]] = []

    def profile(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or self._num_steps == LAST:
            return
        code = frame.f_code
        if code.co_qualname == STEP and code.co_filename.endswith("torch/optim/optimizer.py"):
            self._num_steps += 1
            if self._num_steps > FIRST:
                self._end()
        elif self._num_steps >= FIRST and (here := self._file(frame)) is not None:
            self._of_all_threads.add(here)
            if threading.current_thread() is threading.main_thread():
                self._of_main_thread.add(here)
                caller = self._caller(frame)
                if caller not in (None, here):
                    self._changes.append((str(caller), here, code.co_name))

    def _file(self, frame: FrameType) -> str | None:
        """The file of a frame in the package, or None for a frame of other code."""
        name = frame.f_code.co_filename
        if name not in self._known:
            parts = Path(name).parts
            roots = [at for at in range(1, len(parts)) if parts[at] == "starling" and parts[at - 1] in IN]
            self._known[name] = "/".join(parts[roots[-1] + 1 :]) if roots else None
        return self._known[name]

    def _caller(self, frame: FrameType) -> str | None:
        """The nearest file of the package among those that called a frame."""
        back = frame.f_back
        while back is not None:
            if (file := self._file(back)) is not None:
                return file
            back = back.f_back
        return None

    def _end(self) -> None:
        record = {
            "files": len(self._of_main_thread),
            "files of all threads": len(self._of_all_threads),
            "changes": self._changes,
        }
        self._records.append(record)
        self._begin()
        if self._num_steps == LAST:
            sys.setprofile(None)
            (self._folder / f"{os.getpid()}.json").write_text(json.dumps(self._records), encoding="utf-8")


if "STARLING_TRACE" in os.environ:
    tracer = Tracer(Path(os.environ["STARLING_TRACE"]))
    sys.setprofile(tracer.profile)
    threading.setprofile(tracer.profile)
