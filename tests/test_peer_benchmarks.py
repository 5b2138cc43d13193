"""The arithmetic of the table of peers, and its measuring workers; the rivals run only in `make bench-peers`."""

from pathlib import Path

import pytest

from benchmarks import peers
from benchmarks.peer_worker import Case
from benchmarks.peers import Cell, bar_of_starts, bars_of, launched, lower_limit, speed_ratios
from benchmarks.rivals import COLUMNS

WIDTHS = (8, 16, 4)


def cells(ms: float, rounds: float) -> list[Cell]:
    return [Cell(ms, rounds, 0.0)] * 3


def test_the_lower_limit_is_below_the_median_and_an_outlier_does_not_move_it() -> None:
    """For equal ratios it is that ratio; a pair that another program disturbed changes nothing."""
    assert lower_limit([1.1] * 11) == pytest.approx(1.1)
    ratios = [0.95, 0.97, 0.98, 0.99, 1.0, 1.0, 1.01, 1.02, 1.03, 1.04, 1.05]
    assert 0.95 < lower_limit(ratios) < 1.0
    assert lower_limit([0.01, *ratios[1:]]) == pytest.approx(lower_limit(ratios), abs=0.02)
    assert speed_ratios(cells(2.0, 1.0), cells(3.0, 1.0)) == [1.5] * 3


def test_adpsgd_must_average_and_be_the_fastest_of_those_that_do() -> None:
    """A rival that averages less than every second gradient does not count; being fast without averaging holds no
    bar."""
    found = {"ddp": cells(8.0, 1.0), "decent_dp": cells(3.0, 1.0), "torchft_local_sgd": cells(1.0, 0.1)}
    rounds, fastest = bars_of("a row", {**found, "adpsgd": cells(2.0, 0.6)})
    assert (rounds.ratio, rounds.holds) == (0.6, True)
    assert (fastest.ratio, fastest.holds) == (1.5, True)
    assert not any(bar.holds for bar in bars_of("a row", {**found, "adpsgd": cells(0.5, 0.01)}))
    assert not bars_of("a row", {**found, "adpsgd": cells(4.0, 1.0)})[1].holds


def test_each_strategy_is_held_to_its_own_rival() -> None:
    """Pairs that were not measured have no bar."""
    (bar,) = bars_of("a row", {"allreduce": cells(10.0, 1.0), "ddp": cells(9.8, 1.0), "dpsgd": cells(1.0, 1.0)})
    assert bar.name == "a row: allreduce / DDP, speed, lower 95 % limit"
    assert (bar.ratio, bar.holds) == (pytest.approx(0.98), True)
    starts = {column: [3.0, 2.0, 9.0] for column in peers.STARTING}
    assert (bar_of_starts(starts).ratio, bar_of_starts(starts).holds) == (3.0, False)


@pytest.mark.wide
def test_the_workers_measure_steps_rounds_and_models(tmp_path: Path) -> None:
    """Alone, models diverge; under `allreduce` they stay equal; `adpsgd` continues although one worker sleeps; a case
    of zero length ends with its first step."""
    cases = [
        Case("alone", WIDTHS, seconds=0.2),
        Case("allreduce", WIDTHS, seconds=0.2),
        Case("adpsgd", WIDTHS, slow_seconds=0.3, seconds=0.2),
        Case("allreduce", WIDTHS, seconds=0.0),
    ]
    (alone, in_step, asynchronous), first_step = launched(cases, tmp_path, world=2)
    assert alone.distance > 0.0 and alone.rounds_per_gradient == 0.0
    assert in_step.distance == 0.0 and in_step.rounds_per_gradient == 1.0
    assert 0.0 < asynchronous.ms_per_gradient < 250.0  # in step, it would be 300 at least
    assert first_step > 0.0
    assert list(tmp_path.iterdir()) == []


def test_columns_and_bars_name_the_same_things() -> None:
    """Every rival, and everything whose start is timed, is a column."""
    assert {*peers.RIVALS, *peers.RIVALS.values(), *peers.STARTING} <= set(COLUMNS)
    given = peers.parse(["--only", "allreduce", "ddp", "--pairs", "3", "--size", "small"])
    assert (given.only, given.pairs, given.size) == (["allreduce", "ddp"], 3, ["small"])
    with pytest.raises(SystemExit):
        peers.parse(["--only", "speed"])
