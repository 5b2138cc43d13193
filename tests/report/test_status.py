"""The state of a run in a file, and on the screen."""

import io
import os
import time
from dataclasses import replace
from typing import Literal

import pytest
from rich.console import Console

from starling.engines.processes.stalls import Stall
from starling.errors import ProtocolError
from starling.experiment.following import describe, is_alive, learners_of
from starling.launch.messages import Activity, Ended, Heartbeat, Reached, Status, decode_file, encode_file
from starling.launch.roster import Roster
from tests.report.steps import progress_of, step


class Told:
    """A roster whose clock is moved by hand."""

    def __init__(self, world: int) -> None:
        self.now = 50.0
        self.roster = Roster(world, clock=lambda: self.now)

    def states(self) -> list[str]:
        return [each.state for each in learners_of(self.roster)]


def entered(roster: Roster, learner_id: int, generation: int, num_steps: int) -> None:
    roster.hear(learner_id, Reached("entered", generation))
    roster.hear(learner_id, Heartbeat(num_steps))


def test_the_state_of_a_learner_is_what_it_reported_last_or_that_it_is_silent() -> None:
    """Starting, computing, waiting, silent, lost, ended."""
    told = Told(6)
    for name in range(1, 6):
        entered(told.roster, name, 0, 1)
    told.now += 4.0
    told.roster.hear(1, Activity("computing batch 2 of epoch 1"))
    told.roster.hear(2, Heartbeat(1, Stall("a mean", (3,), True, False, 3.0, 0.1, 1)))
    told.roster.lose(4, "learner 4 was killed")
    told.roster.hear(5, Ended(1))
    assert told.states() == [
        "starting",
        "computing batch 2 of epoch 1",
        "waiting 3.0 s in a mean",
        "silent for 4.0 s",
        "lost",
        "ended",
    ]


def test_averaging_in_the_background_is_not_reported_as_a_wait() -> None:
    """It computes."""
    told = Told(1)
    told.roster.hear(0, Heartbeat(5, Stall("a round", (), False, True, 3.0, 0.1, 1)))
    assert told.states() == ["computing"]


def test_a_learner_that_begins_when_others_train_already_has_joined() -> None:
    """Also one that was lost and is started again: its record continues with the work of its first process."""
    told = Told(2)
    for name in (0, 1):
        told.roster.hear(name, Reached("entered", 0))
    told.roster.hear(1, Heartbeat(30))
    told.roster.lose(1, "killed")
    told.roster.hear(0, Reached("entered", 1))
    told.roster.start(1, is_joiner=True)
    told.roster.hear(1, Heartbeat(0))
    assert told.states() == ["computing", "starting"]
    told.roster.hear(1, Reached("entered", 2))
    told.roster.hear(1, Heartbeat(12))
    told.roster.hear(2, Reached("entered", 2))
    told.roster.hear(0, Reached("entered", 2))
    assert {name: each.num_joins for name, each in told.roster.learners.items()} == {0: 0, 1: 1, 2: 1}
    assert told.roster.learners[1].num_steps == 42
    assert [(each.learner, each.reason) for each in told.roster.lost] == [(1, "killed")]
    assert told.roster.generation == 2


def status(told: Told, stage: Literal["training", "scoring", "ended"], code: int | None, message: str) -> Status:
    return Status(
        name="demo",
        strategy="adpsgd",
        stage=stage,
        began=1000.0,
        written=1100.0,
        pid=4242,
        generation=1,
        learners=tuple(learners_of(told.roster)),
        losses=("learner 1 was killed by SIGKILL (last reported: computing batch 3 of epoch 1)",),
        saved="exp/demo/checkpoints/step-00000012",
        saved_age=30.0,
        exit_code=code,
        message=message,
    )


def shown(it: Status, now: float, is_alive: bool) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(describe(it, now, is_alive), highlight=False)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_status_is_read_as_it_was_written_and_shown_with_its_age() -> None:
    """Ages count on from when it was written."""
    told = Told(2)
    told.roster.hear(0, progress_of(step(6)))
    told.roster.hear(0, Heartbeat(7))
    told.now += 1.0
    it = decode_file(Status, encode_file(status(told, "training", None, "")).encode())
    assert it == status(told, "training", None, "")
    text = shown(it, 1100.5, is_alive=True)
    assert "demo, adpsgd: training, run began 1 min 40 s ago, membership 1" in text
    assert "1.5 s ago" in text
    assert "none yet" in text
    assert "lost: learner 1 was killed by SIGKILL (last reported: computing batch 3 of epoch 1)" in text
    assert "newest checkpoint: exp/demo/checkpoints/step-00000012, saved 30.5 s ago" in text


def test_a_run_that_ended_says_how_and_one_without_launcher_that_it_is_gone() -> None:
    """With the exit code; and with when it was last heard of."""
    ended = shown(status(Told(2), "ended", 3, "learner 1 was killed"), 1160.0, is_alive=False)
    assert "ended 1 min 00 s ago, whole run 1 min 40 s, exit code 3: learner 1 was killed" in ended
    gone = shown(status(Told(2), "training", None, ""), 1160.0, is_alive=False)
    assert "its launcher (process 4242) is gone or stalled; it wrote this 1 min 00 s ago" in gone


def test_on_another_machine_a_recent_status_shows_that_the_launcher_runs() -> None:
    """Only on its own machine can its process be looked for; a status of long ago shows nothing anywhere."""
    gone = replace(status(Told(1), "training", None, ""), written=time.time(), pid=2**22 + 1)  # above all process ids
    assert not is_alive(gone)
    assert not is_alive(replace(gone, machine=os.uname().nodename))
    assert is_alive(replace(gone, machine="node-7"))
    assert not is_alive(replace(gone, machine="node-7", written=time.time() - 60.0))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1}', '{"format": 2, "learners": [{}]}', "nonsense"])
def test_what_is_no_status_is_refused(text: str) -> None:
    """Whatever is wrong with it."""
    with pytest.raises(ProtocolError, match=r"not the status of a run of this version: "):
        decode_file(Status, text.encode())


def test_a_status_with_long_names_is_not_cut_off_in_80_columns() -> None:
    """Nodes and logs are folded."""
    found = status(Told(2), "training", None, "")
    node = "ip-10-0-123-234.eu-central-1.compute.internal"
    learners = tuple(replace(each, node=node, log=f"log/learner-{each.learner_id}.log") for each in found.learners)
    console = Console(file=io.StringIO(), width=80)
    console.print(describe(replace(found, learners=learners), 1110.0, True))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert not [line for line in lines if "…" in line or len(line) > 80]
