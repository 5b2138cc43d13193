"""Progress is a mean weighted by frames, and all that is told of a learner comes from one tally."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from starling.launch.messages import Progress, Stretch
from starling.reporting.epochs import FAR, EpochSummary, Tally, by_staleness, time_left
from starling.training.job import Averaging, EpochReport, Spent
from tests.report.steps import progress_of, step


def tally_of(*steps: Any) -> Tally:
    """The tally of learner 0 after some steps."""
    tally = Tally()
    for each in steps:
        tally.add(each)
    return tally


def ended(tally: Tally, report: EpochReport, num_done: int = 0) -> Progress:
    """What is told of an epoch that has ended."""
    tally.end_epoch(report, num_done)
    return tally.progress(tally.all)


def test_progress_is_the_mean_since_the_last_one() -> None:
    """By frames; the running loss is that of the epoch so far."""
    tally = tally_of(step(0, loss=4.0, frames=100), step(1, loss=1.0, frames=300))
    first, told = tally.progress(Stretch()), replace(tally.all)
    tally.add(step(2, loss=9.0, frames=400))
    second = tally.progress(told)
    assert (first.new.loss, first.new.frames) == (pytest.approx(1.75), 400)
    assert (second.new.loss, second.new.frames) == (9.0, 400)
    assert second.so_far.loss == pytest.approx((4.0 * 100 + 1.0 * 300 + 9.0 * 400) / 800)
    assert (second.batch, second.new.step, second.epoch) == (2, 2, 0)
    assert tally.progress(tally.all).new.frames == 0


def test_the_running_loss_restarts_with_every_epoch() -> None:
    """What was lost in the epoch before does not weigh on this one."""
    assert progress_of(step(9, loss=100.0), step(10, epoch=1, loss=2.0)).so_far.loss == 2.0


def test_throughput_and_time_left_follow_the_engines_clock() -> None:
    """3 s of audio every 6 s; a quarter of the budget took half a minute."""
    progress = progress_of(*map(step, range(6)))
    assert progress.new.audio_rate == pytest.approx(0.5)
    assert time_left(progress) == "1 min 30 s"


def test_the_time_left_is_unknown_before_anything_is_spent() -> None:
    """Neither a division by zero nor a guess."""
    progress = progress_of(step(0))
    assert not time_left(progress)
    assert progress.new.audio_rate == 0.0


def test_an_epoch_says_how_stale_gradients_were_and_what_agreeing_took() -> None:
    """Counts by staleness, rounds, bytes, and the distance where it is known."""
    averaging = Averaging(rounds=6, bytes_sent=1234, staleness=Counter({3: 1, 0: 2, 1: 1}))
    report = EpochReport(1, 2, 4, 5.0, Spent(4.0, 0.5, 0.25), averaging, 0.125)
    progress = ended(Tally(), report, 96)
    work = progress.so_far
    assert (progress.learner_id, progress.epoch, progress.ended_at, work.batches) == (1, 2, 96, 4)
    assert (work.seconds, work.computing, work.waiting_for_data, work.waiting_for_peers) == (5.0, 4.0, 0.5, 0.25)
    assert (work.rounds, work.bytes_sent, progress.consensus_distance) == (6, 1234, 0.125)
    assert by_staleness(work.staleness) == [2, 1, 0, 1]


def test_far_staleness_is_counted_together_but_its_mean_and_largest_are_exact() -> None:
    """However late a gradient is, an event about it stays small."""
    averaging = Averaging(staleness=Counter({1: 1, FAR: 2, FAR + 1: 3, 10 * FAR: 4}))
    progress = ended(Tally(), EpochReport(0, 0, 10, 5.0, Spent(), averaging), 20)
    event = EpochSummary((progress,)).fields()
    counts, told = event["staleness"], event["learners"]["0"]
    assert len(counts) == FAR + 1
    assert (counts[1], counts[FAR], sum(counts)) == (1, 9, 10)
    assert told["largest_staleness"] == 10 * FAR
    assert told["mean_staleness"] == pytest.approx((1 + 2 * FAR + 3 * (FAR + 1) + 40 * FAR) / 10)


def test_an_epoch_ends_with_its_mean_loss_and_the_last_learning_rate() -> None:
    """By frames, of this learner; of an epoch in which it computed nothing there is no loss."""
    tally = tally_of(
        step(9, loss=100.0), step(10, epoch=1, loss=2.0, frames=100), step(11, epoch=1, loss=4.0, frames=300)
    )
    progress = ended(tally, EpochReport(0, 1, 2, 5.0, Spent()), 12)
    assert (progress.so_far.loss, progress.so_far.frames, progress.learning_rate) == (pytest.approx(3.5), 400, 0.5)
    progress = ended(tally, EpochReport(0, 2, 0, 5.0, Spent()), 14)
    assert (progress.epoch, progress.so_far.frames) == (2, 0)
    assert EpochSummary((progress,)).line().startswith("epoch 3 ended after 5.0 s: lr 0.5, computing 0 %")


def test_an_epoch_that_the_budget_cuts_short_is_not_said_to_have_ended() -> None:
    """But one that ends with the run has, and so has one whose next one this learner has begun."""
    tally = tally_of(step(9), step(12, epoch=1), step(15, epoch=1))
    for is_last, num_done, begin in (
        (True, 17, "epoch 2 was left after 7 of 10 mini-batches and 5.0 s: "),
        (True, 20, "epoch 2 ended after 5.0 s: "),
        (False, 17, "epoch 2 ended after 5.0 s: "),
    ):
        progress = ended(tally, EpochReport(0, 1, 2, 5.0, Spent(), is_last=is_last), num_done)
        assert EpochSummary((progress,)).line().startswith(begin)
    ahead = ended(tally, EpochReport(0, 0, 2, 5.0, Spent(), is_last=True), 10)
    assert EpochSummary((ahead,)).line().startswith("epoch 1 ended after 5.0 s: ")


def test_an_epoch_without_a_gradient_has_no_rounds_for_each() -> None:
    """Neither a division by zero nor a histogram."""
    progress = ended(Tally(), EpochReport(0, 0, 0, 0.0, Spent(), Averaging(rounds=2)))
    event = EpochSummary((progress,)).fields()
    told = event["learners"]["0"]
    assert (told["mean_staleness"], told["largest_staleness"], event["staleness"]) == (0.0, 0, [])
    assert "rounds per gradient" not in EpochSummary((progress,)).line()
    assert (progress.so_far.frames, progress.learning_rate, progress.so_far.rounds) == (0, None, 2)


def test_the_time_after_the_last_gradient_of_an_epoch_is_told_once() -> None:
    """With the end of the epoch, so that all that is new sums up to what was spent."""
    tally, told, seen = Tally(), Stretch(), Stretch()
    for number, spent in enumerate((Spent(1.0, 0.5, 0.0), Spent(2.0, 0.5, 0.25))):
        tally.add(replace(step(number), spent=spent))
        seen.add(tally.progress(told).new)
        told = replace(tally.all)
    averaging = Averaging(rounds=3, bytes_sent=12, staleness=Counter({0: 2}))
    tally.end_epoch(EpochReport(0, 0, 2, 5.0, Spent(2.0, 0.5, 1.25), averaging), 2)
    seen.add(tally.progress(told).new)
    told = replace(tally.all)
    tally.add(replace(step(2, epoch=1), spent=Spent(0.5, 0.0, 0.0)))
    seen.add(tally.progress(told).new)
    assert (seen.computing, seen.waiting_for_data, seen.waiting_for_peers) == (2.5, 0.5, 1.25)
    assert (seen.batches, seen.frames) == (3, 300)
    assert (seen.rounds, seen.bytes_sent, seen.staleness) == (3, 12, {0: 2})
