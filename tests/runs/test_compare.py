"""A comparison from its recipe to its answer; finished work is not repeated."""

import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from starling.comparing.compare import compute, load_comparison, run_cell, run_comparison
from starling.comparing.grid import Cell, CellResult
from starling.errors import ConfigError, DataError, StarlingError
from starling.experiment.folder import ExperimentFolder
from starling.speech.comparison import check_comparison
from starling.speech.recipe import check_recipe
from starling.speech.training.set_up import set_up

Tree = dict[str, Any]


@pytest.fixture
def compared(tree: Tree) -> Tree:
    """A comparison of two cells."""
    section = {
        "arms": {
            "delay": {"strategy": {"name": "delayed", "delay": 2}, "learners": 1},
            "server": {"strategy": "parameter-server", "learners": 3},
        },
        "seeds": [1],
    }
    del tree["learners"]
    return {**tree, "budget": {"steps": 12}, "batches": {"max_duration": 2}, "compare": section}


def run(tree: Tree) -> tuple[list[str], str]:
    """The output of a comparison, and its messages on the console."""
    lines: list[str] = []
    console = io.StringIO()
    run_comparison(check_comparison(tree, "c.yaml"), lines.append, Console(file=console, width=200))
    return lines, console.getvalue()


def results(folder: Path) -> dict[str, CellResult]:
    """Results by arm."""
    content = json.loads((folder / "results.json").read_text())
    found = [CellResult.model_validate(cell) for cell in content["cells"]]
    return {result.cell.arm: result for result in found}


def test_a_comparison_ends_in_a_table_and_curves_and_continues_where_it_stopped(compared: Tree, tmp_path: Path) -> None:
    """A second run computes nothing and writes the same; a removed cell is computed again, with the same result."""
    folder = tmp_path / "exp" / "songs"
    told, said = run(compared)
    assert "2 cells, 0 of them done" in said
    assert [line.split("|")[1].strip() for line in told[2:]] == ["delay", "server"]
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert {"table.md", "results.json", "compare.yaml", "env.txt"} == set(files)
    again = load_comparison(folder / "compare.yaml")
    assert again.digest(again_cell := results(folder)["delay"].cell) == results(folder)["delay"].digest, again_cell
    first = results(folder)
    assert {arm: result.num_gradients for arm, result in first.items()} == {"delay": 12, "server": 12}
    assert first["delay"].largest_staleness == 2
    assert 0.5 < first["server"].mean_staleness < 3.0
    assert first["server"].bytes_sent > 0 and first["server"].computing > 50.0
    assert all(result.curve and not result.diverged and result.words for result in first.values())

    told_again, said = run(compared)
    assert "2 cells, 2 of them done" in said and "/2 " not in said
    assert told_again == told
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == files

    (removed,) = folder.glob("cells/server*.json")
    removed.unlink()
    _, said = run(compared)
    assert said.count("/2 ") == 1 and "2/2 server_3_lr0.01_seed1: test" in said
    kept = {"cpu_seconds"}
    assert results(folder)["server"].model_dump(exclude=kept) == first["server"].model_dump(exclude=kept)


def test_a_cell_of_another_recipe_is_computed_again(compared: Tree) -> None:
    """A longer budget changes all cells."""
    run(compared)
    compared["budget"] = {"steps": 13}
    assert "2 cells, 0 of them done" in run(compared)[1]


def test_cells_of_a_seed_start_with_the_same_model(compared: Tree, tmp_path: Path) -> None:
    """A different seed has a different model, which is that of a run with this seed; the data are prepared once for
    all."""
    compared["compare"] |= {"seeds": [1, 2]}
    _, said = run(compared)
    assert said.count("parameters, ") == 1
    models = {
        path: path.read_bytes() for path in (tmp_path / "exp" / "songs" / "ready").glob("*/initial/*.safetensors")
    }
    assert len(models) == len(set(models.values())) == 2
    (second,) = [model for path, model in models.items() if path.parent.parent.name.endswith("seed2")]
    folder = ExperimentFolder(tmp_path / "alone")
    folder.path.mkdir()
    set_up(
        check_recipe({key: value for key, value in compared.items() if key != "compare"} | {"seed": 2}, ""),
        folder,
        print,
    )
    (alone,) = folder.initial.glob("*.safetensors")
    assert alone.read_bytes() == second


def test_numbers_that_stop_being_finite_are_a_result(compared: Tree, tmp_path: Path) -> None:
    """They count as 100 % of words wrong, and are marked in the table."""
    del compared["compare"]["arms"]["delay"]
    compared["compare"] |= {"baseline": "server", "rates": [1e38]}
    compared["optimizer"] = {"name": "sgd", "clip_norm": None}
    told, said = run(compared)
    assert "diverged after" in said
    row = dict(zip(told[0].split("|"), told[-1].split("|"), strict=True))
    assert next(value.strip() for title, value in row.items() if title.strip() == "WER %") == "100.0 †1"
    (result,) = results(tmp_path / "exp" / "songs").values()
    assert (result.diverged, result.test, result.words) == (True, None, None)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Make started processes receive SIGINT, even if a script runs the tests in its background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.wide
@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_all_processes_and_keeps_finished_cells(compared: Tree, tmp_path: Path) -> None:
    """There are one message and the shell's exit code for SIGINT; several processes find the same as one."""
    recipe = tmp_path / "c.yaml"
    recipe.write_text(yaml.safe_dump(compared), encoding="utf-8")
    seeds = ",".join(map(str, range(1, 13)))
    command = [sys.executable, "-m", "starling", "compare", str(recipe), "--jobs", "2", "--seeds", seeds]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stderr is not None
        said = ""
        while "/24 " not in said:
            said += process.stderr.readline()
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        said += process.stderr.read()  # ends when no process is left that could write
    assert process.returncode == 128 + signal.SIGINT
    assert "error: stopped; " in said and "run the same command to continue" in said
    assert "Traceback" not in said
    with pytest.raises(ProcessLookupError):
        _wait_until_gone(process.pid)
    first, *others = sorted((tmp_path / "exp" / "songs" / "cells").glob("*.json"))
    assert len(others) < 23
    beside = CellResult.model_validate_json(first.read_text())
    compared["compare"] |= {"seeds": [beside.cell.seed]}
    run({**compared, "name": "alone"})
    alone = results(tmp_path / "exp" / "alone")[beside.cell.arm]
    assert alone.model_dump(exclude={"cpu_seconds"}) == beside.model_dump(exclude={"cpu_seconds"})


def _wait_until_gone(group: int) -> None:
    deadline = time.monotonic() + 20.0
    while time.monotonic() < deadline:
        os.killpg(group, 0)  # raises ProcessLookupError once none is in it
        time.sleep(0.01)


def test_an_error_in_a_cell_names_it_and_what_is_kept(compared: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user then knows what to do next."""

    def fail(*arguments: object) -> None:
        raise DataError("the disk is full")

    monkeypatch.setattr("starling.comparing.compare._simulated", fail)
    with pytest.raises(DataError, match="the disk is full") as caught:
        run(compared)
    assert caught.value.__notes__[0] == "in cell delay_1_lr0.01_seed1"
    assert "0 of 2 cells are kept in" in caught.value.__notes__[1]


def test_a_process_that_dies_is_an_error_that_names_its_cell(compared: Tree, tmp_path: Path) -> None:
    """The process is killed from outside, or for lack of memory; nothing waits for it forever."""
    subject = check_comparison(compared, "c.yaml")
    cells = {Cell(arm="server", learners=3, rate=0.01, seed=seed): "" for seed in (1, 2)}
    found = compute(subject, cells, 2, tmp_path)
    threading.Thread(target=_kill_children).start()
    with pytest.raises(StarlingError, match=r"cell server_3_lr0\.01_seed\d: .* exit code -9") as caught:
        list(found)
    assert not isinstance(caught.value, DataError)
    assert not multiprocessing.active_children()


def _kill_children() -> None:
    while not (children := multiprocessing.active_children()):
        time.sleep(0.01)  # this thread shares an interpreter with the one that starts them
    for child in children:
        child.kill()


def test_a_result_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """It was changed by hand; removing it is enough."""
    cell = Cell(arm="server", learners=3, rate=0.01, seed=1)
    assert CellResult.read(tmp_path / "cells", cell, "") is None
    (tmp_path / "cells").mkdir()
    (tmp_path / "cells" / f"{cell.name}.json").write_text("{")
    with pytest.raises(DataError, match=rf"{cell.name}\.json: not the result of a cell .*remove it"):
        CellResult.read(tmp_path / "cells", cell, "")


def test_a_folder_that_cannot_be_written_is_named(compared: Tree, tmp_path: Path) -> None:
    """It is named before anything is computed."""
    (tmp_path / "exp").write_text("in the way")
    with pytest.raises(ConfigError, match="cannot be written"):
        run(compared)


def test_a_cell_depends_on_nothing_that_was_computed_before_it(compared: Tree, tmp_path: Path) -> None:
    """This includes random generators and mini-batches in memory."""
    run(compared)
    subject = check_comparison(compared, "c.yaml")
    found = [
        run_cell(subject, result.cell, result.digest, tmp_path)
        for result in reversed(results(tmp_path / "exp" / "songs").values())
    ]
    kept = {"cpu_seconds"}
    first = results(tmp_path / "exp" / "songs")
    assert [each.model_dump(exclude=kept) for each in found] == [
        first[each.cell.arm].model_dump(exclude=kept) for each in found
    ]
