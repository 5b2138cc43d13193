"""The finished cells of a study, kept in one file that is committed, so that an interrupted study goes on anywhere.

`python -m benchmarks.study_cells keep exp/speed-up docs/results/speed-up/cells.jsonl` writes the file, a line for each
cell; `restore` with the same arguments writes the cells back, and `starling compare` then computes only those that
are missing.
"""

import argparse
import json
from pathlib import Path
from typing import Any

DIGITS = 6
"""Significant digits that are kept of each number."""


def main() -> None:
    """Keep or restore the cells of a study."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=["keep", "restore"])
    parser.add_argument("experiment", type=Path, help="folder of the comparison")
    parser.add_argument("file", type=Path, help="file with a line for each cell")
    chosen = parser.parse_args()
    (keep if chosen.what == "keep" else restore)(chosen.experiment, chosen.file)


def keep(experiment: Path, file: Path) -> None:
    """Write all cells of a comparison to a file, in the order of their names."""
    lines = []
    for each in sorted((experiment / "cells").glob("*.json")):
        cell = rounded(json.loads(each.read_text(encoding="utf-8")))
        lines.append(json.dumps({"file": each.name, **cell}))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    print(f"{len(lines)} cells in {file}")


def restore(experiment: Path, file: Path) -> None:
    """Write the cells of a file into the folder of a comparison. Cells that are there already are kept."""
    folder = experiment / "cells"
    folder.mkdir(parents=True, exist_ok=True)
    for cell in read(file):
        target = folder / cell.pop("file")
        if not target.exists():
            target.write_text(json.dumps(cell, indent=1), encoding="utf-8")


def read(file: Path) -> list[dict[str, Any]]:
    """The cells of a file: each has the name of its `file`, its `cell` (`arm`, `learners`, `rate`, `seed`), scores, and
    the `curve` of its training loss: share of the budget, mini-batches, seconds and loss."""
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
