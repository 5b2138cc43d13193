"""A study from its recipe to its answer: missing cells are computed, finished ones are kept."""

import json
import signal
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import yaml
from rich.console import Console

from starling.errors import StarlingError, Stopped
from starling.report.progress import Bars, Say, say_on
from starling.runs.experiment.claim import describe_environment, unwritable
from starling.runs.experiment.folder import ExperimentFolder
from starling.runs.setup import set_up
from starling.runs.study.config import Cell, Study, result_digest
from starling.runs.study.picture import draw_curves
from starling.runs.study.results import CellResult, Outcomes, ResultFolder
from starling.runs.study.table import details, error_rates, legend, rows_of
from starling.runs.study.workers import Task, compute


def run_study(study: Study, tell: Say, console: Console) -> None:
    """Compute the cells of a study that are missing, and write its answer.

    `exp/<name>` holds study.yaml, env.txt, ready/ (the models before training), cells/ (one JSON file for each), and
    table.md, results.json and curves-*.svg. The table goes to `tell`, everything else to `console`. A stopped study
    continues where it was; a cell whose recipe has changed is computed again.
    """
    say = say_on(console)
    folder = ResultFolder(study.folder / "cells")
    recipes = {cell: study.recipe_of(cell) for cell in study.grid.cells()}
    found = {cell: folder.read(cell, result_digest(recipe)) for cell, recipe in recipes.items()}
    done = {cell: result for cell, result in found.items() if result is not None}
    missing = [cell for cell in recipes if cell not in done]
    _claim(study)
    say(f"{study.base.name}: {len(recipes)} cells, {len(done)} of them done already")
    if missing:
        with Bars(console) as bars:
            ready = _make_ready(study, missing, say, bars)
            tasks = [Task(cell, recipes[cell], ready[cell.model]) for cell in missing]
            done |= _compute(study, tasks, folder, say, bars, len(done))
    for line in write_report(study, [done[cell] for cell in recipes]):
        tell(line)
    say(f"table.md, results.json and curves are in {study.folder}")


def write_report(study: Study, results: Sequence[CellResult]) -> list[str]:
    """Write table.md, results.json and curves-*.svg into the study's folder; the lines of the first table.

    Raises ConfigError for a folder that cannot be written.
    """
    outcomes, folder, name = Outcomes(results), study.folder, study.base.name
    rows = rows_of(outcomes)
    rates = error_rates(outcomes, rows)
    content = {
        "study": study.grid.model_dump(mode="json"),
        "rows": [asdict(row) for row in rows],
        "cells": [result.model_dump(mode="json") for result in results],
    }
    try:
        pictures = [f"![Training loss]({path.name})" for path in draw_curves(outcomes, folder)]
        page = [f"# Word error rates: {name}", "", *legend(outcomes), "", *rates, "", *pictures]
        page += ["", "## Everything measured", "", *details(rows)]
        (folder / "table.md").write_text("\n".join(page) + "\n", encoding="utf-8")
        (folder / "results.json").write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise unwritable(folder, error) from error
    return rates


def _claim(study: Study) -> None:
    """Make the study's folder, with its recipe and a description of this machine."""
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
    for model in dict.fromkeys(cell.model for cell in missing):
        recipes = [study.recipe_of(cell) for cell in missing if cell.model == model]
        folders[model] = study.folder / "ready" / model
        folders[model].mkdir(parents=True, exist_ok=True)
        set_up(max(recipes, key=lambda recipe: recipe.learners), ExperimentFolder(folders[model]), say, bars)
    return folders


def _compute(
    study: Study, tasks: Sequence[Task], folder: ResultFolder, say: Say, bars: Bars, num_done: int
) -> dict[Cell, CellResult]:
    """Compute tasks; keep and report each result as soon as it is there."""
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
    return f"{number} of {total} cells are kept in {folder.path}; run the same command to continue"


def _outcome(result: CellResult) -> str:
    if result.diverged:
        return f"diverged after {result.num_gradients} mini-batches, {result.cpu_seconds:.1f} s"
    return f"WER {result.wer:.2f} %, staleness {result.mean_staleness:.1f}, {result.cpu_seconds:.1f} s"
