"""Starling's drop-in beside its peers, in the same loop: a table on the screen, and `bench-peers.json`.

Run as `make bench-peers`. Four workers, one thread each, train the same model with the same mini-batches and optimizer;
each column is a library under one strategy. The two columns that a bar compares are measured alternately by the same
four processes. SGP's AD-PSGD is left out, because it cannot be installed beside a current torch.
"""

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.measuring import Bar
from benchmarks.peer_worker import Case, Measured
from benchmarks.perceptron import LARGE, SMALL
from benchmarks.rivals import COLUMNS
from benchmarks.runs import LEAST_ROUNDS, read_weights, relative_distance
from benchmarks.starting import Program, run_side_by_side
from starling.launch.launcher import loopback_store
from starling.launch.rendezvous import loopback_interface

Seconds = float
WORLD = 4
SIZES = {"small": SMALL, "large": LARGE}
TITLES = {"small": "13 k parameters", "large": "4 M parameters"}
SPEEDS = {"equal": 0.0, "slow": 0.1}
"""Seconds that the last worker sleeps before each gradient."""
RIVALS = {
    "allreduce": "ddp",
    "dpsgd": "decent_dp",
    "dpsgd_pairs": "decent_dp",
    "local_sgd": "torchft_local_sgd",
    "diloco": "torchft_diloco",
}
"""The rival of each of our columns, which must keep up with it. Decent-DP's ring exchanges with one neighbour per step,
as our pairs do; our ring exchanges with both."""
LEAST_RATIO, LONGEST_START = 0.97, 2.7
STARTING = ("adpsgd", "ddp", "torchft_ddp", "decent_dp")
REPEATS = 3
"""Number of measurements of a column that is in no pair."""
LAUNCH_LIMIT: Seconds = 600.0


@dataclass(frozen=True)
class Cell:
    """One measurement of a column in a row."""

    ms_per_gradient: float
    """Milliseconds per gradient: until the last worker has made its steps if they are in step, otherwise the mean over
    the workers, or over the fast workers if one sleeps."""
    rounds_per_gradient: float
    distance: float
    """Distance between the models: sqrt(mean_l |w_l - mean|^2) / |mean|, with w_l the weights at which worker l
    computes its next gradient."""


Cells = dict[str, list[Cell]]
"""Measurements by column."""


def main() -> int:
    given = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that all is cleaned up
    bars: list[Bar] = []
    rows: dict[str, Cells] = {}
    starts: dict[str, list[Seconds]] = {}
    console = Console(width=200)
    with tempfile.TemporaryDirectory(prefix="starling-bench-") as name:
        folder = Path(name)
        for size in given.size:
            for speed in given.speeds:
                row = f"{TITLES[size]}, {speed if speed == 'equal' else 'one slow'}"
                begin = time.monotonic()
                rows[row] = measure_row(size, SPEEDS[speed], given, folder)
                bars += bars_of(row, rows[row])
                sys.stderr.write(f"{row}: {time.monotonic() - begin:.0f} s\n")
                write(given.output, bars, rows, starts)
        if "start_up" in given.only:
            starts = measure_starts(given.starts, folder)
            bars.append(bar_of_starts(starts))
            write(given.output, bars, rows, starts)
    console.print(table(rows))
    for bar in bars:
        console.print(
            f"{'holds ' if bar.holds else 'MISSED'} {bar.name}: {bar.ratio:.3g}, bar {bar.bar:g}; {bar.detail}"
        )
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse what to measure, how often, and where to write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("bench-peers.json"))
    names = [*COLUMNS, "start_up"]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="COLUMN", help=", ".join(names))
    parser.add_argument("--size", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--speeds", nargs="+", choices=SPEEDS, default=list(SPEEDS))
    parser.add_argument("--pairs", type=int, default=11, help="alternated measurements of each bar's two columns")
    parser.add_argument("--seconds", type=float, default=2.0, help="about how long each measurement takes")
    parser.add_argument("--starts", type=int, default=5, help="starts of each library that are timed")
    parser.add_argument(
        "--options", type=json.loads, default={}, help='a column\'s own, as {"ddp": {"bucket_cap_mb": 4}}'
    )
    return parser.parse_args(arguments)


def measure_row(size: str, slow_seconds: Seconds, given: argparse.Namespace, folder: Path) -> Cells:
    """Measure all columns that were asked for; the columns of a bar alternate with their rivals."""

    def case(column: str) -> Case:
        return Case(column, SIZES[size], slow_seconds, given.seconds, given.options.get(column, {}))

    columns = [column for column in COLUMNS if column in given.only]
    found: Cells = {}
    for rival in dict.fromkeys(RIVALS.values()):
        ours = [column for column in columns if RIVALS.get(column) == rival]
        if ours and rival in columns:
            found |= measure([*ours, rival], given.pairs, case, folder)
    for column in columns:
        if column not in found:
            found |= measure([column], REPEATS, case, folder)
    return {column: found[column] for column in columns}


def measure(columns: Sequence[str], repeats: int, case: Any, folder: Path) -> Cells:
    """Measure `columns` alternately in the same processes; their order changes from round to round."""
    order = [column for number in range(repeats) for column in (columns if number % 2 == 0 else columns[::-1])]
    found: Cells = {column: [] for column in columns}
    cells, _ = launched([case(column) for column in order], folder)
    for column, cell in zip(order, cells, strict=True):
        found[column].append(cell)
    for column in columns:
        sys.stderr.write(f"  {column}: {in_words(found[column])}\n")
    return found


def launched(cases: Sequence[Case], folder: Path, world: int = WORLD) -> tuple[list[Cell], Seconds]:
    """Let `world` processes run `cases` one after another; returns their measurements, and the time from their launch
    to the last one's first step."""
    with tempfile.TemporaryDirectory(dir=folder) as name, loopback_store() as port:
        own = Path(name)
        program = [sys.executable, "-m", "benchmarks.peer_worker", json.dumps([asdict(each) for each in cases]), name]
        place = {
            "WORLD_SIZE": world,
            "LOCAL_WORLD_SIZE": world,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "GLOO_SOCKET_IFNAME": loopback_interface(),
            "PYTHONDONTWRITEBYTECODE": "",  # or those that no installation has compiled are compiled at every start
        }
        programs = [Program(program, {**place, "RANK": rank, "LOCAL_RANK": rank}) for rank in range(world)]
        begin = time.monotonic()
        run_side_by_side(programs, own, LAUNCH_LIMIT)
        by_worker = [
            [Measured(**values) for values in json.loads((own / f"measured-{rank}.json").read_text())]
            for rank in range(world)
        ]
        first_step = max(measured[0].first_step_at for measured in by_worker) - begin
        cells = []
        for number, case in enumerate(cases):
            if not case.seconds:
                continue
            measured = [each[number] for each in by_worker]
            counted = measured[: world - 1] if case.slow_seconds else measured
            by_step = [1000.0 * each.seconds / each.steps for each in measured]
            models = [read_weights(own / f"{number}-{rank}.bin") for rank in range(world)]
            cells.append(
                Cell(
                    max(by_step) if COLUMNS[case.column].in_step else fmean(by_step[: len(counted)]),
                    fmean(each.rounds / each.steps for each in counted),
                    relative_distance(models),
                )
            )
        return cells, first_step


def bars_of(row: str, found: Cells) -> list[Bar]:
    """The bars that a row's columns are held to."""
    bars = []
    for column, rival in RIVALS.items():
        if column in found and rival in found:
            ratios = speed_ratios(found[column], found[rival])
            low = lower_limit(ratios)
            name = f"{row}: {COLUMNS[column].title} / {COLUMNS[rival].title}, speed, lower 95 % limit"
            detail = (
                f"median {median(ratios):.3f} of {len(ratios)} pairs; "
                f"{in_words(found[column])} and {in_words(found[rival])}"
            )
            bars.append(Bar.at_least(name, low, LEAST_RATIO, detail))
    if "adpsgd" in found:
        rounds = median(cell.rounds_per_gradient for cell in found["adpsgd"])
        detail = in_words(found["adpsgd"])
        bars.append(Bar.at_least(f"{row}: adpsgd, rounds per gradient", rounds, LEAST_ROUNDS, detail))
        others = {
            column: milliseconds(cells)
            for column, cells in found.items()
            if column != "adpsgd"
            and COLUMNS[column].averages
            and median(cell.rounds_per_gradient for cell in cells) >= LEAST_ROUNDS
        }
        if others:
            fastest = min(others, key=others.__getitem__)
            ratio = others[fastest] / milliseconds(found["adpsgd"])
            name = f"{row}: adpsgd / the fastest other with {LEAST_ROUNDS} rounds per gradient, speed"
            detail = f"{COLUMNS[fastest].title}: {in_words(found[fastest])}; adpsgd: {in_words(found['adpsgd'])}"
            bars.append(Bar(name, ratio, 1.0, ratio >= 1.0 and rounds >= LEAST_ROUNDS, detail))
    return bars


def speed_ratios(ours: Sequence[Cell], theirs: Sequence[Cell]) -> list[float]:
    """Factors by which ours was faster, pair by pair."""
    return [their.ms_per_gradient / our.ms_per_gradient for our, their in zip(ours, theirs, strict=True)]


def lower_limit(ratios: Sequence[float], resamples: int = 10_000) -> float:
    """The lower end of the median's 95 % interval (percentile bootstrap over the pairs)."""
    generator = random.Random(1)
    medians = sorted(median(generator.choices(ratios, k=len(ratios))) for _ in range(resamples))
    return medians[int(0.025 * resamples)]


def milliseconds(cells: Sequence[Cell]) -> float:
    return median(cell.ms_per_gradient for cell in cells)


def in_words(cells: Sequence[Cell]) -> str:
    """A description of a column's medians: ms per gradient, rounds per gradient, distance between the models."""
    rounds, distance = median(cell.rounds_per_gradient for cell in cells), median(cell.distance for cell in cells)
    return f"{milliseconds(cells):.3g} ms ({rounds:.2g} rounds, distance {distance:.1e})"


def measure_starts(repeats: int, folder: Path) -> dict[str, list[Seconds]]:
    """Seconds from launch to the first step of the last worker, by column, measured in turn."""
    found: dict[str, list[Seconds]] = {column: [] for column in STARTING}
    for column in STARTING:
        launched([Case(column, SMALL, seconds=0.0)], folder)  # what it reads is then in memory, and compiled
    for number in range(repeats):
        for column in STARTING if number % 2 == 0 else STARTING[::-1]:
            _, seconds = launched([Case(column, SMALL, seconds=0.0)], folder)
            found[column].append(seconds)
    return found


def bar_of_starts(starts: Mapping[str, Sequence[Seconds]]) -> Bar:
    """The bar of Starling's start."""
    seconds = {column: median(values) for column, values in starts.items()}
    detail = ", ".join(f"{COLUMNS[column].title} {value:.2f} s" for column, value in seconds.items())
    return Bar.at_most("start of four workers to the first step, seconds", seconds["adpsgd"], LONGEST_START, detail)


def write(
    output: Path, bars: Sequence[Bar], rows: Mapping[str, Cells], starts: Mapping[str, Sequence[Seconds]]
) -> None:
    """Write everything measured so far."""
    figures = {
        row: {column: [asdict(cell) for cell in cells] for column, cells in found.items()}
        for row, found in rows.items()
    }
    text = {"bars": [bar.as_json() for bar in bars], "figures": figures, "seconds_to_first_step": starts}
    output.write_text(json.dumps(text, indent=1) + "\n")


def table(rows: Mapping[str, Cells]) -> Table:
    """A table with a line for each column: ms per gradient, rounds per gradient and the distance between models in
    every row."""
    made = Table(
        "", *rows, title=f"ms per gradient (rounds per gradient, distance between models), torch {torch.__version__}"
    )
    for column in COLUMNS:
        if any(column in found for found in rows.values()):
            cells = [in_words(found[column]) if column in found else "" for found in rows.values()]
            made.add_row(COLUMNS[column].title, *cells)
    return made


if __name__ == "__main__":
    sys.exit(main())
