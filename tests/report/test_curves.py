"""TensorBoard finds the curves."""

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from starling.report.curves import Curves
from starling.report.meter import EpochEnd, Meter
from tests.report.steps import step


def test_losses_and_shares_of_time_are_on_the_curves(tmp_path: Path) -> None:
    """Losses by the step of the run, shares by epoch."""
    curves = Curves(tmp_path)
    meter = Meter(world=2)
    for number in (3, 7):
        meter.add(step(number, loss=number / 2))
        snapshot = meter.take()
        assert snapshot is not None
        curves.progress(snapshot)
    curves.epoch(EpochEnd(0, 2, 0, 5, 10.0, 9.0, 0.5, 0.5))
    curves.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(each.step, each.value) for each in events.Scalars("train/loss")] == [(3, 1.5), (7, 3.5)]
    (computing,) = events.Scalars("time/computing")
    assert (computing.step, computing.value) == (1, pytest.approx(90.0))
