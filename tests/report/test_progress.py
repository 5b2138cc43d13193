"""A live table on a terminal, and lines for all learners together."""

import errno
import io
import json
import math
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from starling.errors import PeerLost
from starling.events import Events, Stream, read_events, read_stream
from starling.launch.messages import LearnerMessage, Progress, Saved
from starling.launch.roster import Roster
from starling.reporting.epochs import Score
from starling.reporting.progress import Bars, Display
from starling.training.membership import Membership
from tests.report.steps import ended, progress_of, step


def snapshot(rank: int, number: int) -> Progress:
    """What a learner tells after a step."""
    return progress_of(step(number, rank=rank))


NOWHERE = Events(Path(os.devnull), lambda path, error: None)


class Screen:
    """A display whose clock stands until it is moved, and the roster that hears everything first."""

    def __init__(self, world: int, terminal: bool = False, events: Events = NOWHERE) -> None:
        self.now = 0.0
        self.text = io.StringIO()
        console = Console(file=self.text, force_terminal=terminal, width=120)
        self.roster = Roster(world)
        self.display = Display("demo", self.roster, console, events, clock=lambda: self.now)

    def hear(self, message: LearnerMessage) -> None:
        """What the launcher does with a message."""
        if isinstance(message, Progress):
            self.roster.hear(message.learner_id, message)
        self.display.hear(message)

    def train_with(self, *members: int) -> None:
        """Announce a membership."""
        self.roster.announce(Membership(1, members))
        self.display.tell_epochs()

    @property
    def lines(self) -> list[str]:
        return self.text.getvalue().splitlines()


def shown(world: int, terminal: bool, act: Callable[[Screen], None]) -> str:
    """What a console shows of what `act` tells a display."""
    screen = Screen(world, terminal)
    with screen.display:
        act(screen)
    return screen.text.getvalue()


def end(learner_id: int, epoch: int = 0, computing: float = 9.5, **more: Any) -> Progress:
    """The end of an epoch of 10 s, in which a learner waited for data when it did not compute."""
    return ended(learner_id, epoch, 5, 10.0, computing, 10.0 - computing, 0.0, **more)


def test_an_epoch_is_one_line_for_all_learners() -> None:
    """Once the last of them has reported it; loss by frames, and the one that waits most is named."""
    screen = Screen(3)
    with screen.display:
        screen.hear(end(0, losses=100.0, frames=100, learning_rate=0.02))
        screen.hear(end(2, losses=1200.0, frames=300, learning_rate=0.02))
        assert screen.lines == []
        screen.hear(end(1, computing=7.1, rounds=15, staleness=Counter({1: 1, 2: 3, 3: 1})))
    first, advised = screen.lines
    assert first == (
        "epoch 1 ended after 10.0 s: loss 3.2500, lr 0.02, computing 87 % (learner 1: 71 %), waiting 13 % for data, "
        "0 % for peers, 1.00 rounds per gradient, staleness 2.0 (at most 3)"
    )
    assert (
        advised == "in epoch 1, learner 1 waited for data 29 % of its time: raise batches.num_workers if cores are idle"
    )


def test_what_servers_count_is_in_the_line_of_an_epoch_and_their_time_is_not() -> None:
    """They compute nothing, and wait for nothing."""
    screen = Screen(2)
    with screen.display:
        screen.hear(end(0))
        screen.hear(ended(1, 0, 0, 10.0, 0.0, 0.0, 0.0, staleness=Counter({2: 5})))
    (line,) = screen.lines
    assert line.endswith("computing 95 %, waiting 5 % for data, 0 % for peers, staleness 2.0 (at most 2)")


def test_neither_a_lost_learner_nor_a_very_slow_one_is_waited_for() -> None:
    """A joiner that has reported nothing yet is waited for, until the others are two epochs ahead."""
    screen = Screen(2)
    with screen.display:
        screen.hear(end(0))
        screen.train_with(0)
        assert [line.partition(":")[0] for line in screen.lines] == ["epoch 1 ended after 10.0 s"]
        screen.train_with(0, 5)
        screen.hear(end(0, 1))
        screen.hear(end(0, 2))
        assert len(screen.lines) == 1
        screen.hear(end(0, 3))
        screen.hear(end(5, 1))
        assert [line.partition(":")[0] for line in screen.lines[1:]] == [
            "epoch 2 ended after 10.0 s (without learner 5)"
        ]
    assert [line.partition(" after")[0] for line in screen.lines[2:]] == ["epoch 3 ended", "epoch 4 ended"]


def test_advice_is_given_once_in_a_run() -> None:
    """Not at each of its epochs, nor by each of its learners."""
    screen = Screen(2)
    with screen.display:
        for epoch in range(5):
            for learner in range(2):
                screen.hear(end(learner, epoch, computing=5.0))
    assert len(screen.lines) == 6
    assert sum("num_workers" in line for line in screen.lines) == 1


def test_many_short_epochs_are_not_all_printed() -> None:
    """After the first ten, the newest is printed every other second, and each with a score."""
    screen = Screen(1)
    with screen.display as display:
        for epoch in range(39):
            screen.hear(end(0, epoch))
            screen.now += 0.5
            if epoch == 22:
                display.scored(Score("dev", 12.5, 4.0, 1, 10, "%WER 12.50 [ 1 / 8 ]"))
    told = [int(line.split()[1]) for line in screen.lines]
    assert told == [*range(1, 11), 14, 18, 22, 24, 28, 32, 36, 39]


def test_saved_checkpoints_are_told_no_more_often_than_epochs() -> None:
    """The first one at once, then one between two lines about all learners, and that of the end in any case."""
    screen = Screen(1)
    with screen.display:
        for number in range(4):
            screen.hear(Saved(f"step-{number}", "barrier"))
        screen.hear(end(0))
        screen.hear(Saved("step-4", "epoch", 0.0123456))
        screen.hear(Saved("step-5", "barrier"))
        screen.hear(Saved("step-6", "end"))
    lines = [line for line in screen.lines if line.startswith("saved")]
    assert lines == ["saved step-0", "saved step-4, consensus distance 0.0123", "saved step-6"]


def test_a_score_is_part_of_the_next_epoch_line_or_a_line_of_its_own() -> None:
    """Where no epoch ends soon, or the run does."""
    score = Score("dev", 12.5, 4.0, 1, 10, "%WER 12.50 [ 1 / 8 ]")
    screen = Screen(1)
    with screen.display as display:
        screen.hear(end(0))
        display.scored(score)
        display.tick()
        assert len(screen.lines) == 1
        screen.hear(end(0, 1))
        assert screen.lines[1].endswith(", dev WER 12.50 %, CER 4.00 % after epoch 1")
        display.scored(score)
        screen.now += 6.0
        display.tick()
        assert screen.lines[2] == "after epoch 1, dev: %WER 12.50 [ 1 / 8 ]"
        display.scored(Score("dev", 11.0, 3.5, None, 15, "%WER 11.00"))
    assert screen.lines[3:] == ["after 15 steps, dev: %WER 11.00"]


def test_why_a_model_does_not_work_is_printed_once_and_each_change_is_an_event(tmp_path: Path) -> None:
    """Until it works; if it stops working, it is printed again."""
    events = Events(tmp_path / "events.jsonl", lambda path, error: None)
    screen = Screen(1, events=events)
    verdicts = ["", "it is empty", "it is empty", "it is wrong", "", "it is lost"]
    with screen.display as display:
        for number, verdict in enumerate(verdicts):
            display.scored(Score("dev", 100.0, 90.0, number, number, "%WER 100.00", verdict))
    events.close()
    assert screen.lines[:-1] == ["it is empty", "it is lost"]
    told = [each["text"] for each in read_events(tmp_path / "events.jsonl") if each["kind"] == "verdict"]
    assert told == ["it is empty", "it is wrong", "", "it is lost"]
    assert events.verdict == "it is lost"


def test_without_a_terminal_there_is_a_line_a_minute_in_a_long_epoch() -> None:
    """For all learners together, whatever each of them reports."""
    screen = Screen(2)
    with screen.display:
        for number in range(1, 5):
            screen.now += 25.0
            screen.hear(snapshot(0, number))
            screen.hear(snapshot(1, number))
    assert screen.lines == ["epoch 1, batch 4/10: loss 1.0000, lr 0.5, 15 % done, 1 min 42 s left"]


def test_what_the_screen_shows_is_in_the_events_too(tmp_path: Path) -> None:
    """And more: each checkpoint, and each learner's part of an epoch."""
    warned: list[Path] = []
    events = Events(tmp_path / "log" / "events.jsonl", lambda path, error: warned.append(path), clock=lambda: 17.0)
    screen = Screen(2, events=events)
    with screen.display as display:
        display.say("learners 0, 1 continue after 12 mini-batches")
        screen.hear(end(0))
        screen.hear(end(1))
        screen.hear(Saved("step-1", "barrier"))
        screen.hear(Saved("step-2", "barrier"))
        display.lost(1, "learner 1 was killed by SIGKILL (last reported: computing)")
        display.joined(2, 2)
        display.left_out(3, "learner 3: no memory")
        display.scored(Score("dev", 12.5, 4.0, 1, 10, "%WER 12.50"))
    events.close()
    read = [json.loads(line) for line in (tmp_path / "log" / "events.jsonl").read_text().splitlines()]
    assert {each["time"] for each in read} == {17.0}
    assert [each["kind"] for each in read] == [
        "message", "epoch", "checkpoint", "checkpoint", "loss", "join", "left-out", "validation",
    ]  # fmt: skip
    assert (read[1]["epoch"], read[1]["loss"], sorted(read[1]["learners"])) == (1, None, ["0", "1"])
    assert read[1]["learners"]["0"]["computing"] == 9.5
    assert (read[4]["learner"], read[5]["num_learners"], read[7]["wer"]) == (1, 2, 12.5)
    assert not warned


def test_events_that_cannot_be_written_cost_one_warning(tmp_path: Path) -> None:
    """The run does not notice."""
    (tmp_path / "log").write_text("in the way")
    warned: list[Path] = []
    events = Events(tmp_path / "log" / "events.jsonl", lambda path, error: warned.append(path))
    events.write("start")
    events.write("end")
    events.close()
    assert warned == [tmp_path / "log" / "events.jsonl"]


def test_a_changed_character_of_an_event_is_seen(tmp_path: Path) -> None:
    """Wherever it is; one in the key of the checksum leaves the event as it was. A line without its end is cut off."""
    path = tmp_path / "events.jsonl"
    stream = Stream(path)
    stream.append("batch", ids=["ä", "b\n"], loss=math.nan)
    stream.close()
    line = path.read_text(encoding="utf-8")
    assert line.startswith('{"kind":"batch","ids":["ä","b\\n"],"loss":null, "crc": "')
    ((_, whole),) = read_stream(path)
    assert whole is not None
    assert whole == {"kind": "batch", "ids": ["ä", "b\n"], "loss": None}
    for place, character in enumerate(line.removesuffix("\n")):
        path.write_text(line[:place] + chr(ord(character) ^ 1) + line[place + 1 :], encoding="utf-8")
        ((_, event),) = read_stream(path)
        assert event is None or whole.items() <= event.items(), place
    path.write_text(line[:-2], encoding="utf-8")
    assert list(read_stream(path)) == []


def test_an_event_after_a_full_disk_is_a_line_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written only in part spoils no other line."""
    warned: list[Path] = []
    path = tmp_path / "events.jsonl"
    events = Events(path, lambda path, error: warned.append(path))
    write, room = os.write, [5]

    def write_some(descriptor: int, content: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = write(descriptor, content[: room[0]])
        room[0] -= written
        return written

    monkeypatch.setattr(os, "write", write_some)
    events.write("start")
    room[0] = 1000
    events.write("end", exit_code=0)
    events.close()
    torn, whole = path.read_text().splitlines()
    assert len(torn) == 5
    assert json.loads(whole)["exit_code"] == 0
    assert len(warned) == 1


def test_on_a_terminal_there_is_a_row_for_each_learner() -> None:
    """With the title."""
    text = shown(3, True, lambda screen: screen.hear(snapshot(1, 5)))
    assert "demo: " in text
    assert "6/10" in text
    assert text.count("starting") >= 2


def test_the_table_of_a_finished_run_says_so() -> None:
    """It stays on the screen; a share below 100 % would look like a run that was cut short."""
    text = shown(3, True, lambda screen: screen.hear(snapshot(1, 5)))
    assert "demo: ended, training 30.0 s" in text


def test_the_table_of_a_run_that_was_cut_short_says_how_far_it_came() -> None:
    """The share done and the time left, as they are shown all the time."""
    screen = Screen(3, terminal=True)
    with pytest.raises(PeerLost), screen.display:
        screen.hear(snapshot(1, 5))
        raise PeerLost("learner 2 was killed")
    text = screen.text.getvalue()
    assert "demo: 25 %, 1 min 30 s left" in text
    assert "ended" not in text


def test_many_learners_do_not_fill_the_screen() -> None:
    """An epoch of 64 is one line; the table shows the first sixteen, and how many there are."""

    def act(screen: Screen) -> None:
        for rank in range(64):
            screen.hear(snapshot(rank, 3))
            screen.hear(end(rank))

    lines = shown(64, False, act).splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("epoch 1 ended after 10.0 s: computing 95 %, ")
    table = shown(64, True, act)
    assert "64 learners" in table
    assert " 15 │" in table and " 16 │" not in table


def test_bars_are_silent_without_a_terminal() -> None:
    """A log is not filled with bars."""
    text = io.StringIO()
    with Bars(Console(file=text, force_terminal=False)) as bars:
        bars("train", 1, 2)
    assert text.getvalue().strip() == ""


def test_bars_count_on_a_terminal() -> None:
    """Also where the total is not known."""
    text = io.StringIO()
    with Bars(Console(file=text, force_terminal=True, width=100)) as bars:
        bars("train", 1, 2)
        bars("dev", 7, 0)
    assert "1/2" in text.getvalue()
    assert "7/?" in text.getvalue()
