"""Snapshots are means weighted by frames."""

import pytest

from starling.report.meter import Meter
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


def test_the_running_loss_begins_anew_with_every_epoch() -> None:
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
    assert snapshot.minutes_left == pytest.approx(1.5)


def test_nobody_can_say_the_time_left_before_anything_is_spent() -> None:
    """Neither a division by zero nor a guess."""
    meter = Meter(world=1)
    meter.add(step(0))
    snapshot = meter.take()
    assert snapshot is not None
    assert snapshot.minutes_left is None
    assert snapshot.audio_rate == 0.0
