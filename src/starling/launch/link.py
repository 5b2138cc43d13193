"""The line between a launcher and each of its learners: JSON messages both ways, and a sign of life.

A learner whose launcher has died reads the end of the line and ends itself, so nothing is left behind. A launcher that
hears nothing from a learner for long knows that it stands still.
"""

import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any

from starling.errors import StarlingError

VARIABLE = "STARLING_LINK_FD"
SCRATCH = "STARLING_SCRATCH"
"""The variable with the folder for temporary files that belongs to this run alone."""
WATCHED = "STARLING_WATCHED"
"""The variable that is 1 where a launcher tells learners of the loss of others."""
JOINS = "STARLING_JOINS"
"""The variable that is 1 for a learner that comes while others compute already."""
ORPHANED = 3
BEAT_SECONDS = 0.5
"""Between two signs of life, which are empty messages if there is nothing to say."""
Message = dict[str, Any]


class Link:
    """A learner's end of the line."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._lock = threading.Lock()
        self._listening = threading.Lock()
        self._heard: list[Message] = []
        self._listeners: list[Callable[[Message], None]] = []
        self.heartbeat: Callable[[], Message] = dict
        """What is sent every `BEAT_SECONDS`."""
        threading.Thread(target=self._watch_launcher, name="starling-link", daemon=True).start()
        threading.Thread(target=self._beat, name="starling-heart", daemon=True).start()

    @classmethod
    def from_environment(cls) -> "Link | None":
        """The link that a launcher left for this process, or None where there is none (torchrun, Slurm)."""
        descriptor = os.environ.pop(VARIABLE, None)
        return None if descriptor is None else cls(socket.socket(fileno=int(descriptor)))

    def send(self, message: Message) -> None:
        """Send a message of JSON values to the launcher."""
        with self._lock:
            self._line.sendall(json.dumps(message).encode() + b"\n")

    def listen(self, listener: Callable[[Message], None]) -> None:
        """Call `listener`, in a thread of the link, with each message of the launcher; at once with those so far."""
        with self._listening:
            self._listeners.append(listener)
            for message in self._heard:
                listener(message)

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT_SECONDS)
            with suppress(OSError):  # the launcher is gone, or a disk is full: one more reason to go on beating
                self.send(self.heartbeat())

    def _watch_launcher(self) -> None:
        with suppress(OSError), self._line.makefile("rb") as lines:
            for line in lines:
                with self._listening:
                    self._heard.append(json.loads(line))
                    for listener in self._listeners:
                        listener(self._heard[-1])
        with suppress(OSError):  # a disk that is full
            sys.stderr.write("the launcher is gone: this learner ends\n")
            sys.stderr.flush()
        if SCRATCH in os.environ:
            shutil.rmtree(os.environ[SCRATCH], ignore_errors=True)
        if os.getpgrp() == os.getpid():  # the launcher gave this learner a group of its own: its loading processes
            os.killpg(0, signal.SIGTERM)  # not SIGKILL, which would leave their semaphores in shared memory
        os._exit(ORPHANED)


@contextmanager
def reported_errors(link: Link | None) -> Generator[None, None, None]:
    """Tell the launcher what ended this learner, and end it with the error's exit code; the log gets the traceback.

    Without a link errors pass through.
    """
    try:
        yield
    except Exception as error:
        if link is None:
            raise
        traceback.print_exc()
        link.send({"error": type(error).__name__, "message": str(error)})
        raise SystemExit(error.exit_code if isinstance(error, StarlingError) else 1) from error
