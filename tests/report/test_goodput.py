"""Goodput accounts for all of the machines' time: what is in the model, and what was lost, by cause."""

import pytest

from starling.launch.messages import Ended, Heartbeat, Progress, Reached, Stretch
from starling.launch.roster import Roster
from starling.reporting.goodput import goodput_of
from starling.training.membership import Membership


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def worked(roster: Roster, learner: int, batches: int, computing: float, peers: float, data: float) -> None:
    new = Stretch(
        learner, batches=batches, frames=batches, computing=computing, waiting_for_peers=peers, waiting_for_data=data
    )
    roster.hear(learner, Heartbeat(batches))
    roster.hear(learner, Progress(learner, new, new))


def test_the_time_of_two_machines_one_of_which_is_killed_and_restarted() -> None:
    """By hand: 40 s of learner 0, 15 s of the first process of learner 1 and 20 s of its second one."""
    clock = Clock()
    roster = Roster(2, clock)
    assert goodput_of(roster) is None
    clock.now = 104.0
    for learner in range(2):
        roster.hear(learner, Reached("entered", 0))
    clock.now = 115.0
    worked(roster, 1, batches=10, computing=8.0, peers=2.0, data=1.0)
    roster.lose(1, "was killed")
    roster.announce(Membership(1, (0,)))
    clock.now = 116.0
    roster.hear(0, Reached("entered", 1))
    clock.now = 120.0
    roster.start(1, is_joiner=True)
    clock.now = 126.0
    roster.announce(Membership(2, (0, 1)))
    clock.now = 127.0
    for learner in range(2):
        roster.hear(learner, Reached("entered", 2))
    clock.now = 140.0
    worked(roster, 0, batches=30, computing=30.0, peers=1.0, data=1.0)
    worked(roster, 1, batches=8, computing=9.0, peers=1.0, data=1.0)
    found = goodput_of(roster, {0: 30, 1: 16})  # of 18 mini-batches of learner 1, 2 were computed again
    assert found is not None
    assert found.machines == 40.0 + 15.0 + 20.0
    assert found.useful == pytest.approx(30.0 + 17.0 * 16 / 18)
    assert found.lost_work == pytest.approx(17.0 * 2 / 18)
    assert (found.waiting_for_peers, found.waiting_for_data) == (4.0, 3.0)
    assert found.entering == (4.0 + 1.0 + 1.0) + (4.0 + 7.0)
    assert found.ratio + sum(found.losses.values()) == pytest.approx(1.0)
    assert str(found).startswith("goodput 60.1 % of 75 s of machine time; lost work 2.5 %, waiting for peers 5.3 %")


def test_what_only_a_killed_learner_had_is_lost_and_stopped_time_is_no_machine_time() -> None:
    clock = Clock()
    roster = Roster(2, clock)
    clock.now = 120.0
    for learner in range(2):
        new = Stretch(learner, batches=10, frames=10, computing=10.0, stopped=5.0)
        roster.hear(learner, Progress(learner, new, new))
        roster.hear(learner, Heartbeat(10, num_unshared=2.5))
    roster.lose(1, "was killed")
    roster.announce(Membership(1, (0,)))
    found = goodput_of(roster, {0: 10, 1: 10})
    assert found is not None
    assert (found.machines, found.useful, found.lost_work) == (30.0, 17.5, 2.5)
    assert (during := goodput_of(roster)) is not None
    assert during == found
    roster.hear(0, Ended(10))  # all learners have the same model then
    assert goodput_of(roster) == found


def test_a_learner_that_has_ended_has_no_machine() -> None:
    clock = Clock()
    roster = Roster(1, clock)
    clock.now = 110.0
    worked(roster, 0, batches=1, computing=5.0, peers=0.0, data=0.0)
    roster.hear(0, Ended(1))
    clock.now = 200.0
    found = goodput_of(roster)
    assert found is not None
    assert (found.machines, found.ratio) == (10.0, 0.5)


def test_a_learner_that_is_given_up_counts_as_stopped_since_its_last_heartbeat() -> None:
    """To within one heartbeat: nobody knows when it was stopped."""
    clock = Clock()
    roster = Roster(2, clock)
    clock.now = 110.0
    for learner in range(2):
        worked(roster, learner, batches=8, computing=8.0, peers=0.0, data=0.0)
    clock.now = 113.0
    roster.kill_if_silent(roster.learners[1], 3.0)
    assert not roster.learners[1].process.killed_because
    clock.now = 113.5
    roster.kill_if_silent(roster.learners[1], 3.0)
    assert roster.learners[1].process.killed_because == "sent no heartbeat for 3.5 s"
    roster.lose(1, "sent no heartbeat")
    found = goodput_of(roster)
    assert found is not None
    assert found.machines == 13.5 + 13.5 - (3.5 - 0.5)
