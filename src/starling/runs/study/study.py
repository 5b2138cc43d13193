"""A study from its recipe to its answer: what is missing is computed, what is there is kept."""

import signal
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

import yaml
from rich.console import Console

from starling.errors import StarlingError, Stopped
from starling.report.progress import Bars, Say, say_on
from starling.runs.experiment.folder import ExperimentFolder, describe_environment, unwritable
from starling.runs.setup import set_up
from starling.runs.study.config import Study
from starling.runs.study.grid import Cell, cells, digest, recipe_of
from starling.runs.study.report import write_report
from starling.runs.study.results import CellResult, ResultFolder
from starling.runs.study.workers import Task, compute


def run_study(study: Study, tell: Say, console: Console) -> None:
    """Compute the cells of a study that are not done yet, and write its answer.

    `exp/<name>` holds study.yaml, env.txt, ready/ (the models before training), cells/ (one JSON file for each), and
    table.md, findings.md, results.json and curves-*.svg. The table goes to `tell`, everything else to `console`.
    A study that was stopped goes on where it was; a cell whose recipe has changed is computed anew.
    """
    say = say_on(console)
    folder = ResultFolder(study.folder / "cells")
    recipes = {cell: recipe_of(study, cell) for cell in cells(study.grid)}
    digests = {cell: digest(recipe) for cell, recipe in recipes.items()}
    done = {result.cell: result for result in folder.read_all(digests.items())}
    missing = [cell for cell in recipes if cell not in done]
    _claim(study)
    say(f"{study.base.name}: {len(recipes)} cells, {len(done)} of them done already")
    if missing:
        with Bars(console) as bars:
            ready = _make_ready(study, missing, say, bars)
            tasks = [Task(cell, recipes[cell], ready[cell.setting.model]) for cell in missing]
            done |= _compute(study, tasks, folder, say, bars, len(done))
    for line in write_report(study, [done[cell] for cell in recipes]):
        tell(line)
    say(f"table.md, findings.md, results.json and curves are in {study.folder}")


def _claim(study: Study) -> None:
    """Make the study's folder and write into it what is studied, and on what."""
    try:
        study.folder.mkdir(parents=True, exist_ok=True)
        tree = study.base.model_dump(mode="json") | {"study": study.grid.model_dump(mode="json")}
        text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
        (study.folder / "study.yaml").write_text(text, encoding="utf-8")
        (study.folder / "env.txt").write_text(describe_environment(), encoding="utf-8")
    except OSError as error:
        raise unwritable(study.folder, error) from error


def _make_ready(study: Study, missing: Sequence[Cell], say: Say, bars: Bars) -> Mapping[str, Path]:
    """Prepare the data, and set up each model that is needed; its folder by its label."""
    folders = {}
    for model in dict.fromkeys(cell.setting.model for cell in missing):
        own = [cell for cell in missing if cell.setting.model == model]
        most = max(own, key=lambda cell: recipe_of(study, cell).learners)
        folders[model] = study.folder / "ready" / model
        folders[model].mkdir(parents=True, exist_ok=True)
        set_up(recipe_of(study, most), ExperimentFolder(folders[model]), say, bars)
    return folders


def _compute(
    study: Study, tasks: Sequence[Task], folder: ResultFolder, say: Say, bars: Bars, num_done: int
) -> dict[Cell, CellResult]:
    """Compute tasks, keep each result as soon as it is there, and say it."""
    results: dict[Cell, CellResult] = {}
    total = num_done + len(tasks)
    bars(study.base.name, num_done, total)
    try:
        with closing(compute(tasks, study.grid.jobs)) as coming:
            for result in coming:
                folder.write(result)
                results[result.cell] = result
                number = num_done + len(results)
                bars(study.base.name, number, total)
                say(f"{number}/{total} {result.cell.name}: {_outcome(result)}")
    except KeyboardInterrupt:
        raise Stopped(f"stopped; {_kept(num_done + len(results), total, folder)}", signal.SIGINT) from None
    except StarlingError as error:
        error.add_note(_kept(num_done + len(results), total, folder))
        raise
    return results


def _kept(number: int, total: int, folder: ResultFolder) -> str:
    return f"{number} of {total} cells are kept in {folder.path}, and the same command goes on from there"


def _outcome(result: CellResult) -> str:
    if result.diverged:
        return f"diverged after {result.num_gradients} mini-batches, {result.cpu_seconds:.1f} s"
    return f"WER {result.wer:.2f} %, staleness {result.mean_staleness:.1f}, {result.cpu_seconds:.1f} s"
