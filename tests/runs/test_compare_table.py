"""The answer of a comparison: a table that never says more than the seeds show."""

import json
import math
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from starling.comparing import table
from starling.comparing.grid import Cell, CellResult, Metric, Row
from starling.comparing.table import choose, estimate
from tests.runs.compare_results import WORD_ERRORS, made_up, result

Tests = list[float | None]


def rows(metric: Metric = WORD_ERRORS, section: dict[str, Any] | None = None, **arms: Tests) -> dict[str, Any]:
    """The rows of a comparison, by arm: `one` has one learner, the others have four."""
    given = {("", arm, 1 if arm == "one" else 4): tests for arm, tests in arms.items()}
    return {str(row["arm"]): row for row in made_up(given, metric=metric, **(section or {})).rows()}


def test_an_interval_is_that_of_student() -> None:
    """10, 12, 14: mean 12, deviation 2, t 4.303 for two degrees of freedom: 4.303 * 2 / sqrt(3)."""
    found = estimate([10.0, 12.0, 14.0])
    assert found.mean == 12.0
    assert found.half == pytest.approx(4.3027 * 2 / math.sqrt(3), rel=1e-4)
    assert estimate([10.0]).half is None


def test_a_difference_is_paired_by_seed_and_tested() -> None:
    """20, 20, 20.5 points: t = 20.17 / (0.289 / sqrt(3)) = 121, two degrees of freedom."""
    row = rows(one=[10.0, 11.0, 12.0], adpsgd=[30.0, 31.0, 32.5])["adpsgd"]
    assert row["difference"] == pytest.approx(20.1667, abs=1e-4)
    assert row["difference_half"] == pytest.approx(4.3027 * 0.28868 / math.sqrt(3), rel=1e-4)
    assert row["p"] == pytest.approx(6.8e-5, rel=0.01)
    assert row["verdict"] == "worse"


def test_an_interval_with_zero_in_it_is_inconclusive() -> None:
    """This holds for any means."""
    row = rows(one=[10.0, 20.0, 30.0], adpsgd=[40.0, 12.0, 35.0])["adpsgd"]
    assert abs(row["difference"]) < row["difference_half"]
    assert row["p"] > 0.05
    assert row["verdict"] == "inconclusive"


def test_the_metric_defines_what_is_better() -> None:
    """Fewer errors are better, but a higher accuracy is."""
    assert rows(one=[10.0, 11.0, 12.0], adpsgd=[5.0, 6.1, 7.0])["adpsgd"]["verdict"] == "better"
    accuracy = Metric(name="accuracy", higher_is_better=True)
    assert rows(accuracy, one=[10.0, 11.0, 12.0], adpsgd=[5.0, 6.1, 7.0])["adpsgd"]["verdict"] == "worse"


def test_p_values_are_corrected_for_the_number_of_comparisons() -> None:
    """After Benjamini and Hochberg, the largest stays, and of m values the smallest is multiplied by at most m."""
    one: Tests = [10.0, 11.0, 12.0]
    alone = {
        arm: rows(one=one, **{arm: tests})[arm]["p"]
        for arm, tests in {"delayed": [30.0, 31.0, 32.5], "batch": [12.0, 10.0, 13.0]}.items()
    }
    together = rows(one=one, delayed=[30.0, 31.0, 32.5], batch=[12.0, 10.0, 13.0])
    assert together["delayed"]["p"] == pytest.approx(2 * alone["delayed"])
    assert together["batch"]["p"] == pytest.approx(alone["batch"])


def test_only_seeds_that_both_sides_have_are_compared() -> None:
    """One arm may have fewer; with one seed there is no interval, no p and no conclusion."""
    row = rows(one=[10.0, 50.0], batch=[40.0])["batch"]
    assert (row["difference"], row["difference_half"], row["p"], row["verdict"]) == (30.0, None, None, "inconclusive")


def test_equal_differences_are_judged_by_the_spread_of_both_sides() -> None:
    """A coarse result gives equal differences by chance: Welch's test decides, as in scipy, and gives 1 where nothing
    differs."""
    found = rows(one=[10.0, 11.0], batch=[20.0, 21.0], delayed=[10.0, 11.0])
    expected = stats.false_discovery_control([stats.ttest_ind([20, 21], [10, 11], equal_var=False).pvalue, 1.0])
    assert found["batch"]["p"] == pytest.approx(expected[0])
    assert (found["delayed"]["p"], found["delayed"]["difference_half"] > 0.0) == (1.0, True)
    certain = rows(one=[10.0, 10.0], batch=[20.0, 20.0])["batch"]
    assert (certain["p"], certain["difference_half"]) == (0.0, 0.0)


def test_a_run_that_diverged_counts_as_all_wrong_and_is_marked() -> None:
    """This holds in both tables."""
    found = made_up({("", "one", 1): [10.0, 10.0, 10.0], ("", "adpsgd", 4): [20.0, None, None]})
    row = found.rows()[1]
    assert (row["seeds"], row["diverged"]) == (3, 2)
    assert "73.3 ± 114.7 †2" in found.markdown()[-1]
    page = "\n".join(found.page())
    assert "† counts runs" in page and re.search(r"\| adpsgd +\| 4 .*\| 3 +\| 2 ", page)


def test_a_diverged_run_without_a_value_is_not_compared() -> None:
    """A loss that is not a number has no value."""
    found = rows(Metric(name="loss"), one=[1.0, 1.1], adpsgd=[2.0, None])["adpsgd"]
    assert (found["value"], found["difference"], found["verdict"]) == (None, None, "diverged")


def test_arms_with_everything_wrong_or_right_are_named_and_not_compared() -> None:
    """Near a floor or a ceiling a difference shows nothing; nor does a difference from such a baseline."""
    found = rows(one=[10.0, 11.0, 12.0], wrong=[99.0, 100.0, 97.0], right=[0.0, 0.0, 0.0])
    assert [found[arm]["verdict"] for arm in found] == ["baseline", "everything wrong", "everything right"]
    assert found["wrong"]["difference"] is None and found["wrong"]["p"] is None
    found = rows(one=[100.0, 100.0, 100.0], adpsgd=[10.0, 11.0, 12.0])
    assert found["adpsgd"]["verdict"] == "baseline: everything wrong"
    accuracy = Metric(name="accuracy", higher_is_better=True, all_right=0.99, all_wrong=0.1)
    found = rows(accuracy, one=[0.5, 0.6], right=[1.0, 1.0], wrong=[0.1, 0.09])
    assert [found[arm]["verdict"] for arm in found] == ["baseline", "everything right", "everything wrong"]


def test_differences_are_taken_within_a_setting() -> None:
    """A model that is worse to begin with does not count as hurt."""
    given: dict[tuple[str, str, int], Tests] = {}
    for model, first, later in (("lstm", 30.0, 32.0), ("transformer", 10.0, 25.0)):
        for arm, wer in (("one", first), ("adpsgd", later)):
            given[model, arm, 1 if arm == "one" else 4] = [wer - 1, wer, wer + (1.5 if arm == "one" else 1)]
    found = {(row["setting"], row["arm"]): row["difference"] for row in made_up(given).rows()}
    assert found["lstm", "adpsgd"] == pytest.approx(11 / 6)
    assert found["transformer", "adpsgd"] == pytest.approx(15 - 1 / 6)


def test_the_baseline_has_as_many_learners_where_it_can() -> None:
    """It may be any arm."""
    given: dict[tuple[str, str, int], Tests] = {
        ("", arm, learners): [base + learners, base + learners + 1]
        for (arm, base), learners in product((("allreduce", 10), ("adpsgd", 20)), (4, 16))
    }
    found = made_up(given, baseline="allreduce").rows()
    assert [row["verdict"] for row in found[:2]] == ["baseline", "baseline"]
    assert [row["difference"] for row in found] == [None, None, 10.0, 10.0]


def test_speed_is_that_to_the_target_or_else_the_throughput() -> None:
    """Curves fall from 2 after 1 s to 1.1 after 3 s with seed 1; efficiency is per learner."""
    cells = {arm: Cell(arm=arm, learners=n, rate=0.5, seed=1) for arm, n in (("one", 1), ("four", 4))}
    table = made_up({("", "one", 1): [10.0], ("", "four", 4): [10.0]}, target=1.55)
    table.results = [result(cells["one"], seconds=4.0), result(cells["four"], seconds=2.0)]
    one, four = table.rows()
    assert (one["target_seconds"], one["target_samples"]) == (pytest.approx(2.0), pytest.approx(50.0))
    assert (four["speedup"], four["efficiency"]) == (1.0, 25.0)
    for target, speedup in ((None, 2.0), (0.5, None)):
        again = made_up({("", "one", 1): [10.0], ("", "four", 4): [10.0]}, target=target)
        again.results = table.results
        assert again.rows()[1]["speedup"] == speedup
        assert again.rows()[1]["target_seconds"] is None


def test_the_rate_is_chosen_only_by_the_validation_result() -> None:
    """The test result would choose another rate; a rate at an end of the grid is marked, and one that diverged is never
    best."""

    def found(valid: dict[float, list[float | None]], metric: Metric = WORD_ERRORS) -> tuple[float, str]:
        results = [
            result(Cell(arm="a", learners=4, rate=rate, seed=seed), value, test=100.0 * rate)
            for rate, values in valid.items()
            for seed, value in enumerate(values)
        ]
        best = choose(results, sorted(valid), metric)
        return best.rate, best.edge

    assert found({0.1: [20.0, 30.0], 0.2: [10.0, 20.0], 0.4: [30.0, 10.0]}) == (0.2, "")
    assert found({0.1: [20.0, 30.0], 0.2: [10.0, 20.0], 0.4: [5.0, None]}) == (0.2, "")
    assert found({0.1: [20.0, 30.0], 0.2: [10.0, 20.0]}) == (0.2, "highest")
    accuracy = Metric(name="accuracy", higher_is_better=True)
    assert found({0.1: [20.0, 30.0], 0.2: [10.0, 20.0]}, accuracy) == (0.1, "lowest")
    assert found({0.1: [20.0, 30.0]}) == (0.1, "")


def test_the_training_loss_can_decide() -> None:
    """It then chooses the rate and is compared, whatever the score, which is shown beside it."""
    by_loss = Metric(name="training loss", of_loss=True, beside="WER %")
    cells = [Cell(arm="one", learners=1, rate=rate, seed=1) for rate in (0.1, 0.2, 0.4)]
    losses, scores = (0.3, 0.2, 0.1), (30.0, 20.0, None)  # the last diverged after a low loss
    results = [result(cell, score, loss=loss) for cell, score, loss in zip(cells, scores, losses, strict=True)]
    assert choose(results, [0.1, 0.2, 0.4], by_loss).rate == 0.2
    table = made_up({("", "one", 1): [10.0, 11.0, 12.0], ("", "adpsgd", 4): [30.0, 31.0, 32.5]}, metric=by_loss)
    one, adpsgd = table.rows()
    assert (one["value"], one["score"]) == pytest.approx((11.0 / 50, 11.0))
    assert adpsgd["difference"] == pytest.approx(20.1667 / 50, abs=1e-6)
    assert adpsgd["verdict"] == "worse"
    assert adpsgd["score_half"] == pytest.approx(estimate([30.0, 31.0, 32.5]).half)
    titles, _, shown, _ = table.markdown()
    columns = [each.strip() for each in titles.split("|")]
    assert columns[4:7] == ["training loss", "WER %", "difference"]
    assert shown.split("|")[5].strip() == "11.0 ± 2.5"
    diverged = made_up({("", "one", 1): [10.0, 11.0], ("", "adpsgd", 4): [30.0, None]}, metric=by_loss).rows()[1]
    assert (diverged["verdict"], diverged["score"]) == ("diverged", None)


def test_pandas_reads_the_rows() -> None:
    """Flat records with the same columns; `to_pandas` is a frame of them."""
    pandas = pytest.importorskip("pandas")
    table = made_up({("", "one", 1): [10.0, 11.0], ("", "adpsgd", 4): [12.0, 15.0]})
    frame = pandas.DataFrame(table.rows())
    assert list(frame["arm"]) == ["one", "adpsgd"] and list(frame["value"]) == [10.5, 13.5]
    assert frame.equals(table.to_pandas())


def test_everything_is_json() -> None:
    """Other programs can read it, because it has nothing that JSON lacks."""
    table = made_up({("", "one", 1): [10.0, 11.0], ("", "adpsgd", 4): [None, 15.0]})
    again = json.loads(json.dumps(table.content(), allow_nan=False))
    assert [row["arm"] for row in again["rows"]] == ["one", "adpsgd"] and len(again["cells"]) == 4


def test_a_row_keeps_to_its_best_rate() -> None:
    """Results at other rates are kept, but do not count."""
    table = made_up({("", "one", 1): [10.0, 11.0]})
    other = [result(Cell(arm="one", learners=1, rate=9.0, seed=1), 90.0)]
    table.results = [*table.results, *other]
    assert len(table.at_best(Row("", "one", 1))) == 2 and table.rows()[0]["value"] == 10.5


def test_scipy_and_pandas_are_loaded_only_to_answer() -> None:
    """They take a second that no other command should take: no module of a comparison imports them at the top."""
    for file in Path(table.__file__).parent.glob("*.py"):
        imported = [line for line in file.read_text().splitlines() if line.startswith(("import ", "from "))]
        assert not any(name in line for line in imported for name in ("scipy", "pandas")), file.name


def test_a_result_with_a_field_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    """The earlier version recorded the joules of a cell."""
    cell = Cell(arm="one", learners=1, rate=0.5, seed=1)
    result(cell).write(tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(json.dumps({**json.loads(file.read_text()), "joules": 7.5}))
    assert CellResult.read(tmp_path, cell, "") == result(cell)


def test_a_narrow_terminal_shows_fewer_columns_and_the_page_all() -> None:
    """Those that tell least about the result go first; value, time and speed-up stay, and learners if arms need it."""
    found = made_up({("", "one", 1): [10.0, 11.0, 12.0], ("", "adpsgd", 4): [30.0, 31.0, 32.5]}, target=1.5)
    titles, *_ = lines = found.markdown(80)
    assert all(len(line) <= 80 for line in lines)
    shown = ("arm", "WER %", "verdict", "seconds to loss 1.5", "speed-up")
    assert [title for title in shown if f" {title} " not in titles] == []
    assert " rate " not in titles and " learners " not in titles
    twice = made_up(
        {("", "adpsgd", learners): [30.0, 31.0, 32.5] for learners in (2, 4)}, baseline="adpsgd", target=1.5
    )
    assert " learners " in twice.markdown(80)[0] and " speed-up " in twice.markdown(80)[0]
    assert " p " in found.markdown()[0] and found.markdown()[0] in found.page()


def test_a_target_that_is_met_before_training_is_a_warning() -> None:
    """The first point of a curve has a loss of 2: after a warm start, times to a target of 2.5 would say nothing."""
    cells: dict[tuple[str, str, int], list[float | None]] = {("", "one", 1): [10.0, 11.0]}
    (warning,) = made_up(cells, target=2.5).warnings()
    assert "one with 1 learner: the first losses already meet the target, 2.5" in warning
    assert made_up(cells, target=1.5).warnings() == []
