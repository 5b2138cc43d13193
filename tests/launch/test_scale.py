"""What store and launcher do for many learners grows as their number, and no learner delays the others."""

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from benchmarks.control_plane import Figures
from starling.budget import Budget
from starling.engines.processes.handshake import Handshake, Peers
from starling.engines.processes.place import Place
from starling.engines.processes.tickets import noted
from starling.errors import ProtocolError
from starling.launch import roster
from starling.launch.joiners import Changes
from starling.launch.launcher import Supervisor
from starling.launch.link import Line
from starling.launch.messages import (
    Heartbeat,
    LearnerMessage,
    NewMembership,
    decode_from_launcher,
    encode,
)
from starling.launch.process import LearnerProcess, Site
from starling.launch.roster import Roster
from starling.strategies import find_strategy
from starling.timeouts import READ
from starling.training.job import Job
from starling.training.membership import Membership
from starling.training.succession import MembershipStart, Past, plan_after
from starling.workload import Position
from tests.contract.cases import sgd
from tests.contract.problems import TinyRegression


class CountingStore:
    """Counts the values that are read."""

    def __init__(self) -> None:
        self._store = HashStore()
        self.num_read = 0

    def get(self, key: str) -> bytes:
        self.num_read += 1
        return self._store.get(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.num_read += len(keys)
        return self._store.multi_get(keys)

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)


def read_by_all(world: int, act: Callable[[Store, int], None]) -> int:
    """How many values the learners read if each of them does `act` with the store and its rank."""
    store = CountingStore()
    threads = [threading.Thread(target=act, args=[store, rank]) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    return store.num_read


def peers(store: Any, rank: int, world: int) -> Peers:
    return Peers(Place(rank, world, rank, world, store), 60.0)


@pytest.mark.parametrize("world", [2, 24])
def test_meeting_and_parting_read_a_few_values_for_each_learner(world: int) -> None:
    """Were it one of each for each, 128 learners would read 16,384."""

    def meet(store: Store, rank: int) -> None:
        peers(store, rank, world).shake_hands(Handshake(world, "adpsgd", 1, "float32", "same"))

    assert read_by_all(world, meet) == 5 * world
    assert read_by_all(world, lambda store, rank: peers(store, rank, world).part()) == 2 * world


def test_each_learner_still_names_the_first_that_differs_from_it() -> None:
    """Learner 0 says only which learners to look at."""
    strategies, said = ["adpsgd", "adpsgd", "dpsgd", "adpsgd", "dpsgd"], dict[int, str]()

    def meet(store: Store, rank: int) -> None:
        try:
            peers(store, rank, 5).shake_hands(Handshake(5, strategies[rank], 1, "float32", "same"))
        except ProtocolError as error:
            said[rank] = str(error).partition(" in ")[0]

    read_by_all(5, meet)
    differs = "learner {} and learner {} differ".format
    assert said == {0: differs(0, 2), 1: differs(1, 2), 2: differs(2, 0), 3: differs(3, 2), 4: differs(4, 0)}


def test_a_death_after_a_long_membership_costs_what_it_costs_after_a_short_one() -> None:
    """A billion mini-batches are done, and no learner goes through them again."""

    class Endless(TinyRegression):
        def num_batches(self, epoch: int) -> int:
            return 1 << 50

    store, world, most = HashStore(), 8, 10**9
    for rank in range(world):
        store.set(f"done/{rank}/kept", f"7 {most}")
        store.set(f"done/{rank}/7", f"{most + 2 * rank} ")
    for name, first in (("adpsgd", most), ("allreduce", most * world)):
        strategy = find_strategy(name)
        job = Job(Endless(batches=5), strategy, Budget(steps=1 << 50), sgd(0.1), options=strategy.options())
        plan = plan_after(
            MembershipStart(world, Position(), 0.0),
            [Past(0, most)] * world,
            job,
            lambda: noted(store, world, Position()),
        )
        outstanding = [ticket.step - most for ticket in plan.position.outstanding]
        assert outstanding == ([] if name == "allreduce" else list(range(1, 2 * world - 2, 2)))
        assert plan.position.next_ticket.step == first + (2 * world - 1 if name == "adpsgd" else 0)


@dataclass
class Stub(LearnerProcess):
    """A learner without a process; counts how often the launcher asks whether it runs."""

    theirs: socket.socket | None = None
    code: int | None = None
    num_polls: int = 0

    @property
    def exit_code(self) -> int | None:
        self.num_polls += 1
        return self.code

    def kill(self) -> None:
        self.code = -signal.SIGKILL


def start_none(learner_id: int, joins: bool) -> LearnerProcess:
    pytest.fail("no learner joins")


class Watched:
    """Stubs, and the supervisor that watches them."""

    def __init__(self, world: int, on_message: Callable[[int, LearnerMessage], None]) -> None:
        self.roster, self.stubs = Roster(world), list[Stub]()
        for learner_id in range(world):
            ours, theirs = socket.socketpair()
            self.stubs.append(Stub(Path(f"learner-{learner_id}.log"), Line(ours), theirs=theirs))
            self.roster.start(learner_id, self.stubs[-1])
        self.supervisor = Supervisor(Site(start_none, lambda: None), self.roster, Changes("continue"), on_message)

    def say(self, learner_id: int, content: bytes) -> None:
        theirs = self.stubs[learner_id].theirs
        assert theirs is not None
        theirs.sendall(content)

    def end(self) -> None:
        for stub in self.stubs:
            stub.code = 0
            if stub.theirs is not None:
                stub.theirs.close()


def test_a_message_costs_the_same_however_many_learners_there_are() -> None:
    """The launcher looks after all of its processes at intervals, and not for each message."""
    world, num_messages, heard = 32, 300, threading.Semaphore(0)
    watched = Watched(world, lambda learner_id, message: heard.release())
    seconds, num_polls = 0.0, 0

    def talk() -> None:
        nonlocal seconds, num_polls
        begin = time.monotonic()
        for number in range(num_messages):
            watched.say(number % world, encode(Heartbeat(number)))
            heard.acquire()
        seconds, num_polls = time.monotonic() - begin, sum(stub.num_polls for stub in watched.stubs)
        watched.end()

    talking = threading.Thread(target=talk)
    talking.start()
    watched.supervisor.until_all_ended()
    talking.join()
    assert num_polls <= 4 * world * (seconds / READ + 2)
    assert sum(record.num_steps for record in watched.roster.learners.values()) > 0


def test_a_restarted_learner_is_read_whose_line_has_the_number_of_a_closed_one() -> None:
    """As after a kill of a learner that had sent nothing for too long, whose line nobody had read to its end."""
    heard: list[int] = []

    def on_message(learner_id: int, message: LearnerMessage) -> None:
        heard.append(learner_id)
        if learner_id == 0:
            watched.end()
            return
        closed = watched.stubs[0].line
        number = closed.fileno()
        closed.close()
        ours, theirs = socket.socketpair()
        assert ours.fileno() == number
        watched.stubs.append(Stub(Path("learner-0.log"), Line(ours), theirs=theirs))
        watched.roster.start(0, watched.stubs[-1])
        theirs.sendall(encode(Heartbeat(1)))

    watched = Watched(2, on_message)
    watched.say(1, encode(Heartbeat(1)))
    watched.supervisor.until_all_ended()
    assert heard == [1, 0]


def test_an_endless_message_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would fill the launcher's memory."""
    monkeypatch.setattr(roster, "LONGEST_MESSAGE", 1 << 20)
    watched = Watched(2, lambda learner_id, message: None)

    def talk() -> None:
        with suppress(BrokenPipeError):
            watched.say(1, b"x" * (1 << 22))

    talking = threading.Thread(target=talk, daemon=True)
    talking.start()
    with pytest.raises(ProtocolError, match=r"learner 1 sent a message of more than 1 MiB; see its log: learner-1.log"):
        watched.supervisor.until_all_ended()
    talking.join()
    watched.end()


def test_a_learner_that_does_not_read_does_not_stop_its_launcher_and_misses_nothing() -> None:
    """A hundred memberships of 1,024 learners are more than a socket holds."""
    ours, theirs = socket.socketpair()
    line = Line(ours)
    for generation in range(100):
        line.tell(NewMembership(Membership(generation, tuple(range(1024)))))
    assert line.untold
    received = b""
    while line.untold or received.count(b"\n") < 100:
        received += theirs.recv(1 << 16)
        line.tell_rest()
    heard = [decode_from_launcher(line) for line in received.splitlines()]
    assert [each.membership.number for each in heard if isinstance(each, NewMembership)] == list(range(100))


@pytest.mark.soak
@pytest.mark.parametrize("trouble", ["", "--flood"])
def test_128_learners_lose_some_one_by_one_and_half_at_once(trouble: str, tmp_path: Path) -> None:
    """Also if one of them sends messages without end. Learner 0 is among those that die."""
    command = [sys.executable, "-m", "benchmarks.control_plane", "128", str(tmp_path), *filter(None, [trouble])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    figures = Figures(**json.loads(done.stdout))
    assert len(figures.deaths) == 3 and figures.half > 0.0
    assert max(*figures.deaths, figures.half) < 20.0, figures
