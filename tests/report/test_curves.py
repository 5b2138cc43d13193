"""TensorBoard finds the curves."""

from collections import Counter
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.util.tensor_util import make_ndarray

from starling.reporting.metrics import Curves
from tests.report.steps import ended, progress_of, step


def test_losses_and_shares_of_time_are_on_the_curves(tmp_path: Path) -> None:
    """Losses by the step of the run, shares by epoch."""
    curves = Curves(tmp_path)
    for number in (3, 7):
        curves(progress_of(step(number, loss=number / 2)))
    curves(ended(0, 0, 5, 10.0, 9.0, 0.5, 0.5))
    curves.close()
    events = EventAccumulator(str(tmp_path / "learner-0")).Reload()
    assert [(each.step, each.value) for each in events.Scalars("train/loss")] == [(3, 1.5), (7, 3.5)]
    (computing,) = events.Scalars("time/computing")
    assert (computing.step, computing.value) == (1, pytest.approx(90.0))


def test_how_learners_agreed_is_on_the_curves(tmp_path: Path) -> None:
    """Averaging by epoch, the consensus distance by the step of the run."""
    curves = Curves(tmp_path)
    curves(
        ended(
            0, 4, 8, 10.0, 9.0, 0.5, 0.5, step=96, rounds=12, bytes_sent=2_500_000, staleness=Counter({1: 4, 2: 4}),
            consensus_distance=0.25,
        )
    )  # fmt: skip
    curves.add("learner-0", {"consensus/distance": 0.125}, 192)
    curves.close()
    events = EventAccumulator(str(tmp_path / "learner-0")).Reload()
    for name, expected in (
        ("averaging/rounds_per_gradient", [(5, 1.5)]),
        ("averaging/megabytes_sent", [(5, 2.5)]),
        ("averaging/mean_staleness", [(5, 1.5)]),
        ("consensus/distance", [(96, 0.25), (192, 0.125)]),
    ):
        assert [(each.step, each.value) for each in events.Scalars(name)] == expected, name


@pytest.mark.parametrize(
    ("counts", "shown"),
    [
        ([0, 4, 0, 2], [[0.5, 1.5, 4.0], [1.5, 2.5, 0.0], [2.5, 3.5, 2.0]]),
        ([3], [[-0.5, 0.5, 3.0]]),
        ([0, 0, 1_000_000], [[1.5, 2.5, 1e6]]),
    ],
    ids=["some", "all of one", "many"],
)
def test_staleness_is_a_histogram_with_a_bucket_for_each_number(
    tmp_path: Path, counts: list[int], shown: list[list[float]]
) -> None:
    """What TensorBoard shows: from, to and how many, of every bucket between the first and the last that hold any."""
    curves = Curves(tmp_path)
    curves(ended(0, 0, 6, 10.0, 9.0, 0.5, 0.5, staleness=Counter({at: n for at, n in enumerate(counts) if n})))
    curves.close()
    events = EventAccumulator(str(tmp_path / "learner-0")).Reload()
    (raw,) = events.Histograms("averaging/staleness")
    assert raw.step == 1
    assert raw.histogram_value.num == sum(counts)
    assert raw.histogram_value.sum == sum(value * count for value, count in enumerate(counts))
    assert histogram_of(tmp_path / "learner-0") == shown


def test_no_histogram_of_nothing(tmp_path: Path) -> None:
    """An epoch without a gradient has no staleness and no consensus distance."""
    curves = Curves(tmp_path)
    curves(ended(0, 0, 0, 0.0, 0.0, 0.0, 0.0))
    curves.close()
    tags = EventAccumulator(str(tmp_path / "learner-0")).Reload().Tags()
    assert tags["histograms"] == []
    assert "consensus/distance" not in tags["scalars"]


def histogram_of(folder: Path) -> list[list[float]]:
    """The only histogram in a folder, as TensorBoard converts it for the page."""
    (file,) = folder.iterdir()
    for event in EventFileLoader(str(file)).Load():
        for value in event.summary.value:
            if value.tag == "averaging/staleness":
                rows: list[list[float]] = make_ndarray(value.tensor).tolist()
                return rows
    return []
