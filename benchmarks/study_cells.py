"""The finished cells of a study, kept in one file that is committed, so that an interrupted study goes on anywhere.

`python -m benchmarks.study_cells keep exp/speed-up docs/results/speed-up/cells.jsonl` writes the file, a line for each
cell; `restore` with the same arguments writes the cells back, and `starling compare` then computes only those that
are missing. `rows` keeps the rows of the comparison's table instead. `benchmarks.study_tables` makes the tables of the
pages from such files.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from starling.comparing.grid import CellResult

DIGITS = 4
"""Significant digits that are kept of each number."""


def main() -> None:
    """Keep or restore the cells of a study."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=["keep", "restore", "rows"])
    parser.add_argument("experiment", type=Path, help="folder of the comparison")
    parser.add_argument("file", type=Path, help="file with a line for each cell")
    chosen = parser.parse_args()
    {"keep": keep, "restore": restore, "rows": keep_rows}[chosen.what](chosen.experiment, chosen.file)


def keep(experiment: Path, file: Path) -> None:
    """Write the cells of a comparison to a file, in the order of their names: all of them, or once the comparison is
    complete, those on which its table rests."""
    files, results = sorted((experiment / "cells").glob("*.json")), experiment / "results.json"
    names = {each.stem for each in files}
    if results.exists() and results.stat().st_mtime >= max(each.stat().st_mtime for each in files):
        cells = json.loads(results.read_text(encoding="utf-8"))["cells"]  # without those of earlier grids
        names = {CellResult.model_validate(each).cell.name for each in cells}
    _write([json.loads(each.read_text(encoding="utf-8")) for each in files if each.stem in names], file)


def keep_rows(experiment: Path, file: Path) -> None:
    """Write the rows of a comparison's table to a file."""
    _write(json.loads((experiment / "results.json").read_text(encoding="utf-8"))["rows"], file)


def _write(found: Sequence[dict[str, Any]], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{json.dumps(rounded(each))}\n" for each in found), encoding="utf-8")
    print(f"{len(found)} lines in {file}")


def restore(experiment: Path, file: Path) -> None:
    """Write the cells of a file into the folder of a comparison. Cells that are there already are kept."""
    folder = experiment / "cells"
    folder.mkdir(parents=True, exist_ok=True)
    for result in read(file):
        if not (folder / f"{result.cell.name}.json").exists():
            result.write(folder)


def read(file: Path) -> list[CellResult]:
    """The cells of a file."""
    return [CellResult.model_validate_json(line) for line in file.read_text(encoding="utf-8").splitlines()]


def read_rows(file: Path) -> list[dict[str, Any]]:
    """The rows of a table, with the columns of docs/comparing.md."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def rounded(value: Any) -> Any:
    """A copy of a JSON value in which floats have `DIGITS` significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return {key: rounded(each) for key, each in value.items()} if isinstance(value, dict) else value


if __name__ == "__main__":
    main()
