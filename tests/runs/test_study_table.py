"""The answer of a study: a table that never says more than the seeds show, and curves."""

import math
from itertools import product
from pathlib import Path

import pytest

from starling.runs.study import picture
from starling.runs.study.picture import draw_curves
from starling.runs.study.results import Outcomes
from starling.runs.study.table import Row, details, error_rates, estimate, legend, rows_of
from tests.runs.study_results import Key, made_up

Rates = dict[Key, list[float | None]]


def rates(**arms: list[float | None]) -> Rates:
    """One model, optimizer, warm-up and number of workers."""
    return {("lstm", "adam", 0.0, arm, None if arm == "one" else 4): wers for arm, wers in arms.items()}


def rows(given: Rates) -> dict[str, Row]:
    """The rows of a study, by arm."""
    return {row.arm: row for row in rows_of(Outcomes(made_up(given)))}


def test_an_interval_is_that_of_student() -> None:
    """10, 12, 14: mean 12, deviation 2, t 4.303 for two degrees of freedom: 4.303 * 2 / sqrt(3)."""
    found = estimate([10.0, 12.0, 14.0])
    assert found.mean == 12.0
    assert found.half == pytest.approx(4.3027 * 2 / math.sqrt(3), rel=1e-4)
    assert estimate([10.0]).half is None


def test_a_difference_is_paired_by_seed_and_tested() -> None:
    """20, 20, 20.5 points: t = 20.17 / (0.289 / sqrt(3)) = 121, two degrees of freedom."""
    row = rows(rates(one=[10.0, 11.0, 12.0], asynchronous=[30.0, 31.0, 32.5]))["asynchronous"]
    assert row.difference is not None and row.difference.half is not None
    assert row.difference.mean == pytest.approx(20.1667, abs=1e-4)
    assert row.difference.half == pytest.approx(4.3027 * 0.28868 / math.sqrt(3), rel=1e-4)
    assert row.p == pytest.approx(6.8e-5, rel=0.01)


def test_an_interval_with_zero_in_it_has_a_large_p() -> None:
    """Whatever the means are."""
    row = rows(rates(one=[10.0, 20.0, 30.0], delay=[40.0, 12.0, 35.0]))["delay"]
    assert row.difference is not None and row.difference.half is not None
    assert abs(row.difference.mean) < row.difference.half
    assert row.p is not None and row.p > 0.05


def test_p_values_are_corrected_for_the_number_of_comparisons() -> None:
    """After Benjamini and Hochberg: the largest stays, and with m of them the smallest is multiplied by m at most."""
    alone = {
        arm: rows(rates(one=[10.0, 11.0, 12.0], **{arm: wers}))[arm].p
        for arm, wers in {"delay": [30.0, 31.0, 32.5], "batch": [12.0, 10.0, 13.0]}.items()
    }
    together = rows(rates(one=[10.0, 11.0, 12.0], delay=[30.0, 31.0, 32.5], batch=[12.0, 10.0, 13.0]))
    assert alone["delay"] is not None
    assert together["delay"].p == pytest.approx(2 * alone["delay"])
    assert together["batch"].p == pytest.approx(alone["batch"])


def test_only_seeds_that_both_sides_have_are_compared() -> None:
    """16 workers may have fewer than one learner; with one seed there is no interval and no p."""
    row = rows(rates(one=[10.0, 50.0], batch=[40.0]))["batch"]
    assert row.difference is not None
    assert (row.difference.mean, row.difference.half, row.p) == (30.0, None, None)


def test_equal_differences_have_no_spread_to_test() -> None:
    """Certain in these seeds: p is 0, or 1 where nothing differs."""
    found = rows(rates(one=[10.0, 11.0], batch=[20.0, 21.0], delay=[10.0, 11.0]))
    assert (found["batch"].p, found["delay"].p) == (0.0, 1.0)


def test_a_run_that_diverged_counts_as_all_wrong_and_is_marked() -> None:
    """In both tables."""
    outcomes = Outcomes(made_up(rates(one=[10.0, 10.0, 10.0], asynchronous=[20.0, None, None])))
    found = rows_of(outcomes)
    assert error_rates(outcomes, found)[-1].split("|")[-2].strip() == "73.3 ± 114.7 †2"
    assert [cell.strip() for cell in details(found)[-1].split("|")][-3:-1] == ["3", "2"]
    assert "† counts runs" in legend(outcomes)[0]


def test_a_model_that_is_worse_to_begin_with_does_not_count_as_hurt() -> None:
    """Differences are taken from one learner of the same model, optimizer and warm-up."""
    given: Rates = {}
    for warmup, (model, first, later) in product((0.0, 0.1), (("lstm", 30.0, 32.0), ("transformer", 10.0, 25.0))):
        for arm, workers, wer in (("one", None, first), ("asynchronous", 4, later)):
            given[(model, "adam", warmup, arm, workers)] = [wer - 1, wer, wer + (1.5 if arm == "one" else 1)]
    lost = {
        (row.model, row.warmup): row.difference.mean
        for row in rows_of(Outcomes(made_up(given)))
        if row.difference is not None
    }
    assert lost == {
        ("lstm", 0.0): pytest.approx(11 / 6),
        ("lstm", 0.1): pytest.approx(11 / 6),
        ("transformer", 0.0): pytest.approx(15 - 1 / 6),
        ("transformer", 0.1): pytest.approx(15 - 1 / 6),
    }


def test_a_study_without_one_learner_has_a_table_and_no_differences() -> None:
    """There is no baseline."""
    (row,) = rows_of(Outcomes(made_up({("lstm", "adam", 0.0, "batch", 4): [10.0, 12.0]})))
    assert (row.wer.mean, row.difference, row.p) == (11.0, None, None)
    assert details([row])[-1].split("|")[7].strip() == "—"


def test_the_table_has_a_column_for_each_arm() -> None:
    """And the arm without workers stands in every row."""
    given = rates(one=[10.0, 12.0], batch=[20.0, 20.0])
    given[("lstm", "adam", 0.0, "batch", 16)] = [50.0, 50.0]
    outcomes = Outcomes(made_up(given))
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in error_rates(outcomes, rows_of(outcomes))]
    assert lines[0] == ["model", "optimizer", "warm-up", "workers", "one", "batch"]
    assert lines[2:] == [
        ["lstm", "adam", "0", "4", "11.0 ± 12.7", "20.0 ± 0.0"],
        ["lstm", "adam", "0", "16", "11.0 ± 12.7", "50.0 ± 0.0"],
    ]


def test_curves_are_the_same_bytes_for_the_same_results(tmp_path: Path) -> None:
    """No date, no random ids; one picture for each model and optimizer."""
    outcomes = Outcomes(made_up(rates(one=[10.0, 11.0], batch=[20.0, 21.0])))
    drawn = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (file,) = draw_curves(outcomes, tmp_path / name)
        drawn.append(file.read_bytes())
    assert file.name == "curves-lstm-adam.svg"
    assert drawn[0] == drawn[1]
    assert b"<svg" in drawn[0] and b"dc:date" not in drawn[0]


def test_matplotlib_and_scipy_are_loaded_only_to_answer() -> None:
    """They take a second that no other command should take: no module of a study imports them at its top."""
    for file in Path(picture.__file__).parent.glob("*.py"):
        imported = [line for line in file.read_text().splitlines() if line.startswith(("import ", "from "))]
        assert not any("matplotlib" in line or "scipy" in line for line in imported), file.name
