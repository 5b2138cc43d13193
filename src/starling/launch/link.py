"""The line between a launcher and each of its learners: JSON messages one way, the launcher's life the other.

A learner whose launcher has died reads the end of the line and ends itself, so nothing is left behind.
"""

import json
import os
import socket
import sys
import threading
from typing import Any

VARIABLE = "STARLING_LINK_FD"
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
        os._exit(ORPHANED)
