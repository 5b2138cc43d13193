"""The line between a launcher and each of its learners: messages both ways, and a learner's heartbeat.

A learner whose launcher has died reads the end of the line and ends itself, so that nothing is left behind. A launcher
that receives no heartbeat from a learner for long knows that it is stalled.
"""

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

from starling.errors import ProtocolError, StarlingError
from starling.launch.messages import Failed, Heartbeat, LauncherMessage, LearnerMessage, decode_from_launcher, encode
from starling.timeouts import HEARTBEAT_EVERY

VARIABLE = "STARLING_LINK_FD"
SCRATCH = "STARLING_SCRATCH"
"""The variable with the folder for temporary files that belongs to this run alone."""
WATCHED = "STARLING_WATCHED"
"""The variable that is 1 where a launcher tells learners of the loss of others."""
JOINS = "STARLING_JOINS"
"""The variable that is 1 for a learner that comes while others train already."""
ORPHANED = 3


class Link:
    """A learner's end of the line."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._lock = threading.Lock()
        self._listening = threading.Lock()
        self._heard: list[LauncherMessage] = []
        self._listeners: list[Callable[[LauncherMessage], None]] = []
        self.heartbeat: Callable[[], Heartbeat] = Heartbeat
        """Makes what is sent every `HEARTBEAT_EVERY` seconds."""
        threading.Thread(target=self._watch_launcher, name="starling-link", daemon=True).start()
        threading.Thread(target=self._beat, name="starling-heart", daemon=True).start()

    @classmethod
    def from_environment(cls) -> "Link | None":
        """The link that a launcher left for this process, or None where there is none (torchrun, Slurm)."""
        descriptor = os.environ.pop(VARIABLE, None)
        return None if descriptor is None else cls(socket.socket(fileno=int(descriptor)))

    def send(self, message: LearnerMessage) -> None:
        """Send a message to the launcher."""
        line = encode(message)
        with self._lock:
            self._line.sendall(line)

    def listen(self, listener: Callable[[LauncherMessage], None]) -> None:
        """Call `listener`, in a thread of the link, with each message of the launcher; at once with those so far."""
        with self._listening:
            self._listeners.append(listener)
            for message in self._heard:
                listener(message)

    def _beat(self) -> None:
        while True:
            time.sleep(HEARTBEAT_EVERY)
            with suppress(OSError):  # the launcher is gone, or a log cannot be written: the next heartbeat may succeed
                self.send(self.heartbeat())

    def _watch_launcher(self) -> None:
        code, reason = ORPHANED, "the launcher is gone: this learner ends"
        try:
            with self._line.makefile("rb") as lines:
                for line in lines:
                    message = decode_from_launcher(line)
                    with self._listening:
                        self._heard.append(message)
                        for listener in self._listeners:
                            listener(message)
        except OSError:
            pass  # the launcher is gone
        except ProtocolError as error:
            code, reason = error.exit_code, f"{error}: this learner ends"
        with suppress(OSError):  # the disk may be full
            sys.stderr.write(f"{reason}\n")
            sys.stderr.flush()
        if SCRATCH in os.environ:
            shutil.rmtree(os.environ[SCRATCH], ignore_errors=True)
        if os.getpgrp() == os.getpid():  # the launcher gave this learner a group of its own: its loading processes
            os.killpg(0, signal.SIGTERM)  # not SIGKILL, which would leave their semaphores in shared memory
        os._exit(code)


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
        link.send(Failed(type(error).__name__, str(error)))
        raise SystemExit(error.exit_code if isinstance(error, StarlingError) else 1) from error
