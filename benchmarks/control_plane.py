"""The store and the supervisor with many learners that compute nothing: their cost, and the time to handle a death.

The learners are processes with a real link to a real launcher. They meet, plan, claim and open rounds like learners,
but have no model, no gradients, and no connections to each other.

As a program, `python -m benchmarks.control_plane LEARNERS FOLDER` measures one number of learners in this process, and
prints the figures as JSON; with `--profile`, it also prints where the supervisor's main thread spends its time; with
`--flood`, one learner sends messages without end.
"""

import cProfile
import json
import os
import pstats
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import IO, Any
from unittest.mock import patch

import torch
from rich.console import Console

from benchmarks.measuring import Bar
from benchmarks.runs import Run
from starling.engines.processes.handshake import Handshake, Peers
from starling.engines.processes.member import PLAN, agree_on_plan
from starling.engines.processes.stalls import Waits
from starling.engines.processes.tickets import ENDED, DoneNotes, Draws, StoreBoard
from starling.events import Events
from starling.launch.joiners import Changes
from starling.launch.launcher import launch
from starling.launch.link import Link
from starling.launch.messages import (
    Activity,
    CanStop,
    Ended,
    Heartbeat,
    LearnerMessage,
    Progress,
    Reached,
    Stop,
    Stretch,
    values_of,
)
from starling.launch.rendezvous import find_membership, find_place
from starling.launch.roster import Roster
from starling.reporting.progress import Display
from starling.timeouts import SEND_EVERY
from starling.training.membership import Membership, MembershipChanged
from starling.training.succession import MembershipStart, Past, next_membership
from starling.workload import Position, Ticket

Seconds = float
WORLDS = (8, 32, 128)
CLAIMS_PER_SECOND, LONGEST = 2000.0, 2.0
"""Bars at the largest number of learners: claims per second, and seconds until the survivors have entered the next
membership."""
CLAIMING, ROUNDS, STEADY = 4.0, 3.0, 3.0
"""Seconds for which learners claim as fast as they can, open rounds as fast as they can, and claim
`CLAIMS_PER_SECOND`."""
KILLS = 3
"""Number of learners that die one after another, before half of the others die at once."""
LIMIT = 120.0
TIMEOUT = 60.0


@dataclass
class Figures:
    """Measurements with one number of learners."""

    learners: int
    starting: Seconds = 0.0
    """Time from the launch to the last learner's entry, without loading torch."""
    claims_per_second: float = 0.0
    """Mini-batches per second that all learners together drew and recorded as done."""
    rounds_per_second: float = 0.0
    """Rounds per second that one learner opened and all others waited for."""
    supervisor: float = 0.0
    """Processor seconds per second of the supervisor's main thread, at `CLAIMS_PER_SECOND`."""
    store: float = 0.0
    """Processor seconds per second of the other threads of its process, which serve the store, at
    `CLAIMS_PER_SECOND`."""
    deaths: list[Seconds] = field(default_factory=list)
    """Times from each kill -9 to the last survivor's entry into the next membership."""
    announced: list[Seconds] = field(default_factory=list)
    """Times from each kill -9 to its announcement."""
    half: Seconds = 0.0
    """Time to the last survivor's entry into the next membership, when half of the learners are killed at once."""

    def __str__(self) -> str:
        return (
            f"{self.learners} learners: {self.claims_per_second:,.0f} claims/s, {self.rounds_per_second:,.0f} "
            f"rounds/s, supervisor {self.supervisor:.3f} and store {self.store:.3f} CPU s/s, next membership after "
            f"{median(self.deaths):.2f} s (half of them: {self.half:.2f} s), started in {self.starting:.1f} s"
        )


def measure(folder: Path) -> list[Bar]:
    """The bars at the largest number of learners; the figures for all numbers are shown."""
    found = [measured(world, folder) for world in WORLDS]
    for each in found:
        sys.stderr.write(f"  {each}\n")
    most = found[-1]
    claims, death = most.claims_per_second, max(most.deaths)
    name = f"{most.learners} learners: claims/s / {CLAIMS_PER_SECOND:g}"
    detail = "; ".join(f"{each.learners}: {each.claims_per_second:,.0f}" for each in found)
    deaths = "; ".join(f"{each.learners}: {max(each.deaths):.2f} s" for each in found)
    return [
        Bar.at_least(name, claims / CLAIMS_PER_SECOND, 1.0, detail),
        Bar.at_most(
            f"{most.learners} learners: longest time from a death to the next membership, s / {LONGEST:g} s",
            death / LONGEST,
            1.0,
            f"{deaths}; half of the learners at once: {most.half:.2f} s",
        ),
        Bar.at_most(
            f"{most.learners} learners at {CLAIMS_PER_SECOND:g} claims/s: CPU of the supervisor's main thread, s per s",
            most.supervisor,
            0.5,
            "; ".join(f"{each.learners}: {each.supervisor:.3f}, store {each.store:.3f}" for each in found),
        ),
    ]


def measured(world: int, folder: Path) -> Figures:
    """The figures for `world` learners, measured in a separate process."""
    own = folder / f"control-{world}"
    own.mkdir(parents=True)
    command = [sys.executable, "-m", "benchmarks.control_plane", str(world), str(own)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    if said.returncode:
        raise RuntimeError(f"{world} learners ended with exit code {said.returncode}:\n{said.stderr[-4000:]}")
    return Figures(**json.loads(said.stdout))


# The supervisor


class Forks:
    """A replacement for `Popen`: learners are forked from this process, which has loaded torch, before it has
    threads."""

    def __init__(self, number: int, program: Callable[[], None]) -> None:
        if len(list(Path("/proc/self/task").iterdir())) > 1:
            raise RuntimeError("a process with threads cannot be forked")
        self._waiting: list[tuple[int, socket.socket]] = []
        for _ in range(number):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            pid = os.fork()
            if pid == 0:
                for _, line in [*self._waiting, (0, ours)]:
                    line.close()
                _become(theirs, program)
            theirs.close()
            self._waiting.append((pid, ours))

    def __call__(
        self, args: Sequence[str], *, env: Mapping[str, str], stdout: IO[bytes], pass_fds: Sequence[int], **how: Any
    ) -> "Forked":
        pid, line = self._waiting.pop(0)
        with line:
            socket.send_fds(line, [json.dumps(dict(env)).encode()], [stdout.fileno(), *pass_fds])
        return Forked(pid)


class Forked:
    """The part of `Popen` that `LocalProcess` needs, at the same cost."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (TIMEOUT if timeout is None else timeout)
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("learner", timeout or 0.0)
            time.sleep(0.002)
        return self.returncode or 0

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _become(line: socket.socket, program: Callable[[], None]) -> None:
    code = 1
    try:
        message, files, _, _ = socket.recv_fds(line, 1 << 17, 4)
        if message:
            os.setsid()
            log, link = files
            os.environ.clear()
            os.environ.update(json.loads(message))
            os.environ["STARLING_LINK_FD"] = str(link)
            for number in (1, 2):
                os.dup2(log, number)
            program()
            code = 0
    finally:
        sys.stderr.flush()
        os._exit(code)


class Supervisor:
    """Follows the learners of one launch, records the figures, and kills learners."""

    def __init__(self, world: int) -> None:
        self.figures = Figures(world)
        self.roster = Roster(world)
        self._began = self._changed_at = time.monotonic()
        self._entered: dict[int, int] = {}
        self._claims: dict[int, float] = {}
        self._spent: tuple[Seconds, Seconds, Seconds] | None = None
        self._steady_until = 0.0
        self._killed_at: Seconds | None = None
        self._killed: set[int] = set()
        self._was_announced = False
        self._num_kills = 0
        self._is_over = False

    def is_over(self) -> bool:
        return self._is_over

    def on_loss(self, loss: object) -> None:
        if self._killed_at is not None and not self._was_announced:
            self._was_announced = True
            self.figures.announced.append(time.monotonic() - self._killed_at)

    def hear(self, learner_id: int, message: LearnerMessage) -> None:
        now = time.monotonic()
        if isinstance(message, Reached) and message.stage == "entered":
            self._entered[learner_id] = message.generation
            self._look_who_is_here(now)
        if values := values_of(message):
            self._note(learner_id, values)
        self._measure_steady(now)

    def _look_who_is_here(self, now: float) -> None:
        here = sum(each == self.roster.membership.number for each in self._entered.values())
        if here < self.figures.learners - len(self._killed):
            return
        if self._killed_at is None and self._num_kills == 0:
            self.figures.starting = now - self._began
        elif self._killed_at is not None:
            if len(self._killed) == self._num_kills:
                self.figures.deaths.append(now - self._killed_at)
            else:
                self.figures.half = now - self._killed_at
                self._is_over = True
            self._killed_at, self._changed_at = None, now

    def _note(self, learner_id: int, values: Mapping[str, Any]) -> None:
        if "claims" in values:
            self._claims[learner_id] = values["claims"]
        if "rounds" in values:
            self.figures.rounds_per_second = values["rounds"]

    def _measure_steady(self, now: float) -> None:
        """Once all claim at a steady pace, measure the processor time, then the deaths."""
        if len(self._claims) < self.figures.learners or not self.figures.rounds_per_second or self._is_over:
            return
        spent = now, time.thread_time(), time.process_time()
        if self._spent is None:
            self.figures.claims_per_second = sum(self._claims.values())
            self._spent, self._steady_until = spent, now + STEADY
        elif now < self._steady_until:
            return
        elif not self.figures.supervisor:
            seconds, thread, process = (after - before for after, before in zip(spent, self._spent, strict=True))
            self.figures.supervisor, self.figures.store = thread / seconds, (process - thread) / seconds
        elif self._killed_at is None and now - self._changed_at > 0.5:
            self._kill(now)

    def _kill(self, now: float) -> None:
        living = [each for each in range(self.figures.learners) if each not in self._killed]
        self._num_kills += 1
        # learner 0, which collects what others say at a membership change, dies as well
        victims = [living[-1], living[0], living[1]] if self._num_kills <= KILLS else []
        chosen = [victims[self._num_kills - 1]] if victims else living[: len(living) // 2]
        processes = [self.roster.learners[each].process for each in chosen]
        self._killed_at, self._was_announced = now, False
        for process in processes:
            process.signal(signal.SIGKILL)
        self._killed.update(chosen)
        for each in chosen:
            self._entered.pop(each, None)


def supervise(world: int, folder: Path, is_profiled: bool = False, has_flood: bool = False) -> Figures:
    """Launch `world` learners in this process, and measure."""
    forks = Forks(world, lambda: Dummy(world, has_flood).run())
    supervisor = Supervisor(world)
    profile, nowhere = cProfile.Profile(time.thread_time), Events(Path(os.devnull), lambda path, error: None)
    with (
        patch("starling.launch.process.Popen", forks),
        (folder / "screen").open("w") as screen,
        Display("control plane", supervisor.roster, Console(file=screen), nowhere) as display,
    ):

        def on_message(learner_id: int, message: LearnerMessage) -> None:
            display.hear(message)
            supervisor.hear(learner_id, message)

        if is_profiled:
            profile.enable()
        launch(
            ["learner"],
            world,
            folder,
            on_message,
            Changes("continue", TIMEOUT, is_enough=supervisor.is_over, on_lost=supervisor.on_loss),
            supervisor.roster,
        )
        profile.disable()
    if is_profiled:
        pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(25)
    return supervisor.figures


# A learner


class Dummy:
    """A learner that meets the others and claims mini-batches, but computes nothing."""

    def __init__(self, world: int, has_flood: bool) -> None:
        link = Link.from_environment()
        if link is None:
            raise RuntimeError("a learner without a launcher")
        self._link = link
        self._world = world
        self._place = find_place(TIMEOUT)
        self._feed = find_membership(self._place, link)
        self._job = Run("adpsgd", world, num_parameters=1, steps=1 << 40).job()
        self._waits = Waits()
        self._num_done = 0
        self._past = Past()
        self._is_over = threading.Event()
        self._sent_at = 0.0
        link.heartbeat = lambda: Heartbeat(self._num_done)
        link.listen(Stop, lambda message: self._is_over.set())
        link.send(CanStop())
        if has_flood and self._feed.name == world - 2:
            threading.Thread(target=self._flood, daemon=True).start()

    def _flood(self) -> None:
        while not self._is_over.is_set():
            self._link.send(Activity("talking"))

    def run(self) -> None:
        """Enter one membership after another until told to stop."""
        membership = self._feed.first()
        while not self._is_over.is_set():
            try:
                self._be_in(membership)
            except MembershipChanged:
                membership = next_membership(self._job, membership, self._feed.latest, is_ordered=True)
        self._link.send(Ended(self._num_done))
        time.sleep(0.1)

    def _be_in(self, membership: Membership) -> None:
        root = Peers(self._place, TIMEOUT, self._waits, self._feed)
        peers = root.enter(membership)
        rank, world, store = peers.rank, peers.world, peers.store
        self._feed.report("arrived", membership.number)
        mine = Handshake(world, "adpsgd", 1, "torch.float32", "benchmark")
        peers.shake_hands(mine)
        if membership.number > 0:
            agree_on_plan(root.store, peers, self._past, self._job, lambda plan: None)
        elif rank == 0:
            store.set(PLAN, MembershipStart(world, Position(), 0.0).encode())
        self._feed.report("entered", membership.number)
        self._past = Past(membership.number, 0, 0.0)
        draws = Draws(peers, range(rank, rank + 1))
        try:
            if membership.number == 0:
                self._race(peers, draws)
            notes = DoneNotes(store, rank, world) if membership.number else self._notes
            while not self._is_over.is_set():
                peers.look_around()
                self._claim(draws, notes, peers)
                self._is_over.wait(world / CLAIMS_PER_SECOND)
            peers.part()
        finally:
            draws.close()

    def _race(self, peers: Peers, draws: Draws) -> None:
        """Claim, and then open rounds, as fast as possible, with all learners at the same time."""
        store, rank = peers.store, peers.rank
        self._notes = DoneNotes(store, rank, self._world)
        if store.add("here", 1) == self._world:
            store.set("go", repr(time.monotonic() + 0.2))
        begin = float(store.get("go"))
        time.sleep(max(0.0, begin - time.monotonic()))
        draws.begin()
        while time.monotonic() < begin + CLAIMING:
            self._claim(draws, self._notes, peers)
        self._link.send(Activity(values={"claims": self._num_done / CLAIMING}))
        time.sleep(max(0.0, begin + CLAIMING + 0.5 - time.monotonic()))
        began, num_rounds, board = time.monotonic(), 0, StoreBoard(store, rank, self._world)
        while True:
            if num_rounds % self._world != rank:
                is_open = board.await_open(num_rounds)
            elif time.monotonic() < begin + CLAIMING + ROUNDS:
                is_open = board.open(num_rounds, is_behind=True)
            else:
                store.add(f"rounds/{num_rounds}", ENDED)  # ends the others' wait, as `finish` of the last learner does
                is_open = False
            if not is_open:
                break
            num_rounds += 1
        if rank == 0:
            self._link.send(Activity(values={"rounds": num_rounds / (time.monotonic() - began)}))

    def _claim(self, draws: Draws, notes: DoneNotes, peers: Peers) -> None:
        number = draws.take()
        draws.begin()
        notes.add(Ticket(0, number, number))
        self._num_done += 1
        if (now := time.monotonic()) - self._sent_at >= SEND_EVERY:
            self._sent_at = now
            done = Stretch(peers.rank, now, SEND_EVERY, number, 1, 1, 1, losses=1.0, audio=SEND_EVERY)
            shown = Progress(peers.rank, done, done, 0, number, 1 << 20, 0.1, 0.5)
            with suppress(OSError):
                self._link.send(shown)


ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",  # NumPy starts the others when imported, and a process with threads is not forked
    "RES_OPTIONS": "timeout:1 attempts:1",  # torch looks up the host name of each connection, however slowly that goes
}


def main() -> None:
    if not ENVIRONMENT.items() <= os.environ.items():
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **ENVIRONMENT})
    torch.set_num_threads(1)
    world, folder = int(sys.argv[1]), Path(sys.argv[2])
    found = supervise(world, folder, "--profile" in sys.argv, "--flood" in sys.argv)
    sys.stdout.write(json.dumps(asdict(found)))


if __name__ == "__main__":
    main()
