"""The line between a launcher and each of its learners: JSON messages one way, the launcher's life the other.

A learner whose launcher has died reads the end of the line and ends itself, so nothing is left behind.
"""

import json
import os
import shutil
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from starling.errors import StarlingError

VARIABLE = "STARLING_LINK_FD"
SCRATCH = "STARLING_SCRATCH"
"""The variable with the folder for temporary files that belongs to this run alone."""
ORPHANED = 3


class Link:
    """A learner's end of the line."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._lock = threading.Lock()
        threading.Thread(target=self._watch_launcher, name="starling-link", daemon=True).start()

    @classmethod
    def from_environment(cls) -> "Link | None":
        """The link that a launcher left for this process, or None where there is none (torchrun, Slurm)."""
        descriptor = os.environ.pop(VARIABLE, None)
        return None if descriptor is None else cls(socket.socket(fileno=int(descriptor)))

    def send(self, message: dict[str, Any]) -> None:
        """Send a message of JSON values to the launcher."""
        with self._lock:
            self._line.sendall(json.dumps(message).encode() + b"\n")

    def _watch_launcher(self) -> None:
        try:
            while self._line.recv(1):
                pass
        except OSError:
            pass
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
