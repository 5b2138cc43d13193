"""The answer of a study: intervals, a table, curves, and words that never say more than the seeds show."""

import math
from itertools import product
from pathlib import Path

import pytest

from starling.runs.study import picture
from starling.runs.study.findings import findings
from starling.runs.study.intervals import difference, estimate, t_quantile
from starling.runs.study.outcomes import Outcomes
from starling.runs.study.picture import draw_curves
from starling.runs.study.table import details, error_rates
from tests.runs.study_results import Key, made_up

Rates = dict[Key, list[float | None]]


def rates(**arms: list[float | None]) -> Rates:
    """One model, optimizer, warm-up and number of workers."""
    return {("lstm", "adam", 0.0, arm, None if arm == "one" else 4): wers for arm, wers in arms.items()}


def said(given: Rates) -> str:
    """What was found, as one text."""
    return "\n".join(findings(Outcomes(made_up(given)), "tones"))


def test_an_interval_is_that_of_student() -> None:
    """10, 12, 14: mean 12, deviation 2, t 4.303 for two degrees of freedom: 4.303 * 2 / sqrt(3)."""
    found = estimate([10.0, 12.0, 14.0])
    assert (found.mean, found.count) == (12.0, 3)
    assert found.half == pytest.approx(4.3027 * 2 / math.sqrt(3))
    assert estimate([10.0]).half is None
    assert difference({1: 10.0, 2: 20.0, 3: 5.0}, {1: 11.0, 2: 21.0, 4: 9.0}) == estimate([1.0, 1.0])
    assert difference({1: 10.0}, {2: 10.0}) is None


@pytest.mark.parametrize(("freedom", "quantile"), [(1, 12.706), (2, 4.303), (20, 2.086), (30, 2.042), (120, 1.980)])
def test_quantiles_are_those_of_the_tables(freedom: int, quantile: float) -> None:
    """Published to three digits."""
    assert t_quantile(freedom) == pytest.approx(quantile, abs=1e-3)


def test_a_clear_difference_is_said_with_its_interval() -> None:
    """Up is worse."""
    text = said(rates(one=[10.0, 11.0, 12.0], asynchronous=[30.0, 31.0, 32.5], summed=[12.0, 13.0, 14.0]))
    assert "- lstm, adam, 4 workers: no warm-up: 11.0 → 31.2, worse (+20.2, +19.4 to +20.9)." in text
    assert "31.2 → 13.0, better (-18.2, -18.9 to -17.4)." in text
    assert "Of 1 setting: worse in 1." in text


def test_an_interval_with_zero_in_it_is_no_difference_that_the_seeds_can_show() -> None:
    """Whatever the means are."""
    text = said(rates(one=[10.0, 20.0, 30.0], delay=[40.0, 12.0, 35.0]))
    assert "no difference that 3 seeds can show (+9.0, " in text
    assert "worse (" not in text and "better (" not in text


def test_the_two_questions_are_answered_first() -> None:
    """Whom plain asynchronous updates hurt more, and what of it summing wins back."""
    given: Rates = {}
    for model, later, summed in (("lstm", 20.0, 12.0), ("transformer", 60.0, 10.5)):
        for arm, workers, wer in (("one", None, 10.0), ("asynchronous", 4, later), ("summed", 4, summed)):
            given[(model, "adam", 0.0, arm, workers)] = [wer, wer + 1.0, wer + (2.5 if arm == "one" else 2.0)]
    short = said(given).split("## In short")[1].split("\n## ")[0]
    assert "cost lstm 9.8 points and transformer 49.8; transformer is hurt more (+40.0, +40.0 to +40.0)." in short
    assert "adam, 4 workers, lstm: summing takes 21.0 % wrong to 13.0, where one learner has 11.2; " in short
    assert "against plain updates better (-8.0, -8.0 to -8.0), and not all that was lost." in short
    assert "better (-49.5, -49.5 to -49.5), to where one learner may be as well." in short


def test_only_seeds_that_both_sides_have_are_compared() -> None:
    """16 workers may have fewer than one learner."""
    assert "10.0 → 40.0, one seed cannot tell (+30.0)" in said(rates(one=[10.0, 50.0], batch=[40.0]))


def test_one_seed_cannot_tell() -> None:
    """There is no interval, and the words do not make one up."""
    text = said(rates(one=[10.0], batch=[40.0]))
    assert "10.0 → 40.0, one seed cannot tell (+30.0)" in text


def test_runs_that_learned_nothing_are_not_compared() -> None:
    """99 against 97 is not better."""
    text = said(rates(one=[10.0, 10.0], asynchronous=[99.0, 99.0], summed=[97.0, 97.0]))
    assert "99.0 → 97.0, neither learned" in text
    assert "Of 1 setting: neither learned in 1." in text


def test_a_run_that_diverged_counts_as_all_wrong_and_is_marked() -> None:
    """In the words and in the tables."""
    outcomes = Outcomes(made_up(rates(one=[10.0, 10.0, 10.0], asynchronous=[20.0, None, None])))
    assert "6 runs, 2 of which diverged; one whose numbers" in "\n".join(findings(outcomes, "tones"))
    assert error_rates(outcomes)[-1].split("|")[-2].strip() == "73.3 ± 114.7 †2"
    assert [cell.strip() for cell in details(outcomes)[-1].split("|")][-3:-1] == ["3", "2"]


def test_models_are_compared_by_what_each_loses() -> None:
    """A model that is worse to begin with does not count as hurt."""
    given: Rates = {}
    for warmup, (model, first, later) in product((0.0, 0.1), (("lstm", 30.0, 32.0), ("transformer", 10.0, 25.0))):
        for arm, workers, wer in (("one", None, first), ("asynchronous", 4, later)):
            given[(model, "adam", warmup, arm, workers)] = [wer - 1, wer, wer + (1.5 if arm == "one" else 1)]
    text = said(given)
    assert "`asynchronous`, 4 workers, adam, mean over warm-ups: lstm +1.8, transformer +14.8; " in text
    assert "transformer loses more (+13.0, +13.0 to +13.0)." in text
    assert "- `asynchronous`, 4 workers, lstm, adam: warm-up 0 +1.8, warm-up 0.1 +1.8; no difference" in text


def test_what_was_not_run_is_not_spoken_of() -> None:
    """A study of one arm has a table and no effects."""
    text = said(rates(one=[10.0, 12.0]))
    assert "- One learner, lstm: 11.0 % with adam" in text
    assert "##" not in text


def test_the_table_has_a_column_for_each_arm() -> None:
    """And the arm without workers stands in every row."""
    given = rates(one=[10.0, 12.0], batch=[20.0, 20.0])
    given[("lstm", "adam", 0.0, "batch", 16)] = [50.0, 50.0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in error_rates(Outcomes(made_up(given)))]
    assert rows[0] == ["model", "optimizer", "warm-up", "workers", "one", "batch"]
    assert rows[2:] == [
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


def test_matplotlib_is_loaded_only_to_draw() -> None:
    """It takes a second that no other command should take: no module of a study imports it at its top."""
    for file in Path(picture.__file__).parent.glob("*.py"):
        imported = [line for line in file.read_text().splitlines() if line.startswith(("import ", "from "))]
        assert not any("matplotlib" in line for line in imported), file.name
