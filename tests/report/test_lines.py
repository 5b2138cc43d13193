"""Log lines say what people look for."""

from collections import Counter
from dataclasses import replace

import pytest

from starling.reporting.epochs import (
    Advice,
    duration,
    epoch_line,
    progress_line,
)
from tests.report.steps import ended, progress_of, step


def test_a_line_says_where_a_learner_is() -> None:
    """Epochs and batches are counted from 1."""
    steps = [step(number, epoch=1, rank=2) for number in (14, 15)]
    assert progress_line(progress_of(*steps)) == (
        "epoch 2, batch 6/10: loss 1.0000 over 200 frames, running 1.0000, lr 0.5, 0.5 s of audio per s, 30.0 s left"
    )


def test_the_first_line_of_a_run_does_not_claim_a_speed() -> None:
    """When the first mini-batch began is not known."""
    assert progress_line(progress_of(step(0))).endswith("lr 0.5")


@pytest.mark.parametrize(
    ("data", "peers", "line"),
    [
        (0.9, 0.4, None),
        (
            3.0,
            0.5,
            "in epoch 1, learner 0 waited for data 30 % of its time: raise batches.num_workers if cores are idle",
        ),
        (
            0.5,
            3.0,
            "in epoch 1, learner 0 waited for peers 30 % of its time: another strategy, such as adpsgd or local-sgd, "
            "may wait less",
        ),
    ],
)
def test_a_learner_that_waited_too_long_is_given_advice(data: float, peers: float, line: str | None) -> None:
    """Below 90 % computing, with what to change and why; the line of the epoch says how it went and no more."""
    end = ended(0, 0, 5, 10.0, 10.0 - data - peers, data, peers)
    assert Advice(2).line(end) == line
    told = epoch_line(end)
    assert told.startswith("epoch 1 ended: 5 steps in 10.0 s, ")
    assert told.endswith(f"{10 * peers:.1f} % waiting for peers")


def test_time_that_went_elsewhere_is_not_blamed_on_data_or_peers() -> None:
    """A first step that warms up is neither; and one learner has no peers that could wait less."""
    assert Advice(2).line(ended(0, 0, 5, 10.0, 8.0, 0.0, 0.05)) is None
    assert Advice(1).line(ended(0, 0, 5, 10.0, 5.0, 0.0, 5.0)) is None
    assert Advice(2).line(ended(0, 0, 0, 10.0, 0.0, 0.0, 10.0)) is None


def test_an_asynchronous_epoch_says_how_learners_agreed() -> None:
    """Rounds, staleness and traffic; it is not advised to use such a strategy."""
    stale = Counter({1: 3, 6: 1})
    end = ended(0, 0, 4, 10.0, 9.5, 0.3, 0.2, rounds=6, bytes_sent=1_234_567_890, staleness=stale)
    agreed = "1.50 rounds per gradient, staleness 2.2 (at most 6), 1,234.6 MB sent"
    assert epoch_line(end).endswith(f"2.0 % waiting for peers, {agreed}")
    for_data = Advice(2).line(replace(end, so_far=replace(end.so_far, computing=6.5, waiting_for_data=3.3))) or ""
    assert for_data.endswith(": raise batches.num_workers if cores are idle")
    assert Advice(2).line(replace(end, so_far=replace(end.so_far, computing=6.5, waiting_for_peers=3.3))) is None
    without = epoch_line(ended(0, 0, 4, 10.0, 9.5, 0.3, 0.2, staleness=stale))
    assert "peers, staleness 2.2" in without and "rounds" not in without
    assert "1.50 rounds per gradient, staleness 0.0" in epoch_line(ended(0, 0, 4, 10.0, 9.5, 0.3, 0.2, rounds=6))


def test_a_synchronous_epoch_says_nothing_of_rounds() -> None:
    """Its gradients are never stale, whatever it sends."""
    line = epoch_line(ended(0, 0, 4, 10.0, 9.5, 0.3, 0.2, bytes_sent=1_000_000, staleness=Counter({0: 4})))
    assert line.endswith("2.0 % waiting for peers")


def test_one_step_is_not_several() -> None:
    """A budget may end with the first step of an epoch."""
    assert "ended: 1 step in 10.0 s" in epoch_line(ended(0, 0, 1, 10.0, 10.0, 0.0, 0.0))


def test_an_epoch_without_a_step_is_not_a_division_by_zero() -> None:
    """A budget of nothing ends well."""
    assert "0 steps in 0.0 s, 0.0 % computing" in epoch_line(ended(0, 0, 0, 0.0, 0.0, 0.0, 0.0))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(4.21, "4.2 s"), (59.96, "60.0 s"), (60, "1 min 00 s"), (185, "3 min 05 s"), (7620, "2 h 07 min")],
)
def test_durations_read_well(seconds: float, text: str) -> None:
    """Seconds, minutes, hours."""
    assert duration(seconds) == text
