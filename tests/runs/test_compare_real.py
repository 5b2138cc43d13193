"""Comparisons with real learners: processes of `starling.train`, one cell at a time."""

from pathlib import Path

import pytest

from tests.runs.test_compare import Tree, compared, results, run
from tests.runs.test_compare_job import accuracy, compare

__all__ = ["compared"]


@pytest.mark.wide
def test_real_learners_are_measured_by_their_own_clock(tmp_path: Path) -> None:
    """Two processes report waits, bytes and the loss of each mini-batch; diverging is a result, too; no checkpoint
    remains."""
    table = compare(
        tmp_path,
        "adpsgd",
        engine="processes",
        seeds=[1],
        validate=accuracy,
        baseline="adpsgd",
        name="real",
    )
    (result,) = table.results
    assert not result.diverged and result.num_gradients == 40 and result.num_samples == 800.0
    assert [point.samples for point in result.curve] == [20.0 * number for number in range(1, 41)]
    assert result.loss is not None and result.loss < result.curve[0].loss < 1.0
    seconds = [point.seconds for point in result.curve]
    assert seconds == sorted(seconds) and seconds[0] > 0.0
    assert result.bytes_sent > 0 and 0.0 < result.seconds < 60.0 and 0.0 < result.computing < 100.0
    assert (result.valid or 0.0) > 0.5 and result.consensus_distance is not None
    folder = tmp_path / "real" / "runs" / result.cell.name
    assert (folder / "log" / "events.jsonl").is_file() and not (folder / "checkpoints").exists()


@pytest.mark.wide
def test_a_recipe_is_compared_with_real_learners(compared: Tree, tmp_path: Path) -> None:
    """They are those of `starling.train`, which decode and count like simulated ones."""
    del compared["compare"]["arms"]["delay"]
    compared["compare"] |= {"baseline": "server", "engine": "processes"}
    compared["compare"]["arms"]["server"]["learners"] = 2
    run(compared)
    (result,) = results(tmp_path / "exp" / "songs").values()
    assert (result.num_gradients, result.diverged) == (12, False)
    assert result.words and result.test is not None and result.curve[-1].loss < 100.0
    assert result.bytes_sent > 0 and result.seconds > 0.0
