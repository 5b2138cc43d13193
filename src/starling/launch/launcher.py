"""Starts learner processes, on this machine unless told otherwise, watches them, and leaves none behind.

When a learner dies, or is killed because it sent no heartbeat for too long, the others may continue: the launcher
announces the next membership to them.
"""

import math
import os
import shutil
import signal
import socket
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from starling.engines.processes import run_token
from starling.engines.processes.forks import own_connections, owned
from starling.launch.joiners import Changes, Joiners
from starling.launch.process import (
    LearnerProcess,
    Machines,
    Program,
    Site,
    end,
    loopback_interface,
    scratch_folder,
    start,
)
from starling.launch.roster import LearnerRecord, Loss, Roster
from starling.launch.stopping import end_now, on_stop_signal
from starling.launch.watch import OnMessage, Watch

NO_CHANGES = Changes()
Seconds = float


@contextmanager
def loopback_store(address: str = "127.0.0.1") -> Generator[int, None, None]:
    """Run a store that listens on the interface of `address` only, by default the loopback, and yield its port."""
    with owned(socket.socket()) as listener:
        listener.bind((address, 0))
        listener.listen(128)
        port = int(listener.getsockname()[1])
        # passing a bound socket is the only way to keep TCPStore off the other interfaces
        with own_connections():
            store = TCPStore(
                address, port, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(listener.fileno())
            )
        yield port
        del store


@dataclass(frozen=True)
class _Here:
    program: Program
    port: int
    scratch: Path

    def start(self, learner_id: int, joins: bool) -> LearnerProcess:
        place = {
            "LOCAL_RANK": learner_id,
            "LOCAL_WORLD_SIZE": self.program.world,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": self.port,
            "GLOO_SOCKET_IFNAME": loopback_interface(),
        }
        return start(self.program, learner_id, joins, self.scratch, place)

    def abandon(self) -> None:
        shutil.rmtree(self.scratch, ignore_errors=True)


@contextmanager
def this_machine(program: Program) -> Generator[Site, None, None]:
    """Starts learners as child processes on this machine, whose store and sockets are on its loopback interface."""
    with loopback_store() as port:
        site = _Here(program, port, scratch_folder())
        try:
            yield site
        finally:
            site.abandon()


def launch(
    command: Sequence[str],
    world: int,
    log_folder: Path,
    on_message: OnMessage = lambda learner_id, message: None,
    on_loss: Callable[[Loss], None] | None = None,
    silence_seconds: Seconds = math.inf,
    changes: Changes = NO_CHANGES,
    roster: Roster | None = None,
    is_enough: Callable[[], bool] = lambda: False,
    machines: Machines = this_machine,
) -> list[Loss]:
    """Run `command` in `world` learner processes until all have exited, and return the losses that the others survived.

    A learner's output goes to `log_folder/learner-<id>.log`, and the messages that it sends through its `Link` to
    `on_message`. If a learner fails, the others are ended and its error is raised.

    Args:
        command: The command line of a learner.
        world: The number of learners at the start.
        log_folder: Created if it is missing.
        on_message: Called with each message and the id of its sender.
        on_loss: If given, the other learners continue when a learner is killed, and this is called with the loss.
        silence_seconds: A learner that sends no heartbeat for so long is killed.
        changes: Which learners may join or be restarted; only with `on_loss`.
        roster: Where the learners are recorded; pass one to read it during the run.
        is_enough: Whether the learners shall save and end before their budget is spent, which is no error.
        machines: Where the learners run.

    Raises:
        PeerLost: A learner was killed, and the others cannot continue.
        Stopped: This process received SIGINT or SIGTERM. A second signal ends everything at once.
        StarlingError: A learner failed.
    """
    log_folder.mkdir(parents=True, exist_ok=True)
    roster = roster or Roster(world)
    processes: list[LearnerProcess] = []
    program = Program(tuple(command), world, log_folder, run_token.new_token(), on_loss is not None)
    with machines(program) as site, _signals(processes, site) as received:
        try:

            def begin(learner_id: int, joins: bool = True) -> LearnerRecord:
                process = site.start(learner_id, joins)
                processes.append(process)
                return roster.start(learner_id, process, joins)

            for learner_id in range(world):
                begin(learner_id, joins=False)
            joiners = Joiners(changes, roster, begin)
            watch = Watch(roster, on_message, on_loss, silence_seconds, received, changes, joiners, is_enough)
            watch.until_all_ended()
            return roster.lost
        finally:
            end(processes)


@contextmanager
def _signals(processes: list[LearnerProcess], site: Site) -> Generator[list[int], None, None]:
    """Collect SIGINT and SIGTERM in a list instead of ending this process; the second signal ends it."""
    received: list[int] = []

    def kill_all(number: int) -> None:
        for process in processes:
            process.signal(signal.SIGKILL)  # a stopped process would not notice that its link is closed
            process.signal_group(signal.SIGTERM)
        site.abandon()
        end_now(number)

    with on_stop_signal(received.append, kill_all):
        yield received
