"""Goodput in simulated storms of 4, 32 and 256 learners, and the final loss with and without a storm.

`python -m benchmarks.storms` computes the cells that docs/results/storms.json lacks, with `--again` all chosen cells.
"""

import argparse
import io
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console

from starling.comparing.table import Estimate, estimate
from starling.experiment.following import read_record
from starling.experiment.record import segments
from starling.experiment.simulate import simulate_recipe, storm_recipe
from starling.experiment.task import load_recipe

RECIPE = Path(__file__).with_name("storm.yaml")
RESULTS = Path(__file__).parents[1] / "docs" / "results" / "storms.json"
STRATEGIES = {
    "allreduce": "allreduce",
    "diloco": "{name: diloco, every: 20}",
    "diloco-10": "{name: diloco, every: 10}",
    "decoupled": "{name: decoupled-diloco, every: 64, fragments: 2, overlap: 30, quorum: 2}",
    "decoupled-16": "{name: decoupled-diloco, every: 16, fragments: 2, overlap: 6, quorum: 2}",
    "decoupled-12": "{name: decoupled-diloco, every: 12, fragments: 1, overlap: 11}",
    "decoupled-4": "{name: decoupled-diloco, every: 4, fragments: 1, overlap: 3, quorum: 2, momentum: 0.6}",
    "adpsgd": "{name: adpsgd, max_lag: 64}",
}
"""The strategies and their options. Real runs have the same, except `decoupled`."""
PATIENCE = dict.fromkeys(("diloco-10", "decoupled-12", "decoupled-4"), 1.5)
"""Seconds after which the others give up a paused learner; it is started again when its pause is over."""
SEEDS = (1, 2, 3)


@dataclass(frozen=True)
class Storm:
    """The size of a storm, and the model that makes it cheap enough to simulate."""

    learners: int
    faults_per_hour: float
    minutes: float
    hidden: str


SIZES = {
    "4": Storm(4, 100.0, 10.0, "[64, 64]"),
    "32": Storm(32, 800.0, 3.0, "[64, 64]"),
    "256": Storm(256, 6400.0, 1.0, "[8, 8]"),
    "256, 100 faults per hour": Storm(256, 100.0, 1.0, "[8, 8]"),
}
SETTINGS = ("seconds=0", "cluster.compute.seconds=0.61", "cluster.watch.start=2.2")
"""Seconds of a gradient and of a start, as in the real run."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Compute the chosen cells that are missing, seed by seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--again", action="store_true", help="also compute cells that the file has")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--tables", action="store_true", help="print the tables of docs/results/storms.md and end")
    given = parser.parse_args(arguments)
    if given.tables:
        print(tables(json.loads(given.output.read_text(encoding="utf-8"))))
        return 0
    done: set[str] = set()

    def settle(name: str, compute: Any) -> dict[str, float]:
        cells: dict[str, dict[str, float]] = json.loads(given.output.read_text()) if given.output.exists() else {}
        if name not in cells or (given.again and name not in done):
            cells[name] = compute()
            given.output.write_text(json.dumps(dict(sorted(cells.items())), indent=1) + "\n", encoding="utf-8")
            print(name, cells[name], flush=True)
        done.add(name)
        return cells[name]

    for seed, size, strategy in product(given.seeds, given.sizes, given.strategies):
        settle(f"{strategy}, {size}, seed {seed}", lambda s=size, m=strategy, n=seed: storm_cell(SIZES[s], m, n))
        if size == "4":
            first = settle(f"{strategy}, 4, seed 1", lambda m=strategy: storm_cell(SIZES["4"], m, 1))
            num_batches = round(first["mini_batches"])
            settle(f"{strategy}, calm, seed {seed}", lambda m=strategy, n=seed, b=num_batches: calm_cell(m, n, b))
    return 0


def storm_cell(storm: Storm, strategy: str, seed: int) -> dict[str, float]:
    """Simulate a storm. Return the goodput, the shares of the lost time, the number of mini-batches and the loss."""
    rates = {"faults_per_hour": storm.faults_per_hour}
    with tempfile.TemporaryDirectory(prefix="starling-bench-") as folder:
        settings, told, console = settings_of(storm, strategy, seed, folder), list[str](), Console(file=io.StringIO())
        scale = {"minutes": storm.minutes, "slow": 1.0, "seed": seed}
        storm_recipe(RECIPE, settings, told.append, console, is_real=False, settings=rates, **scale)  # type: ignore[arg-type]
        experiment = Path(folder) / "storm-virtual"
        lines = (experiment / "log" / "events.jsonl").read_text(encoding="utf-8").splitlines()
        seen = experiment / "seen"
        num_batches = sum(read_record(seen, segments(seen)[0].name).num_computed.values())
    if num_batches == 0:  # a run without work reports no goodput
        return {"useful": 0.0, "mini_batches": 0, "loss": loss_in(told)}
    found = next(each for each in map(json.loads, lines) if each["kind"] == "goodput")
    parts = ("useful", "lost_work", "waiting_for_peers", "entering")
    shares = {part: round(found[part] / found["machines"], 4) for part in parts}
    return {**shares, "mini_batches": num_batches, "loss": loss_in(told)}


def calm_cell(strategy: str, seed: int, num_batches: int) -> dict[str, float]:
    """Simulate four learners without faults for `num_batches` mini-batches. Return the final loss on new points."""
    with tempfile.TemporaryDirectory(prefix="starling-bench-") as folder:
        settings, told = settings_of(SIZES["4"], strategy, seed, folder), list[str]()
        settings.append(f"budget={{epochs: null, minutes: null, steps: {num_batches}}}")
        chosen = load_recipe(RECIPE, settings, command="starling simulate")
        simulate_recipe(*chosen, told.append, Console(file=io.StringIO()))
    return {"mini_batches": num_batches, "loss": loss_in(told)}


def tables(cells: Mapping[str, Mapping[str, float]]) -> str:
    """The tables of docs/results/storms.md: the goodput, and for four learners the causes of lost time and the final
    losses. Means over several seeds have a 95 % interval by Student's t."""

    def over_seeds(strategy: str, size: str, what: str) -> Estimate | None:
        found = [cells.get(f"{strategy}, {size}, seed {seed}") for seed in SEEDS]
        values = [cell[what] for cell in found if cell]
        return estimate(values) if values else None

    def text(found: Estimate | None, scale: float = 1.0, digits: int = 1) -> str:
        if found is None:
            return "not run"
        half = "" if found.half is None else f" ± {scale * found.half:.{digits}f}"
        return f"{scale * found.mean:.{digits}f}{half}"

    titles = [
        f"{each.learners} learners, {each.faults_per_hour:g} faults/h, {each.minutes:g} min" for each in SIZES.values()
    ]

    def row(*columns: str) -> str:
        return f"| {' | '.join(columns)} |"

    lines = [row("strategy", *titles), "|---" * (1 + len(SIZES)) + "|"]
    for strategy in STRATEGIES:
        goodputs = [text(over_seeds(strategy, size, "useful"), 100) for size in SIZES]
        lines += [row(named(strategy), *goodputs)]
    heads = ("strategy", "lost work", "waiting for peers", "starting", "loss, storm of seed 1", "loss without faults")
    lines += ["", row(*heads), "|---" * len(heads) + "|"]
    for strategy in STRATEGIES:
        first = cells.get(f"{strategy}, 4, seed 1")
        parts = [text(over_seeds(strategy, "4", part), 100) for part in ("lost_work", "waiting_for_peers", "entering")]
        stormy = f"{first['loss']:.3f}" if first else "not run"
        calm = text(over_seeds(strategy, "calm", "loss"), 1.0, 3)
        lines.append(row(named(strategy), *parts, stormy, calm))
    return "\n".join(lines)


def named(strategy: str) -> str:
    """The options of a strategy, and when a paused learner is given up."""
    patience = f", given up after {PATIENCE[strategy]:g} s" if strategy in PATIENCE else ""
    return f"`{STRATEGIES[strategy]}`{patience}"


def settings_of(storm: Storm, strategy: str, seed: int, folder: str) -> list[str]:
    """The keys of the recipe that differ between cells."""
    keys = [f"learners={storm.learners}", f"strategy={STRATEGIES[strategy]}", f"hidden={storm.hidden}", f"seed={seed}"]
    patience = [f"cluster.watch.silence={PATIENCE[strategy]}"] if strategy in PATIENCE else []
    return [*SETTINGS, *keys, *patience, f"exp={folder}", "name=storm"]


def loss_in(told: Sequence[str]) -> float:
    """The loss on new points that a run told."""
    return next(float(line.split(": ")[1]) for line in told if line.startswith("loss on new points: "))


if __name__ == "__main__":
    sys.exit(main())
