"""Learners that agree on a barrier while they go on: nobody passes it without knowing it."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import DistStoreError, HashStore

from starling.budget import Budget
from starling.engines.processes import checkpoint_barrier as agreed_marks
from starling.engines.processes.checkpoint_barrier import CheckpointBarrier, SaveRequests
from starling.engines.processes.handshake import Peers, do_nothing
from starling.engines.processes.place import Place
from starling.training.tickets import Barrier, Barriers, SyncGroupTickets
from starling.workload import Position
from tests.contract.problems import TinyRegression

PATIENCE = 30.0


@pytest.fixture(scope="module", autouse=True)
def looks_often() -> Iterator[None]:
    """Tests need not wait as long as learners do."""
    before, agreed_marks.POLL_SECONDS = agreed_marks.POLL_SECONDS, 0.001
    yield
    agreed_marks.POLL_SECONDS = before


class Waiting(Exception):  # noqa: N818 - it is no error
    """Raised in place of waiting on."""


def stop_waiting() -> None:
    raise Waiting


def peers(store: HashStore, rank: int, world: int, timeout_seconds: float = PATIENCE) -> Peers:
    return Peers(Place(rank, world, rank, world, store), timeout_seconds)


class Group:
    """The parts of some learners in the barriers of one membership, and what each knew when."""

    def __init__(self, world: int, minutes: float | None = None, look_around: Callable[[], None] = do_nothing) -> None:
        store = HashStore()
        self.save_requests = [SaveRequests(minutes) for _ in range(world)]
        self.known: list[list[tuple[int, int]]] = [[] for _ in range(world)]
        self.parts = [
            CheckpointBarrier(
                replace(peers(store, rank, world), look_around=look_around), self.save_requests[rank], self._note(rank)
            )
            for rank in range(world)
        ]

    def _note(self, rank: int) -> Any:
        return lambda barrier, number: self.known[rank].append((barrier, number))

    def start(self, *ranks: int) -> None:
        for rank in ranks or range(len(self.parts)):
            self.parts[rank].start()

    def close(self) -> None:
        for part in self.parts:
            part.close()

    def await_marks(self, num: int, *ranks: int) -> None:
        deadline = time.monotonic() + PATIENCE
        while any(len(self.known[rank]) < num for rank in ranks or range(len(self.parts))):
            assert time.monotonic() < deadline
            time.sleep(0.001)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(0, 60),
    st.integers(0, 4),
    st.booleans(),
    st.sets(st.integers(0, 4), max_size=4),
)
def test_no_learner_reaches_a_portion_after_a_barrier_unknowingly(
    world: int, asked_after: int, by: int, is_in_step: bool, idle: set[int]
) -> None:
    """In step, where all reach the same portions, and not, where each takes the next; some may take none at all."""
    group, by = Group(world), by % world
    shared, taking = count(), threading.Lock()
    behind: list[tuple[int, int, list[tuple[int, int]]]] = []

    def learn(rank: int) -> None:
        own = count()
        while len(behind) < world:
            with taking:
                portion = next(own) if is_in_step else next(shared)
            if portion == asked_after:
                group.save_requests[by].stop(15)
            group.parts[rank].reach(portion)
            if group.known[rank] and portion >= group.known[rank][0][0]:
                behind.append((rank, portion, list(group.known[rank])))
                return
            everything[rank].append(portion)

    everything: list[list[int]] = [[] for _ in range(world)]
    group.start()
    busy = [rank for rank in range(world) if rank not in idle] or [0]
    threads = [threading.Thread(target=learn, args=[rank]) for rank in busy]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    group.await_marks(1)
    group.close()
    ((barrier, number),) = {barriers[0] for barriers in group.known}
    assert number == 15
    assert [save_requests.stopped_by for save_requests in group.save_requests] == [15] * world
    for portions in everything:  # those that were reached when no barrier before them was known
        assert all(portion < barrier for portion in portions)
    if not is_in_step:
        assert sorted(portion for portions in everything for portion in portions) == list(range(barrier))


def test_who_has_answered_waits_at_its_answer_and_the_margin() -> None:
    """Until the last has answered; below that it goes on, and nothing else is waited for."""
    group = Group(3, look_around=stop_waiting)
    for portion in range(10):
        group.parts[0].reach(portion)
    group.save_requests[1].stop(2)
    group.start(1, 0)
    deadline = time.monotonic() + PATIENCE
    with pytest.raises(Waiting):
        for portion in count(10):
            group.parts[0].reach(portion)
            assert time.monotonic() < deadline
    with pytest.raises(Waiting):
        while time.monotonic() < deadline:  # until its thread has answered
            group.parts[1].settle()
    group.parts[2].reach(700)  # its thread has not answered yet
    group.start(2)
    group.await_marks(1)
    assert group.known[0] == group.known[1] == group.known[2]
    assert group.known[0][0][0] > 700
    for part in group.parts:
        part.settle()
        part.reach(100_000)
    group.close()


def test_timed_barriers_repeat_and_a_stop_ends_them() -> None:
    """Only the first learner looks at its clock; each barrier is the same for all, and beyond what anybody has
    reached."""
    group = Group(2, minutes=0.0002)
    group.start()
    for portion in range(5):
        group.parts[1].reach(portion)
    group.await_marks(5)
    group.save_requests[1].stop(15)
    deadline = time.monotonic() + PATIENCE
    while any(part.is_alive() for part in group.parts):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert group.known[0] == group.known[1]
    assert {number for _, number in group.known[0][:-1]} == {0}
    assert group.known[0][-1][1] == 15
    assert all(barrier >= 5 for barrier, _ in group.known[0][-2:])


def test_a_barrier_that_the_end_of_a_membership_interrupts_is_dropped() -> None:
    """The threads end though somebody has not answered, and the request is still there for the next membership."""
    group = Group(3, look_around=stop_waiting)
    group.save_requests[0].stop(15)
    group.start(0, 1)
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            group.parts[1].settle()
        except Waiting:
            break
        assert time.monotonic() < deadline
    group.close()
    assert not any(part.is_alive() for part in group.parts)
    assert group.known == [[], [], []]
    following = Group(2)
    following.save_requests[1] = following.parts[1]._requests = group.save_requests[0]
    following.start()
    following.await_marks(1)
    following.close()


def test_who_waits_for_a_barrier_in_vain_says_so() -> None:
    """A learner whose thread never answers is not waited for longer than the time-out."""
    store, save_requests = HashStore(), SaveRequests()
    save_requests.stop(15)
    part = CheckpointBarrier(peers(store, 0, 2, 0.2), save_requests, lambda barrier, number: None)
    part.start()
    deadline = time.monotonic() + PATIENCE
    with pytest.raises(DistStoreError, match="no checkpoint barrier was agreed on"):
        for portion in count():
            part.reach(portion)
            assert time.monotonic() < deadline
    part.close()


def test_without_save_requests_nothing_is_requested() -> None:
    """No thread, and nothing to wait for."""
    part = CheckpointBarrier(
        replace(peers(HashStore(), 0, 2), look_around=stop_waiting), None, lambda barrier, number: None
    )
    part.start()
    assert not part.is_alive()
    part.reach(5)
    part.settle()
    part.close()


def tickets(num_steps: int = 100, sync_group_size: int = 2) -> SyncGroupTickets:
    return SyncGroupTickets(TinyRegression(batches=12), Position(), Budget(steps=num_steps), sync_group_size)


def test_a_barrier_that_was_agreed_on_is_one_like_any_other() -> None:
    """It is passed once, in its place; where an epoch ends, it is that epoch's end."""
    barriers = Barriers(tickets())
    barriers.add(2)
    barriers.add(6)
    barriers.add(7)
    assert list(barriers.until(8)) == [Barrier(2), Barrier(6, (0,)), Barrier(7)]


def test_a_barrier_at_or_after_the_end_of_the_run_is_dropped() -> None:
    """What is saved there is the end's, whatever ends the run."""
    barriers = Barriers(tickets(num_steps=20))
    barriers.add(10)
    barriers.end_at(10)
    assert list(barriers.until(10)) == [Barrier(6, (0,))]
    by_steps = Barriers(tickets(num_steps=20))
    by_steps.add(10)
    assert list(by_steps.until(10)) == [Barrier(6, (0,))]
    by_time = Barriers(tickets())
    by_time.add(10)
    by_time.end_at(10)
    assert list(by_time.until(10)) == [Barrier(6, (0,))]


def test_a_run_that_is_ended_early_hands_out_what_is_before_its_end() -> None:
    """As if the budget were spent there: the same for what is claimed, and for what all have drawn."""
    given = tickets()
    given.end_at(7)
    assert [given.is_beyond(number) for number in (6, 7, 8)] == [False, True, True]
    assert given.handed_out(12) == 7
    assert given.handed_out(5) == 5
    assert len(list(given.take(count()))) == 14
