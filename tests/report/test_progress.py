"""A live table on a terminal, lines elsewhere."""

import io
from collections.abc import Callable

import pytest
from rich.console import Console

from starling.errors import PeerLost
from starling.report.meter import EpochEnd, Meter, Snapshot
from starling.report.progress import Bars, Display
from tests.report.steps import step


def snapshot(rank: int, number: int, world: int) -> Snapshot:
    """What a learner tells after a step."""
    meter = Meter(world)
    meter.add(step(number, rank=rank))
    result = meter.take()
    assert result is not None
    return result


def shown(world: int, terminal: bool, act: Callable[[Display], None], times: list[float]) -> str:
    """What a console shows of what `act` tells a display whose clock gives `times` one after the other."""
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=120)
    with Display("demo", world, console, clock=iter(times).__next__) as display:
        act(display)
    return text.getvalue()


def test_without_a_terminal_each_learner_has_a_line_every_few_seconds() -> None:
    """Five seconds apart, whoever else has spoken; an epoch's end is always told."""

    def act(display: Display) -> None:
        for number in range(1, 5):
            display.progress(snapshot(0, number, 2))
        display.progress(snapshot(1, 4, 2))
        display.epoch(EpochEnd(0, 2, 0, 5, 10.0, 9.5, 0.5, 0.0))

    lines = shown(2, False, act, [0.0, 2.0, 4.9, 5.1, 5.2]).splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "(0/2) epoch 1, batch 2/10",
        "(0/2) epoch 1, batch 5/10",
        "(1/2) epoch 1, batch 5/10",
        "(0/2) epoch 1 ended",
    ]


def test_on_a_terminal_there_is_a_row_for_each_learner() -> None:
    """With the title."""
    text = shown(3, True, lambda display: display.progress(snapshot(1, 5, 3)), [])
    assert "demo: " in text
    assert "6/10" in text
    assert text.count("starting") >= 2


def test_the_table_of_a_finished_run_says_so() -> None:
    """It stays on the screen; a share below 100 % would look like a run that was cut short."""
    text = shown(3, True, lambda display: display.progress(snapshot(1, 5, 3)), [])
    assert "demo: ended after 30.0 s" in text


def test_the_table_of_a_run_that_was_cut_short_says_how_far_it_came() -> None:
    """The share done and the time left, as they are shown all the time."""
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=120)
    with pytest.raises(PeerLost), Display("demo", 3, console) as display:
        display.progress(snapshot(1, 5, 3))
        raise PeerLost("learner 2 was killed")
    assert "demo: 25 %, 1 min 30 s left" in text.getvalue()
    assert "ended" not in text.getvalue()


def test_many_learners_do_not_fill_the_screen() -> None:
    """The first sixteen are shown, and how many there are."""

    def act(display: Display) -> None:
        for rank in range(64):
            display.progress(snapshot(rank, 3, 64))
            display.epoch(EpochEnd(rank, 64, 0, 5, 10.0, 9.5, 0.5, 0.0))

    lines = shown(64, False, act, [0.0] * 64).splitlines()
    assert len(lines) == 2 * 16
    assert "64 learners" in shown(64, True, act, [])


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
