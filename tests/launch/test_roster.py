"""What a learner is, from its messages, from their absence, and from what the launcher decides."""

import pytest

from starling.errors import DataError, StarlingError
from starling.launch.messages import (
    Activity,
    Ended,
    Failed,
    Heartbeat,
    LearnerMessage,
    Reached,
    Saved,
)
from starling.launch.roster import LearnerState, Roster
from starling.training.membership import Membership
from tests.report.steps import ended


class Clocked:
    """A roster whose clock is moved by hand."""

    def __init__(self, world: int) -> None:
        self.now = 50.0
        self.roster = Roster(world, clock=lambda: self.now)

    def hear(self, learner_id: int, *messages: LearnerMessage) -> LearnerState:
        for message in messages:
            self.roster.hear(learner_id, message)
        return self.roster.learners[learner_id].state


def test_a_learner_starts_trains_and_ends() -> None:
    """A heartbeat before its first membership says only that it runs."""
    run = Clocked(1)
    assert run.hear(0, Heartbeat()) is LearnerState.STARTING
    assert run.hear(0, Reached("arrived", 0)) is LearnerState.STARTING
    assert run.hear(0, Reached("entered", 0)) is LearnerState.TRAINING
    assert run.hear(0, Activity("step 3")) is LearnerState.TRAINING
    assert run.hear(0, Ended(4)) is LearnerState.ENDED
    record = run.roster.learners[0]
    assert (record.num_steps, record.attempt.doing, record.attempt.has_computed) == (4, "ending", True)


def test_where_no_membership_is_watched_the_first_mini_batch_says_that_a_learner_trains() -> None:
    """Such learners report no membership."""
    run = Clocked(1)
    assert run.hear(0, Heartbeat(0)) is LearnerState.STARTING
    assert run.hear(0, Heartbeat(1)) is LearnerState.TRAINING


def test_a_joiner_is_ready_and_gets_a_rank_when_it_is_a_member() -> None:
    """Its id is for life, its rank is its place in the membership."""
    run = Clocked(2)
    run.roster.start(7, is_joiner=True)
    assert run.hear(7, Reached("ready", -1)) is LearnerState.READY
    assert run.roster.learners[7].rank is None
    run.roster.announce(Membership(1, (1, 7, 0)))
    assert {each.learner_id: each.rank for each in run.roster.learners.values()} == {0: 2, 1: 0, 7: 1}
    assert run.hear(7, Reached("entered", 1)) is LearnerState.TRAINING
    assert run.roster.learners[7].num_joins == 1
    assert run.roster.generation == 1


def test_a_member_that_a_membership_does_not_name_leaves_and_says_nothing_that_changes_it() -> None:
    """Its sync group lost another; what it still sends does not bring it back."""
    run = Clocked(4)
    for learner_id in range(4):
        run.hear(learner_id, Reached("entered", 0))
    run.roster.lose(1, "learner 1 was killed")
    run.roster.announce(Membership(1, (2, 3)))
    assert [each.state for each in run.roster.learners.values()][:2] == [LearnerState.LEFT, LearnerState.LOST]
    assert run.hear(0, Reached("entered", 0), Ended(3)) is LearnerState.LEFT
    assert run.hear(1, Reached("entered", 0)) is LearnerState.LOST
    assert [each.learner_id for each in run.roster.present()] == [2, 3]
    assert [each.reason for each in run.roster.lost] == ["learner 1 was killed"]


def test_silence_counts_only_where_heartbeats_are_due() -> None:
    """Not while libraries load, nor after the end; six missed ones are silence, and the next one ends it."""
    run = Clocked(3)
    run.hear(1, Reached("entered", 0))
    run.hear(2, Reached("entered", 0), Ended(0))
    run.now += 3.5
    silent = [run.roster.silence(record) for record in run.roster.learners.values()]
    assert silent == [None, pytest.approx(3.5), None]
    run.hear(1, Heartbeat(1))
    assert run.roster.silence(run.roster.learners[1]) is None


def test_a_learner_that_is_started_again_keeps_its_record() -> None:
    """What it has computed and how long it took; not how its first process ended."""
    run = Clocked(2)
    run.hear(1, Reached("entered", 0), Heartbeat(30), ended(1, 0, 30, 10.0, 9.0, 0.5, 0.5))
    run.hear(1, Failed("DataError", "no audio"))
    record = run.roster.learners[1]
    assert isinstance(record.process.error, DataError)
    run.roster.lose(1, "killed")
    run.roster.announce(Membership(1, (0,)))
    assert run.roster.start(1, is_joiner=True) is record
    assert (record.state, record.rank, record.attempt.generation, record.process.error) == (
        LearnerState.STARTING,
        None,
        -1,
        None,
    )
    run.hear(1, Heartbeat(12))
    assert (record.num_steps, record.epochs[0].so_far.seconds) == (42, 10.0)


def test_an_error_that_is_not_starlings_keeps_its_name() -> None:
    """And whatever a learner sends, no other class is made of it."""
    run = Clocked(1)
    run.hear(0, Failed("ValueError", "too long"))
    assert str(run.roster.learners[0].process.error) == "ValueError: too long"
    run.hear(0, Failed("Stopped", "by whom"))
    assert type(run.roster.learners[0].process.error) is StarlingError


def test_the_newest_checkpoint_is_known() -> None:
    """With its age."""
    run = Clocked(1)
    run.hear(0, Saved("step-1", "barrier"), Saved("step-2", "barrier"))
    assert (run.roster.saved, run.roster.saved_at, run.roster.num_saved) == ("step-2", 50.0, 2)
