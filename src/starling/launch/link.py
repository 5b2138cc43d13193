"""The socket between a launcher and each of its learners: messages in both directions, and the learner's heartbeat.

If the launcher dies, the learner reads end-of-file and exits, so that no process is left behind. If no heartbeat comes
for a long time, the launcher knows that the learner is stalled.
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
from pathlib import Path

from starling.engines.processes.forks import owned
from starling.errors import ProtocolError, StarlingError
from starling.launch.messages import Failed, Heartbeat, LauncherMessage, LearnerMessage, decode_from_launcher, encode
from starling.timeouts import HEARTBEAT_EVERY

VARIABLE = "STARLING_LINK_FD"
SCRATCH = "STARLING_SCRATCH"
"""Environment variable: the folder for the temporary files of this run."""
WATCHED = "STARLING_WATCHED"
"""Environment variable: 1 if the launcher announces memberships after losses."""
JOINS = "STARLING_JOINS"
"""Environment variable: 1 if the learner joins a running experiment."""
OWN_DEVICE = "STARLING_OWN_DEVICE"
"""Environment variable: 1 if the learner sees one CUDA device, which no other learner uses."""
NODE_CPUS = "STARLING_NODE_CPUS"
"""Environment variable: on a Ray cluster, the number of CPUs that the node offers, which may be fewer than it has."""
ORPHANED = 3
"""The exit code of a learner whose launcher died."""


class Link:
    """A learner's end of the socket."""

    def __init__(self, line: socket.socket) -> None:
        self._line = owned(line)
        self._lock = threading.Lock()
        self._listening = threading.Lock()
        self._heard: list[LauncherMessage] = []
        self._listeners: list[Callable[[LauncherMessage], None]] = []
        self.heartbeat: Callable[[], Heartbeat] = Heartbeat
        """Makes the message that is sent every `HEARTBEAT_EVERY` seconds."""
        self.leftovers = [Path(os.environ[SCRATCH])] if SCRATCH in os.environ else []
        """The folders that are removed if the launcher dies, which removes them otherwise."""
        threading.Thread(target=self._watch_launcher, name="starling-link", daemon=True).start()
        threading.Thread(target=self._beat, name="starling-heart", daemon=True).start()

    @classmethod
    def from_environment(cls) -> "Link | None":
        """The link to the launcher that started this process; None under torchrun and Slurm."""
        descriptor = os.environ.pop(VARIABLE, None)
        return None if descriptor is None else cls(socket.socket(fileno=int(descriptor)))

    def send(self, message: LearnerMessage) -> None:
        """Send a message to the launcher."""
        line = encode(message)
        with self._lock:
            self._line.sendall(line)

    def listen(self, listener: Callable[[LauncherMessage], None]) -> None:
        """Call `listener` with each message of the launcher: at once with earlier ones, in the link's thread with later
        ones."""
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
        code, reason = ORPHANED, "the launcher is gone: this learner exits"
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
            code, reason = error.exit_code, f"{error}: this learner exits"
        with suppress(OSError):  # the disk may be full
            sys.stderr.write(f"{reason}\n")
            sys.stderr.flush()
        for folder in self.leftovers:
            shutil.rmtree(folder, ignore_errors=True)
        if os.getpgrp() == os.getpid():  # the process group consists of this learner and its loading processes
            os.killpg(0, signal.SIGTERM)  # SIGKILL would leave their semaphores in shared memory
        os._exit(code)


@contextmanager
def reported_errors(link: Link | None) -> Generator[None, None, None]:
    """Report an error to the launcher, print its traceback, and exit with its exit code. Without a link, errors
    propagate."""
    try:
        yield
    except Exception as error:
        if link is None:
            raise
        traceback.print_exc()
        link.send(Failed(type(error).__name__, str(error)))
        raise SystemExit(error.exit_code if isinstance(error, StarlingError) else 1) from error
