"""What a learner reports reaches the launcher as it was, but not more often than people can read."""

import io
import json

import pytest
from rich.console import Console

from starling.engines.job import EpochReport, Spent
from starling.errors import ProtocolError
from starling.experiment.observers import Log, Message, Messages, Metered, show
from starling.report.meter import EpochEnd, Snapshot
from starling.report.progress import Display
from starling.workload import Ticket
from tests.checkpoint.test_checkpoints import state
from tests.report.steps import step


class Kept:
    """A listener that keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[Snapshot | EpochEnd] = []

    def progress(self, snapshot: Snapshot) -> None:
        self.heard.append(snapshot)

    def epoch(self, end: EpochEnd) -> None:
        self.heard.append(end)


def test_no_step_is_lost_between_snapshots() -> None:
    """At most one every two seconds; the frames of all steps are counted, the last ones at the epoch's end."""
    now = 0.0
    kept = Kept()
    observer = Metered(kept, world=2, every=2.0, clock=lambda: now)
    for number in range(10):
        now = 0.5 * number
        observer.on_step(step(number, frames=100))
    observer.on_epoch(EpochReport(0, 0, 10, 5.0, Spent(4.0, 0.5, 0.5)), state(0, 2, Ticket(1, 0, 10)))
    *snapshots, end = kept.heard
    assert isinstance(end, EpochEnd) and end.num_steps == 10
    frames = [each.num_frames for each in snapshots if isinstance(each, Snapshot)]
    assert frames == [100, 400, 400, 100]


def test_messages_arrive_as_json_and_are_shown() -> None:
    """What a learner sends can be sent as JSON, and the other end shows the same lines as a log of its own."""
    sent: list[str] = []
    here, there = io.StringIO(), io.StringIO()
    for listener in (Log(here), Messages(lambda message: sent.append(json.dumps(message)))):
        observer = Metered(listener, world=2, every=0.0)
        observer.on_step(step(3))
        observer.on_epoch(EpochReport(0, 0, 4, 5.0, Spent(4.0, 0.5, 0.5)), state(0, 2, Ticket(1, 0, 10)))
    console = Console(file=there, force_terminal=False, width=200)
    with Display("demo", 2, console) as display:
        for line in sent:
            show(json.loads(line), display)
        show({"saved": "exp/demo/checkpoints/step-00000010"}, display)
    lines = there.getvalue().splitlines()
    assert lines[:-1] == here.getvalue().splitlines()
    assert lines[-1] == "saved exp/demo/checkpoints/step-00000010"


def test_what_a_learner_does_is_told_to_the_launcher() -> None:
    """So that it can say when a learner was lost."""
    sent: list[Message] = []
    observer = Metered(Messages(sent.append), world=2, every=0.0)
    observer.on_step(step(13, epoch=1))
    assert [message["doing"] for message in sent] == ["computing batch 4 of epoch 2"]


def test_a_message_of_another_version_is_an_error() -> None:
    """Rather than a guess."""
    with (
        Display("demo", 2, Console(file=io.StringIO())) as display,
        pytest.raises(ProtocolError, match="does not understand"),
    ):
        show({"progress": {"speed": 3}}, display)
