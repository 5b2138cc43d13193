"""Consensus distance, and its cost, by topology and number of learners, on the problem of `convergence_rate`.

`python -m benchmarks.topologies FOLDER` writes topologies.md and topologies.json.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.convergence_rate import VARIANCE, measure, step_size, text_of
from starling.comparing.table import Estimate, estimate
from starling.strategies import STRATEGIES
from starling.topology import PATTERNS, distance_of_noise, spectral_gap

STEPS, LEARNERS, SEEDS = 1024, (4, 8, 16, 32, 64), (1, 2, 3)
ARMS = [(name, pattern) for name in ("dpsgd", "adpsgd") for pattern in ("ring", "random", "pairs", "exponential")]


@dataclass(frozen=True)
class Row:
    """Results of one arm with one number of learners, over its seeds."""

    strategy: str
    pattern: str
    learners: int
    cost: Estimate
    """Increase, in per cent, of the mean squared gradient norm over that of `allreduce` with the same seed."""
    distance: Estimate
    """Mean consensus distance of a run, in units of a^2 sigma^2, with a the step size."""
    of_noise: float
    """Mean of `distance_of_noise` over a learner's steps, in the same units."""


def predicted(pattern: str, learners: int, seed: int) -> float:
    """The mean over the steps of a run of the distance that noise alone would cause after each step."""
    steps, topology = STEPS // learners, PATTERNS[pattern](learners, seed)
    return sum(distance_of_noise(topology, rounds) for rounds in range(steps)) / steps


def rows(learners: Sequence[int], seeds: Sequence[int]) -> list[Row]:
    """The results of every arm with these numbers of learners, beside `allreduce` with as many."""
    found = []
    for count in learners:
        unit = VARIANCE * step_size(STEPS, count) ** 2
        base = {seed: measure(STEPS, count, seed, STRATEGIES["allreduce"], None) for seed in seeds}
        for strategy, pattern in ARMS:
            runs = [measure(STEPS, count, seed, STRATEGIES[strategy], pattern) for seed in seeds]
            costs = [100.0 * (run.gradients / base[run.seed].gradients - 1.0) for run in runs]
            distances = estimate([run.distance / unit for run in runs])
            found.append(Row(strategy, pattern, count, estimate(costs), distances, predicted(pattern, count, seeds[0])))
            print(found[-1], file=sys.stderr, flush=True)
    return found


def table(found: Sequence[Row]) -> list[str]:
    """A Markdown table, with the spectral gap of patterns that are the same in every round."""
    titles = ["learners", "pattern", "spectral gap", "distance of noise"]
    titles += [f"{name}: {what}" for name in ("dpsgd", "adpsgd") for what in ("distance", "cost, %")]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    by_key = {(row.learners, row.pattern, row.strategy): row for row in found}
    for learners, pattern in dict.fromkeys((row.learners, row.pattern) for row in found):
        topology = PATTERNS[pattern](learners, 1)
        gap = f"{spectral_gap(topology.matrix(0)):.4f}" if topology.period == 1 else "—"
        own = [by_key[learners, pattern, strategy] for strategy in ("dpsgd", "adpsgd")]
        cells = [text for row in own for text in (text_of(row.distance, 2), text_of(row.cost, 1, "+"))]
        lines.append(f"| {learners} | {pattern} | {gap} | {own[0].of_noise:.2f} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Measure everything, or what the arguments select."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--learners", type=int, nargs="+", default=LEARNERS)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    chosen.folder.mkdir(parents=True, exist_ok=True)
    began = time.process_time()
    found = rows(chosen.learners, chosen.seeds)
    lines = [*table(found), "", f"{time.process_time() - began:.0f} s of CPU"]
    (chosen.folder / "topologies.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    content = [{**vars(row), "cost": vars(row.cost), "distance": vars(row.distance)} for row in found]
    (chosen.folder / "topologies.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
