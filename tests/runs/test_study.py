"""A study from its recipe to its answer; what is done is not done again."""

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

from starling.errors import ConfigError, DataError, StarlingError
from starling.runs.study.config import check_study, load_study
from starling.runs.study.results import CellResult, ResultFolder
from starling.runs.study.study import run_study
from starling.runs.study.workers import Task, compute

Tree = dict[str, Any]


@pytest.fixture
def studied(tree: Tree) -> Tree:
    """A study of two cells."""
    section = {
        "models": {"lstm": {"name": "lstm", "preset": "tiny"}},
        "optimizers": {"adam": {"name": "adam", "lr": 0.01}},
        "warmups": [0.1],
        "workers": [3],
        "arms": ["delay", "asynchronous"],
        "seeds": [1],
    }
    del tree["learners"]
    return {**tree, "budget": {"steps": 12}, "batches": {"max_duration": 2}, "study": section}


def run(tree: Tree) -> tuple[list[str], str]:
    """What a study tells, and what it says on the console."""
    lines: list[str] = []
    console = io.StringIO()
    run_study(check_study(tree, "s.yaml"), lines.append, Console(file=console, width=200))
    return lines, console.getvalue()


def results(folder: Path) -> dict[str, CellResult]:
    """Results by arm."""
    content = json.loads((folder / "results.json").read_text())
    found = [CellResult.model_validate(cell) for cell in content["cells"]]
    return {result.cell.arm: result for result in found}


def test_a_study_ends_in_a_table_and_curves_and_continues_where_it_was(studied: Tree, tmp_path: Path) -> None:
    """A second run computes nothing and writes the same; a cell that is removed is computed again, to the same end."""
    folder = tmp_path / "exp" / "songs"
    told, said = run(studied)
    assert "2 cells, 0 of them done" in said
    assert told[0].split("|")[-3:-1] == [" delay ", " asynchronous "]
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert {"table.md", "results.json", "curves-lstm-adam.svg", "study.yaml", "env.txt"} == set(files)
    assert load_study(folder / "study.yaml") == check_study(studied, "s.yaml")
    first = results(folder)
    assert {arm: result.num_gradients for arm, result in first.items()} == {"delay": 12, "asynchronous": 12}
    assert first["delay"].largest_staleness == 2
    assert 0.5 < first["asynchronous"].mean_staleness < 3.0
    assert all(result.curve and not result.diverged and result.words > 0 for result in first.values())

    told_again, said = run(studied)
    assert "2 cells, 2 of them done" in said and "/2 " not in said
    assert told_again == told
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == files

    (removed,) = folder.glob("cells/*asynchronous*.json")
    removed.unlink()
    _, said = run(studied)
    assert said.count("/2 ") == 1 and "2/2 lstm-adam-warmup0.1-asynchronous-3-seed1: WER" in said
    kept = {"cpu_seconds"}
    assert results(folder)["asynchronous"].model_dump(exclude=kept) == first["asynchronous"].model_dump(exclude=kept)


def test_a_cell_of_another_recipe_is_computed_again(studied: Tree) -> None:
    """A longer budget changes all of them."""
    run(studied)
    studied["budget"] = {"steps": 13}
    assert "2 cells, 0 of them done" in run(studied)[1]


def test_numbers_that_stop_being_finite_are_a_result(studied: Tree, tmp_path: Path) -> None:
    """Counted as 100 % of words wrong, and marked in the table."""
    studied["study"]["arms"] = ["asynchronous"]
    studied["study"]["optimizers"]["adam"] = {"name": "sgd", "lr": 1e38}
    studied["optimizer"] = {"clip_norm": None}
    told, said = run(studied)
    assert "diverged after" in said
    assert told[-1].split("|")[-2].strip() == "100.0 †1"
    (result,) = results(tmp_path / "exp" / "songs").values()
    assert (result.diverged, result.wer, result.words) == (True, 100.0, 0)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """What is started hears SIGINT, also where a script runs the tests in its background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_all_processes_and_keeps_what_is_done(studied: Tree, tmp_path: Path) -> None:
    """One message and the shell's exit code for SIGINT; what several processes have found is what one finds."""
    studied["study"] |= {"jobs": 2, "seeds": list(range(1, 31))}
    recipe = tmp_path / "s.yaml"
    recipe.write_text(yaml.safe_dump(studied), encoding="utf-8")
    command = [sys.executable, "-m", "starling", "study", "staleness", str(recipe)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stderr is not None
        said = ""
        while "/60 " not in said:
            said += process.stderr.readline()
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        said += process.stderr.read()  # ends when no process is left that could write
    assert process.returncode == 128 + signal.SIGINT
    assert "error: stopped; " in said and "run the same command to continue" in said
    assert "Traceback" not in said
    with pytest.raises(ProcessLookupError):
        _wait_until_gone(process.pid)
    first, *others = sorted((tmp_path / "exp" / "songs" / "cells").glob("*.json"))
    assert len(others) < 59
    beside = CellResult.model_validate_json(first.read_text())
    studied["study"] |= {"jobs": 1, "seeds": [beside.cell.seed], "arms": [beside.cell.arm]}
    run({**studied, "name": "alone"})
    alone = results(tmp_path / "exp" / "alone")[beside.cell.arm]
    assert alone.model_dump(exclude={"cpu_seconds"}) == beside.model_dump(exclude={"cpu_seconds"})


def _wait_until_gone(group: int) -> None:
    deadline = time.monotonic() + 20.0
    while time.monotonic() < deadline:
        os.killpg(group, 0)  # raises ProcessLookupError once nobody is in it


def test_an_error_in_a_cell_names_it_and_what_is_kept(studied: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that one knows what to do next."""

    def fail(*arguments: object) -> None:
        raise DataError("the disk is full")

    monkeypatch.setattr("starling.runs.study.workers.run_cell", fail)
    with pytest.raises(DataError, match="the disk is full") as caught:
        run(studied)
    assert caught.value.__notes__[0] == "in cell lstm-adam-warmup0.1-delay-3-seed1"
    assert "0 of 2 cells are kept in" in caught.value.__notes__[1]


def test_a_process_that_dies_is_an_error_that_names_its_cell(studied: Tree, tmp_path: Path) -> None:
    """Killed from outside, or for want of memory; nobody waits for it for ever."""
    study = check_study(studied, "s.yaml")
    tasks = [Task(cell, study.recipe_of(cell), tmp_path) for cell in study.grid.cells()]
    results = compute(tasks, jobs=2)
    threading.Thread(target=_kill_children).start()
    with pytest.raises(StarlingError, match=r"cell lstm-adam-warmup0\.1-\w+-3-seed1: .* exit code -9") as caught:
        list(results)
    assert not isinstance(caught.value, DataError)
    assert not multiprocessing.active_children()


def _kill_children() -> None:
    while not (children := multiprocessing.active_children()):
        pass
    for child in children:
        child.kill()


def test_a_result_that_cannot_be_read_is_named(studied: Tree, tmp_path: Path) -> None:
    """It was changed by somebody; to remove it is enough."""
    study = check_study(studied, "s.yaml")
    (cell, *_) = study.grid.cells()
    folder = ResultFolder(tmp_path / "cells")
    assert folder.read(cell, "") is None
    (tmp_path / "cells").mkdir()
    (tmp_path / "cells" / f"{cell.name}.json").write_text("{")
    with pytest.raises(DataError, match=rf"{cell.name}\.json: not the result of a cell .*remove it"):
        folder.read(cell, "")


def test_a_folder_that_cannot_be_written_is_named(studied: Tree, tmp_path: Path) -> None:
    """Before anything is computed."""
    (tmp_path / "exp").write_text("in the way")
    with pytest.raises(ConfigError, match="cannot be written"):
        run(studied)
