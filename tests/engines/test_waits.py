"""What a process waits for is known to whoever asks."""

import threading
from collections.abc import Generator
from contextlib import contextmanager

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from starling.engines.processes.handshake import Peers
from starling.engines.processes.place import Place
from starling.engines.processes.stalls import BACKGROUND, OWN_ROUNDS, Waits


class Clock:
    """Goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def background_waiting(waits: Waits) -> Generator[None, None, None]:
    """Within this context, a learner's background waits for learner 2."""
    is_in, may_go = threading.Event(), threading.Event()

    def average() -> None:
        with waits.waiting("receiving from learner 2", [2]):
            is_in.set()
            may_go.wait(10.0)

    background = threading.Thread(target=average, name=f"{BACKGROUND}-0")
    background.start()
    assert is_in.wait(10.0)
    try:
        yield
    finally:
        may_go.set()
        background.join()


def test_a_wait_says_for_whom_and_since_when_by_the_names_of_learners() -> None:
    """Ranks change with each membership; names do not, and nobody waits for itself."""
    clock = Clock()
    waits = Waits(clock)
    waits.among(1, [0, 3, 5])
    with waits.waiting("a mean", range(3), is_group=True):
        clock.now += 4.0
        wait = waits.longest(than=1.0)
        assert wait is not None
        assert (wait.what, wait.whom, wait.is_group, wait.seconds) == ("a mean", (0, 5), True, 4.0)
        assert waits.longest(than=5.0) is None
    assert waits.longest() is None


def test_the_usual_time_is_that_between_waits_of_one_kind() -> None:
    """Whoever the peer is; a single long one changes nothing."""
    clock = Clock()
    waits = Waits(clock)
    for step, seconds in enumerate([2.0, 2.0, 90.0, 2.0, 2.0]):
        with waits.waiting(f"receiving from learner {step % 2}", [step % 2]):
            clock.now += seconds
    with waits.waiting("receiving from learner 0", [0]):
        clock.now += 15.0
        wait = waits.longest()
    assert wait is not None
    assert wait.usual == 2.0
    assert not wait.is_unusual(10.0, times=10.0)
    assert wait.is_unusual(10.0, times=5.0)


def test_a_wait_inside_another_is_told_while_it_lasts() -> None:
    """Data that wait for a claim wait for another learner."""
    clock = Clock()
    waits = Waits(clock)
    with waits.waiting("data"):
        clock.now += 1.0
        with waits.waiting("claiming", [0]):
            assert waits.longest().what == "claiming"  # type: ignore[union-attr]
        assert waits.longest().what == "data"  # type: ignore[union-attr]


def test_what_a_background_waits_for_explains_who_waits_for_it() -> None:
    """The training that waits for its own last averaging rounds waits for those that the background waits for."""
    clock = Clock()
    waits = Waits(clock)
    with background_waiting(waits):
        clock.now += 3.0
        alone = waits.longest()
        with waits.waiting(OWN_ROUNDS):
            both = waits.longest()
        with waits.waiting("data"):
            first = waits.longest()
    assert alone is not None
    assert both is not None
    assert (alone.whom, alone.is_behind) == ((2,), True)
    assert (both.whom, both.is_behind) == ((2,), False)
    assert first is not None
    assert (first.what, first.is_behind) == ("data", False)


def test_a_background_that_still_waits_for_a_vanished_machine_is_no_wait_of_the_next_membership() -> None:
    """Nor are ranks of one membership names of another."""
    waits = Waits(Clock())
    waits.among(0, [0, 1, 2])
    with background_waiting(waits), waits.waiting("the next membership"):
        waits.among(0, [0, 1])
        left = waits.longest()
    assert left is not None and left.what == "the next membership"
    assert waits.longest() is None


@pytest.mark.parametrize("is_seen_by_beat", [False, True])
def test_time_in_which_the_process_stood_still_is_no_wait(is_seen_by_beat: bool) -> None:
    """A stopped learner did not wait for the others: they waited for it. Whichever thread runs first notices the
    stop."""
    clock = Clock()
    waits = Waits(clock)
    waits.beat()
    began = waits.running()
    with waits.waiting("a mean"):
        clock.now += 30.0
        if is_seen_by_beat:
            assert waits.beat() == 29.5
        assert waits.running() - began == 0.5
        assert waits.longest().seconds == 0.5  # type: ignore[union-attr]
    assert waits.beat() == (0.0 if is_seen_by_beat else 29.5)
    assert (waits.running_and_stopped()[1], waits.running_and_stopped()[1]) == (29.5, 0.0)
    clock.now += 1.0
    assert waits.running() - began == 1.5


def test_without_heartbeats_no_time_counts_as_stopped() -> None:
    clock = Clock()
    waits = Waits(clock)
    began = waits.running()
    clock.now += 30.0
    assert (waits.running() - began, waits.running_and_stopped()[1]) == (30.0, 0.0)


def test_who_has_not_written_a_key_is_known_while_it_is_awaited() -> None:
    """Of all that greet each other, those that are missing."""
    store, waits = HashStore(), Waits()
    store.set("word/0", "")
    seen: list[tuple[int, ...]] = []

    def look_around() -> None:
        wait = waits.longest()
        if wait is not None and wait.what == "a word" and wait.whom == (1,):
            seen.append(wait.whom)
            store.set("word/1", "")

    waits.among(7, range(8))
    peers = Peers(Place(7, 8, 0, 1, store), 20.0, waits, look_around=look_around)
    peers.await_keys(["word/0", "word/1"], "a word", [0, 1])
    assert seen == [(1,)]
