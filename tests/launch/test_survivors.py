"""When a learner is killed, or is silent for too long, the others continue without it to the end of the budget."""

import math
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from starling.launch.joiners import Changes
from starling.launch.launcher import launch
from starling.launch.messages import LearnerMessage, Reached, values_of
from starling.launch.roster import Loss
from tests.warm_start import own_learner, own_learners

NUM_MINI_BATCHES = 3000


def command(mode: str) -> list[str]:
    return [sys.executable, "-m", "tests.launch.learner_process", mode]


class Harm:
    """Does something to a learner once all have met and one of them has come far enough; notes what they say."""

    def __init__(self, victim: int, world: int, number: int = signal.SIGKILL) -> None:
        self.victim, self.number = victim, number
        self.pids: dict[int, int] = {}
        self.met: set[int] = set()
        self.is_done = False
        self.said: dict[int, dict[str, Any]] = {}
        self.generations: dict[int, int] = {}
        self.world = world

    def __call__(self, rank: int, message: LearnerMessage) -> None:
        told: dict[str, Any] = dict(values_of(message))
        if isinstance(message, Reached) and message.stage == "entered":
            self.generations[rank] = message.generation
        if "num_done" in told or "left" in told:
            self.said[rank] = told
        if not self.is_done and len(self.generations) == self.world and told.get("step", 0) >= 100:
            self.is_done = True
            os.kill(own_learner(self.victim).pid, self.number)


def survive(
    mode: str,
    world: int,
    victim: int,
    folder: Path,
    number: int = signal.SIGKILL,
    seconds: float = math.inf,
) -> tuple[Harm, list[Loss]]:
    """A run that survives the loss of a learner; what was said, and which learners were lost."""
    harm = Harm(victim, world, number)
    told: list[Loss] = []
    changes = Changes("continue", seconds, on_lost=told.append)
    losses = launch(command(mode), world, folder, harm, changes)
    assert harm.is_done
    assert losses == told
    assert not list(own_learners())
    return harm, losses


@pytest.mark.wide
@pytest.mark.parametrize(
    ("strategy", "world", "victim"),
    [
        ("adpsgd", 4, 2),
        ("allreduce", 3, 0),
        *(
            pytest.param(*case, marks=pytest.mark.soak)
            for case in (
                ("parameter-server", 3, 2),
                ("adpsgd", 2, 0),
                ("delay-by-one", 3, 1),
                ("dpsgd", 4, 3),
                ("delayed", 3, 1),
                ("hogwild", 3, 0),
            )
        ),
    ],
)
def test_the_others_finish_the_budget_of_all(strategy: str, world: int, victim: int, tmp_path: Path) -> None:
    """In step or not, without a restart; `make soak` has the other strategies."""
    harm, losses = survive(f"{strategy}/ends", world, victim, tmp_path)
    others = set(range(world)) - {victim}
    assert [loss.learner for loss in losses] == [victim]
    assert losses[0].reason.startswith(f"learner {victim} was killed by SIGKILL (last reported: ")
    assert harm.said.keys() == others
    for said in harm.said.values():
        assert NUM_MINI_BATCHES <= said["num_done"] < NUM_MINI_BATCHES + world
    assert harm.generations == {victim: 0} | dict.fromkeys(others, 1)


@pytest.mark.wide
def test_a_second_death_while_the_survivors_meet_anew_is_borne_too(tmp_path: Path) -> None:
    """When all are connected, and are being linked for the next membership: none waits for the dead one until its
    time-out, which is longer than that of this test."""
    harm, losses = survive("delay-by-one/between", 4, 3, tmp_path)
    assert sorted(loss.learner for loss in losses) == [2, 3]
    assert harm.said.keys() == {0, 1}
    assert {harm.generations[0], harm.generations[1]} == {2}


@pytest.mark.soak
def test_a_super_learner_that_has_lost_a_learner_leaves_whole(tmp_path: Path) -> None:
    """The other super-learner continues; the learner that leaves ends well."""
    harm, losses = survive("hadpsgd/ends", 4, 1, tmp_path)
    assert [loss.learner for loss in losses] == [1]
    assert harm.said[0] == {"left": True}
    assert harm.said[2]["num_done"] >= NUM_MINI_BATCHES


@pytest.mark.wide
@pytest.mark.parametrize(
    "strategy",
    [
        "adpsgd+sharded",
        "adpsgd+tensor",
        *(pytest.param(each, marks=pytest.mark.soak) for each in ("allreduce+sharded", "allreduce+tensor")),
    ],
)
def test_an_island_that_has_lost_a_rank_leaves_whole(strategy: str, tmp_path: Path) -> None:
    """The other island continues to the end of the budget of all; the rank that leaves ends well."""
    harm, losses = survive(f"{strategy}/ends", 4, 1, tmp_path)
    assert [loss.learner for loss in losses] == [1]
    assert harm.said[0] == {"left": True}
    budget = 300 if "tensor" in strategy else 600
    assert budget <= harm.said[2]["num_done"] < budget + 4
    assert harm.said[3] == harm.said[2]


@pytest.mark.wide
def test_a_worker_takes_the_place_of_a_lost_server(tmp_path: Path) -> None:
    """The budget of all is done."""
    harm, losses = survive("parameter-server/ends", 3, 0, tmp_path)
    assert [loss.learner for loss in losses] == [0]
    assert harm.said[1]["num_done"] == harm.said[2]["num_done"] >= NUM_MINI_BATCHES


@pytest.mark.wide
def test_a_learner_without_heartbeats_is_ended_and_the_others_continue(tmp_path: Path) -> None:
    """As if it had been killed; so it can do no harm when it wakes up."""
    harm, losses = survive("delay-by-one/ends", 3, 1, tmp_path, number=signal.SIGSTOP, seconds=4.0)
    assert [loss.learner for loss in losses] == [1]
    assert "sent no heartbeat for" in losses[0].reason
    assert harm.said.keys() == {0, 2}


@pytest.mark.soak
def test_a_learner_that_stands_still_for_a_moment_is_waited_for(tmp_path: Path) -> None:
    """Below the time-out no learner is lost, and no work."""
    harm = Harm(1, 2, signal.SIGSTOP)

    def wake(rank: int, message: LearnerMessage) -> None:
        harm(rank, message)
        if harm.is_done and harm.number == signal.SIGSTOP:
            harm.number = signal.SIGCONT
            own_learner(1).send_signal(signal.SIGCONT)

    assert launch(command("allreduce/ends"), 2, tmp_path, wake, Changes("continue", 60.0)) == []
    assert {rank: said["num_done"] for rank, said in harm.said.items()} == dict.fromkeys((0, 1), NUM_MINI_BATCHES)
