"""Snapshots are means weighted by frames."""

from collections import Counter

import pytest

from starling.reporting.epochs import FAR, Meter
from starling.reporting.lines import rounds_per_gradient, time_left
from starling.training.job import Averaging, EpochReport, Spent
from tests.report.steps import step


def test_a_snapshot_is_the_mean_since_the_last_one() -> None:
    """By frames; the running loss is that of the epoch so far."""
    meter = Meter(world=4)
    meter.add(step(0, loss=4.0, frames=100))
    meter.add(step(1, loss=1.0, frames=300))
    first = meter.take()
    meter.add(step(2, loss=9.0, frames=400))
    second = meter.take()
    assert first is not None and second is not None
    assert (first.loss, first.num_frames) == (pytest.approx(1.75), 400)
    assert (second.loss, second.num_frames) == (9.0, 400)
    assert second.running_loss == pytest.approx((4.0 * 100 + 1.0 * 300 + 9.0 * 400) / 800)
    assert (second.world, second.batch, second.step, second.epoch) == (4, 2, 2, 0)
    assert meter.take() is None


def test_the_running_loss_restarts_with_every_epoch() -> None:
    """What was lost in the epoch before does not weigh on this one."""
    meter = Meter(world=1)
    meter.add(step(9, loss=100.0))
    meter.add(step(10, epoch=1, loss=2.0))
    snapshot = meter.take()
    assert snapshot is not None
    assert snapshot.running_loss == 2.0


def test_throughput_and_time_left_follow_the_engines_clock() -> None:
    """3 s of audio every 6 s; a quarter of the budget took half a minute."""
    meter = Meter(world=1)
    for number in range(6):
        meter.add(step(number))
    snapshot = meter.take()
    assert snapshot is not None
    assert snapshot.audio_rate == pytest.approx(0.5)
    assert time_left(snapshot) == "1 min 30 s"


def test_the_time_left_is_unknown_before_anything_is_spent() -> None:
    """Neither a division by zero nor a guess."""
    meter = Meter(world=1)
    meter.add(step(0))
    snapshot = meter.take()
    assert snapshot is not None
    assert not time_left(snapshot)
    assert snapshot.audio_rate == 0.0


def test_an_epoch_says_how_stale_gradients_were_and_what_agreeing_took() -> None:
    """Counts by staleness, rounds for each gradient, bytes, and the distance where it is known."""
    averaging = Averaging(rounds=6, bytes_sent=1234, staleness=Counter({3: 1, 0: 2, 1: 1}))
    end = Meter(8).end_epoch(EpochReport(1, 2, 4, 5.0, Spent(4.0, 0.5, 0.25), averaging, 0.125), step=96)
    assert (end.learner_id, end.world, end.epoch, end.step, end.num_steps) == (1, 8, 2, 96, 4)
    assert (end.computing, end.waiting_for_data, end.waiting_for_peers) == (4.0, 0.5, 0.25)
    assert (end.num_rounds, rounds_per_gradient(end), end.bytes_sent) == (6, 1.5, 1234)
    assert end.staleness == (2, 1, 0, 1)
    assert (end.mean_staleness, end.largest_staleness, end.consensus_distance) == (1.0, 3, 0.125)


def test_far_staleness_is_counted_together_but_its_mean_and_largest_are_exact() -> None:
    """However late a gradient is, a message about it stays small."""
    averaging = Averaging(staleness=Counter({1: 1, FAR: 2, FAR + 1: 3, 10 * FAR: 4}))
    end = Meter(2).end_epoch(EpochReport(0, 0, 10, 5.0, Spent(), averaging), step=20)
    assert len(end.staleness) == FAR + 1
    assert (end.staleness[1], end.staleness[FAR], sum(end.staleness)) == (1, 9, 10)
    assert end.largest_staleness == 10 * FAR
    assert end.mean_staleness == pytest.approx((1 + 2 * FAR + 3 * (FAR + 1) + 40 * FAR) / 10)


def test_an_epoch_ends_with_its_mean_loss_and_the_last_learning_rate() -> None:
    """By frames, of this learner; of an epoch in which it computed nothing there is no loss."""
    meter = Meter(world=2)
    meter.add(step(9, loss=100.0))
    meter.add(step(10, epoch=1, loss=2.0, frames=100))
    meter.add(step(11, epoch=1, loss=4.0, frames=300))
    end = meter.end_epoch(EpochReport(0, 1, 2, 5.0, Spent()), step=12)
    assert (end.loss, end.num_frames, end.learning_rate) == (pytest.approx(3.5), 400, 0.5)
    end = meter.end_epoch(EpochReport(0, 2, 0, 5.0, Spent()), step=14)
    assert (end.loss, end.num_frames) == (None, 0)


def test_an_epoch_without_a_gradient_has_no_rounds_for_each() -> None:
    """Neither a division by zero nor a histogram."""
    end = Meter(2).end_epoch(EpochReport(0, 0, 0, 0.0, Spent(), Averaging(rounds=2)), step=0)
    assert (rounds_per_gradient(end), end.mean_staleness, end.largest_staleness) == (0.0, 0.0, 0)
    assert end.staleness == ()
    assert (end.loss, end.num_frames, end.learning_rate) == (None, 0, None)
