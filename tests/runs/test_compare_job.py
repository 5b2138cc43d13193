"""`starling.compare`: any model and data, with all features of a comparison of a recipe."""

import io
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import starling
from starling.comparing.table import Comparison
from starling.errors import ConfigError, Stopped
from tests.warm_start import WarmProgram

SIX = ("allreduce", "delay-by-one", "dpsgd", "adpsgd", "parameter-server", "hogwild")
POINTS = torch.randn(600, 2, generator=torch.Generator().manual_seed(1))
LABELS = (POINTS.prod(dim=1) > 0).long()


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def accuracy(model: nn.Module, first: int = 400, last: int = 600) -> float:
    right = model(POINTS[first:last]).argmax(dim=1) == LABELS[first:last]
    return float(right.float().mean())


DATA = torch.utils.data.TensorDataset(POINTS[:400], LABELS[:400])
JOB = starling.Job(
    starling.DataWorkload(make_model, loss, DATA, batch_size=20),
    starling.STRATEGIES["allreduce"],
    starling.Budget(epochs=2),
    partial(torch.optim.SGD, lr=0.3),
)


def compare(tmp_path: Path, *strategies: str, said: io.StringIO | None = None, **options: Any) -> Comparison:
    """Compare on two learners."""
    console = Console(file=said or io.StringIO(), width=200)
    given = {"learners": 2, "seeds": [1, 2], "exp": tmp_path, "console": console, **options}
    return starling.compare(JOB, strategies, **given)


@pytest.mark.wide
def test_six_strategies_interrupted_and_resumed_lose_no_cell_and_compute_none_twice(tmp_path: Path) -> None:
    """It is asked to stop (SIGTERM) and killed (-9) in the middle; the table then equals that of an uninterrupted
    run."""
    script = tmp_path / "six.py"
    call = f"compare(Path({str(tmp_path)!r}), *SIX, said=sys.stderr, name='six')"
    script.write_text(f"import sys\nfrom tests.runs.test_compare_job import *\n{call}\n")
    cells, computed = tmp_path / "six" / "cells", []
    for number in (signal.SIGTERM, signal.SIGKILL):
        with WarmProgram([str(script)], tmp_path) as process:
            before = len(computed)
            while len(computed) < before + 3:
                line = process.output.readline()
                assert line, computed
                computed += [line.split()[1]] if "/14 " in line else []
            process.send_signal(number)
            rest = process.output.read()
            computed += [line.split()[1] for line in rest.splitlines() if "/14 " in line]
            code = process.wait(100.0)
        assert code in (-number, 1)
        assert "Traceback" not in rest or "Stopped: stopped; " in rest, rest
        assert {f"{name.rstrip(':')}.json" for name in computed} <= {path.name for path in cells.glob("*.json")}
    kept = {path.name: path.stat().st_mtime_ns for path in cells.glob("*.json")}
    assert 6 <= len(kept) < 14
    said = io.StringIO()
    table = compare(tmp_path, *SIX, said=said, name="six")
    assert {name: (cells / name).stat().st_mtime_ns for name in kept} == kept
    assert said.getvalue().count("/14 ") == 14 - len(kept)
    assert f"14 cells, {len(kept)} of them done already" in said.getvalue()
    whole = compare(tmp_path, *SIX, name="whole")
    assert table.rows() == whole.rows() and len(table.rows()) == 7
    assert [row["arm"] for row in table.rows()] == ["one", *SIX]


def test_sigterm_is_reported_with_its_number_and_what_is_kept(tmp_path: Path) -> None:
    """The signal reaches this process in the middle of the second cell's score."""
    calls = []

    def score(model: nn.Module) -> float:
        calls.append(1)
        if len(calls) == 4:  # two probes of the seeds, and the first cell's
            os.kill(os.getpid(), signal.SIGTERM)
        return accuracy(model)

    before = signal.getsignal(signal.SIGTERM)  # Ray sets one of its own where its tests have run
    with pytest.raises(Stopped, match=r"1 of 4 cells are kept in .*; run the same command") as caught:
        compare(tmp_path, "adpsgd", validate=score)
    assert caught.value.exit_code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_grid_grows_until_it_brackets_the_best_rate(tmp_path: Path) -> None:
    """It grows by its own factor, at the end where the best rate lies; a grid with its best rate inside stays
    unchanged."""
    grids = {"low": [0.01, 0.03], "wide": [0.001, 3.0, 3000.0]}
    arms = {label: {"strategy": "allreduce", "rates": rates} for label, rates in grids.items()}
    options = {"validate": accuracy, "higher_is_better": True, "tuning_seeds": 1, "bracket": True}
    said = io.StringIO()
    table = starling.compare(JOB, arms, exp=tmp_path, console=Console(file=said, width=200), seeds=[1, 2], **options)
    rates = {label: sorted({each.cell.rate for each in table.results if each.cell.arm == label}) for label in grids}
    assert rates["low"] == [float(f"{0.01 * 3**power:.6g}") for power in range(len(rates["low"]))]
    assert rates["low"][1] < table.rows()[1]["rate"] < rates["low"][-1]
    assert rates["wide"] == grids["wide"]
    assert not any(row["edge"] for row in table.rows())
    total = len(table.results)
    assert f"{total}/{total} " in said.getvalue()
    with pytest.raises(ConfigError, match="bracket: no arm has two rates, from which a grid could grow; give `rates`"):
        starling.compare(JOB, {"low": {"strategy": "allreduce", "rates": [0.1]}}, exp=tmp_path, **options)


def test_any_job_is_tuned_on_its_validation_result_and_the_edge_of_the_grid_is_reported(tmp_path: Path) -> None:
    """A test result that prefers the lowest rate changes nothing; with one tuning seed, the other seed has only one
    rate."""
    table = compare(
        tmp_path,
        "adpsgd",
        rates=["0.01x", "0.1x", 0.3],
        validate=accuracy,
        test=lambda model: -accuracy(model),
        higher_is_better=True,
        target=0.6,
        tuning_seeds=1,
    )
    one, adpsgd = table.rows()
    assert (one["learners"], adpsgd["learners"], one["verdict"]) == (1, 2, "baseline")
    tuned = {result.cell.rate: result for result in table.results if result.cell.row.arm == "adpsgd"}
    assert sorted(tuned) == [0.003, 0.03, 0.3] and len(table.results) == 2 * (3 + 1)
    valid = {
        rate: max(r.valid or 0.0 for r in table.results if r.cell.rate == rate and r.cell.seed == 1) for rate in tuned
    }
    assert adpsgd["rate"] == 0.3 == max(valid, key=lambda rate: valid[rate])
    assert max(tuned, key=lambda rate: tuned[rate].test or -1e9) == 0.003
    assert adpsgd["edge"] == "highest"
    assert any("adpsgd with 2 learners: the best rate, 0.3, is the highest of its grid" in w for w in table.warnings())
    assert adpsgd["value"] == pytest.approx(sum(r.test or 0.0 for r in table.at_best(tuned[0.3].cell.row)) / 2)
    assert isinstance(adpsgd["target_seconds"], float) and 0.0 < adpsgd["target_seconds"] < adpsgd["seconds"]  # type: ignore[operator]
    page = (tmp_path / "compare" / "table.md").read_text()
    assert "| 0.3 !" in page and "## Learning rates" in page and page.count("chosen") == 2


def test_a_workload_scores_by_its_mean_loss(tmp_path: Path) -> None:
    """The mean runs over all of its examples, as if computed at once."""
    held_out = starling.DataWorkload(make_model, loss, torch.utils.data.TensorDataset(POINTS, LABELS), batch_size=7)
    table = compare(tmp_path, "adpsgd", validate=held_out, seeds=[1])
    model = starling.simulate(table_job(1), learners=1).model()
    expected = float(nn.functional.cross_entropy(model(POINTS), LABELS).detach())
    assert table.rows()[0]["valid"] == pytest.approx(expected, rel=1e-4)


def table_job(seed: int) -> starling.Job:
    """The job of a seed."""
    workload = starling.DataWorkload(make_model, loss, DATA, batch_size=20, seed=seed)
    return starling.Job(workload, JOB.strategy, JOB.budget, JOB.make_optimizer, seed=seed)


def test_seeds_change_the_model_and_other_settings_compute_cells_again(tmp_path: Path) -> None:
    """The data, the budget and the optimizer count, too; a function of the seed gives the same jobs."""
    said = io.StringIO()
    first = compare(tmp_path, "adpsgd", said=said)
    assert len({result.loss for result in first.results}) == 4
    console = Console(file=said, width=200)
    again: dict[str, Any] = {"learners": 2, "seeds": [1, 2], "exp": tmp_path, "console": console}
    assert starling.compare(table_job, ["adpsgd"], **again).rows() == first.rows()
    assert "4 cells, 4 of them done already" in said.getvalue()
    starling.compare(table_job, {"adpsgd": {"strategy": "adpsgd", "budget": starling.Budget(epochs=1)}}, **again)
    assert "4 cells, 2 of them done already" in said.getvalue()
    said = io.StringIO()
    compare(tmp_path, "adpsgd", said=said, key="after a change that does not show")
    assert "4 cells, 0 of them done already" in said.getvalue()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"strategies": ["adpsdg"]}, r"arms\.adpsdg: strategy: 'adpsdg' is unknown; did you mean 'adpsgd'\?"),
        (
            {"strategies": {"a": {"strategy": {"name": "hadpsgd", "per_node": 3}}}},
            r"4 learners cannot be divided into super-learners of 3",
        ),
        (
            {"strategies": {"a": {"strategy": "adpsgd", "bugdet": 3}}},
            r"arms\.a: a job has no 'bugdet' to change; did y",
        ),
        ({"rates": ["0.5x", "1x"]}, r"validate: rates are chosen by a validation result"),
        ({"learners": [0]}, r"learners\.0: "),
        ({"engine": "processes", "jobs": 2}, r"jobs: real learners need the machine to themselves"),
        ({"engine": "virtul"}, r"engine: .*'virtual' or 'processes'"),
        ({"baseline": "adpsdg"}, r"baseline: 'adpsdg' is no arm; did you mean 'adpsgd'\?"),
    ],
)
def test_an_impossible_call_is_refused(tmp_path: Path, options: dict[str, Any], problem: str) -> None:
    """One message names the argument, before a folder is made."""
    given = {"strategies": ["adpsgd"], "exp": tmp_path / "exp", **options}
    with pytest.raises(ConfigError, match=rf"^starling\.compare: (?s:.*){problem}"):
        starling.compare(JOB, **given)
    assert not (tmp_path / "exp").exists()


def test_a_job_that_cannot_be_sent_to_processes_is_an_error(tmp_path: Path) -> None:
    """The message says what to do."""
    with pytest.raises(ConfigError, match=r"jobs: what is compared cannot be sent to 2 processes .*leave out jobs"):
        compare(tmp_path, "adpsgd", jobs=2, validate=lambda model: 0.0)


@pytest.mark.wide
def test_several_processes_find_the_same_as_one_for_any_job(tmp_path: Path) -> None:
    """The job is sent to them unchanged."""
    both = [
        compare(tmp_path, "adpsgd", seeds=[1], name=f"jobs-{jobs}", jobs=jobs, validate=partial(accuracy, last=500))
        for jobs in (1, 2)
    ]
    assert both[0].rows() == both[1].rows()
