"""Error rates that `base: small` reaches on four real corpora, and that other settings would reach.

    python -m benchmarks.small_corpora FOLDER NAME [KEY=VALUE ...]

Each cell is one run on one corpus, in which only the data and KEY=VALUE are set. When it ends, its result is written to
FOLDER/NAME-CORPUS-SEED.json, and it is skipped from then on, so that a search can be interrupted. Settings are chosen
by the error on the development sets; `--test` also scores the test sets. With `--after SECONDS` a run is ended early,
and only the curve of its beginning counts. Then the cells of the folder are shown as a table. The corpora lie in
`../shared/data`, or --data.
"""

import argparse
import csv
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Column, Table

from benchmarks.measuring import Seconds

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
USEFUL = 80.0
"""Character error rate in per cent below which an output is useful."""
_SPLITS = {"sets": {each: {"split": each} for each in ("train", "dev", "test")}}
_DIGITS = {
    "hold_out": {"folds": 20},
    "filter": {"min_seconds": 0.1},
    "strings": {"shortest": 3, "longest": 7, "copies": {"train": 6, "dev": 2, "test": 2}},
    "sampling_rate": 8000,
}
CORPORA: dict[str, tuple[Sequence[str], dict[str, Any], dict[str, Any]]] = {
    "children": (["speechocean762_children"], _SPLITS, {}),
    "adults": (["speechocean762_adult", "speechocean762_more"], _SPLITS, {}),
    "kathleen": (["kathleen"], _SPLITS, {}),
    "digits": (["fsdd"], {"sets": {each: {"official_split": each} for each in ("train", "test")}}, _DIGITS),
}
"""The tables of each corpus, its keys of data.corpus, and its keys of data."""


def write_recipe(folder: Path, data: Path, corpus: str) -> Path:
    """Write a recipe that sets only the data. Several tables become one, whose audio paths are absolute."""
    tables, of_corpus, of_data = CORPORA[corpus]
    rows = [row for name in tables for row in _rows(data, name)]
    table = folder / f"{corpus}.tsv"
    with table.open("w", newline="", encoding="utf-8") as file:
        columns = [name for name in rows[0] if all(name in row for row in rows)]
        writer = csv.DictWriter(file, columns, extrasaction="ignore", delimiter="\t")
        writer.writeheader()
        writer.writerows(rows)
    made = {"kind": "tsv", "path": table.name, "id": "utt_id", **of_corpus}
    recipe = folder / f"{corpus}.yaml"
    tree = {"base": "small", "name": corpus, "data": {"folder": f"data/{corpus}", "corpus": made, **of_data}}
    recipe.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
    return recipe


def _rows(data: Path, name: str) -> Iterator[dict[str, str]]:
    with (data / f"{name}.tsv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file, delimiter="\t"):
            yield {**row, "audio": str(data / row["audio"])}


def run(folder: Path, name: str, command: Sequence[str], after: Seconds | None = None) -> int:
    """Run a command of `starling` for at most `after` seconds; returns the exit code."""
    started = [sys.executable, "-m", "starling", *command]
    with (folder / f"{name}.log").open("a") as log, subprocess.Popen(started, stdout=log, stderr=log, cwd=folder) as it:
        try:
            return it.wait(after)
        except subprocess.TimeoutExpired:
            it.send_signal(signal.SIGINT)
            return it.wait()


def curve(experiment: Path) -> list[tuple[Seconds, float, float]]:
    """Seconds since the beginning, WER and CER of each model scored on the development set."""
    lines = (experiment / "log" / "events.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    scored = [each for each in events if each["kind"] == "validation"]
    return [(round(each["time"] - events[0]["time"]), round(each["wer"], 2), round(each["cer"], 2)) for each in scored]


def score(experiment: Path, way: str, name: str) -> dict[str, float]:
    """WER and CER of a scored set."""
    text = (experiment / "decode" / way / f"wer-summary-{name}.txt").read_text(encoding="utf-8")
    return {rate.lower(): float(re.findall(rf"%{rate} (\S+)", text)[0]) for rate in ("WER", "CER")}


def cell(folder: Path, corpus: str, given: argparse.Namespace) -> None:
    """Run a cell, unless it has ended earlier."""
    name = f"{given.name}-{corpus}-{given.seed}"
    done = folder / f"{name}.json"
    if done.exists():
        return
    recipe, experiment = write_recipe(folder, given.data, corpus), folder / "exp" / name
    settings = [f"name={name}", f"seed={given.seed}", "overwrite=true", "data.test=[]", *given.overrides]
    code = run(folder, name, ["train", recipe.name, *settings], given.after)
    found = {"corpus": corpus, "overrides": given.overrides, "seed": given.seed, "after": given.after}
    found |= {"exit_code": code, "curve": curve(experiment)}
    if given.after is None and code == 0:
        sets = ["dev", "test"] if given.test else ["dev"]
        run(folder, name, ["evaluate", f"exp/{name}", *(f"--set={each}" for each in sets)])
        found |= {f"{each}, {way or 'greedy'}": score(experiment, way, each) for each in sets for way in ("", "beam")}
    done.write_text(json.dumps(found) + "\n", encoding="utf-8")


def table(folder: Path) -> Table:
    """A table of all cells: when an output was first useful, and the character errors."""
    columns = ("greedy dev CER", "beam dev CER", "greedy test CER", "beam test CER", "beam test WER")
    made = Table(Column("cell", no_wrap=True), f"dev CER below {USEFUL:g} % after", "last dev CER", *columns)
    for path in sorted(folder.glob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        useful = next((f"{seconds} s" for seconds, _, cer in found["curve"] if cer < USEFUL), "never")
        last = f"{found['curve'][-1][2]:.1f}, {found['curve'][-1][0]} s" if found["curve"] else ""
        keys = [each.split() for each in columns]
        rates = [found.get(f"{name}, {way}", {}).get(rate.lower()) for way, name, rate in keys]
        made.add_row(path.stem, useful, last, *("" if each is None else f"{each:.1f}" for each in rates))
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("name")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--corpora", nargs="+", choices=CORPORA, default=list(CORPORA))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--after", type=float, help="end each run after this many seconds")
    parser.add_argument("--test", action="store_true", help="also score the test sets")
    parser.add_argument("--data", type=Path, default=DATA)
    given = parser.parse_args()
    given.data = given.data.resolve()
    given.folder.mkdir(parents=True, exist_ok=True)
    for corpus in given.corpora:
        cell(given.folder, corpus, given)
        sys.stderr.write(f"{given.name}-{corpus}-{given.seed} has ended\n")
    Console().print(table(given.folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
