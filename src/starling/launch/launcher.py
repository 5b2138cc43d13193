"""Starts learner processes on this machine, watches them, and leaves none behind.

When a learner is killed, or has given no sign of life for too long and is killed therefore, the others may go on: they
are told the next view of who is there.
"""

import math
import os
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from starling.engines.processes import run_token
from starling.launch.joiners import Changes, Joiners
from starling.launch.process import Process, Seconds, end, signal_group, start
from starling.launch.watch import Loss, OnMessage, Watch

NO_CHANGES = Changes()


@contextmanager
def loopback_store() -> Generator[int, None, None]:
    """A store on a free port of the loopback interface, nowhere else; the port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        port = int(listener.getsockname()[1])
        # a bound socket handed over is the only way to keep TCPStore off the other interfaces
        store = TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(listener.fileno())
        )
        yield port
        del store


def launch(
    command: Sequence[str],
    world: int,
    log_folder: Path,
    on_message: OnMessage = lambda rank, message: None,
    on_loss: Callable[[Loss], None] | None = None,
    silence_seconds: Seconds = math.inf,
    changes: Changes = NO_CHANGES,
) -> list[Loss]:
    """Run `world` processes of `command` as learners until all have ended; the losses that were borne.

    What a learner prints goes to `log_folder/learner-<rank>.log`; what it sends through its `Link` to `on_message`.
    When one fails the others are ended and its error is raised here; `PeerLost` when it was killed; `Stopped` when
    this process is asked to end (a second signal ends everything at once). With `on_loss`, which is called then, the
    others go on without one that was killed, and may be joined by others as `changes` says. Who gives no sign of life
    for `silence_seconds` is killed.
    """
    log_folder.mkdir(parents=True, exist_ok=True)
    processes: list[Process] = []
    token = run_token.new_token()
    with loopback_store() as port, _scratch() as scratch, _signals(processes, scratch) as received:
        try:

            def begin(name: int, joins: bool = True) -> Process:
                process = start(command, name, world, port, log_folder, scratch, token, on_loss is not None, joins)
                processes.append(process)
                return process

            for rank in range(world):
                begin(rank, joins=False)
            joiners = Joiners(changes, processes, begin)
            watch = Watch(processes, on_message, on_loss, silence_seconds, received, changes, joiners)
            watch.until_all_ended()
            return watch.losses
        finally:
            end(processes)


@contextmanager
def _scratch() -> Generator[Path, None, None]:
    """A folder for the learners' temporary files: loading processes that are killed leave some behind."""
    usual = tempfile.gettempdir()
    parent = usual if len(usual) <= 50 else "/tmp"  # loading hangs when the path of a socket exceeds 107 characters
    with tempfile.TemporaryDirectory(prefix="starling-", dir=parent, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@contextmanager
def _signals(processes: list[Process], scratch: Path) -> Generator[list[int], None, None]:
    """A list that SIGINT and SIGTERM are added to instead of ending this process; the second one ends it."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) > 1:
            for process in processes:
                process.popen.kill()  # also one that is stopped, and would not see the end of its line
                signal_group(process, signal.SIGTERM)
            shutil.rmtree(scratch, ignore_errors=True)
            os._exit(128 + number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
