"""The answer of a study: a table, words, curves, and everything in one JSON file."""

import json
from collections.abc import Sequence

from starling.runs.experiment.folder import unwritable
from starling.runs.study.config import Study
from starling.runs.study.findings import findings
from starling.runs.study.outcomes import Outcomes
from starling.runs.study.picture import draw_curves
from starling.runs.study.results import CellResult
from starling.runs.study.table import details, error_rates, legend


def write_report(study: Study, results: Sequence[CellResult]) -> list[str]:
    """Write table.md, findings.md, results.json and curves-*.svg into the study's folder; the table's lines.

    Raises ConfigError for a folder that cannot be written.
    """
    outcomes, folder, name = Outcomes(results), study.folder, study.base.name
    rates = error_rates(outcomes)
    words = max(result.words for result in results)
    table = [f"# Word error rates: {name}", "", *legend(outcomes, words), "", *rates]
    table += ["", "## Everything measured", "", *details(outcomes)]
    content = {
        "study": study.grid.model_dump(mode="json"),
        "cells": [result.model_dump(mode="json") for result in results],
    }
    try:
        (folder / "table.md").write_text(_text(table), encoding="utf-8")
        (folder / "findings.md").write_text(_text(findings(outcomes, name)), encoding="utf-8")
        (folder / "results.json").write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        draw_curves(outcomes, folder)
    except OSError as error:
        raise unwritable(folder, error) from error
    return rates


def _text(lines: Sequence[str]) -> str:
    return "\n".join(lines) + "\n"
