"""Parameter servers: what a slow worker costs the others under each rule, and how many gradients servers accept."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measuring import Bar
from benchmarks.runs import Outcome, Run, median_ratio, total_rate
from benchmarks.starting import alternately, launched

ROUNDS, WORKERS, SLOWER = 3, 4, 10.0
NUM_PARAMETERS, GRADIENT_SECONDS, SECONDS = 13_000, 0.03, 3.0
RULES: dict[str, dict[str, Any]] = {
    "asynchronous": {},
    "summed": {"update": "summed", "sum": WORKERS},
    "hybrid": {"update": "hybrid"},
}
SIZES = {"0.25 M": 1 << 18, "1 M": 1 << 20, "4 M": 1 << 22, "16 M": 1 << 24}
PUSHING, PUSHES_OF_A_SIZE = 2, {"0.25 M": 600, "1 M": 300, "4 M": 100, "16 M": 30}
SECOND_SHARD = 0.5
"""Bar for a second server: it may not halve the gradients that are accepted, even though all processes share one
memory."""


def measure(folder: Path) -> list[Bar]:
    """Workers on emulated devices beside one that is ten times slower, then workers that only push and pull."""
    return [*beside_a_slow_worker(folder), *pushes(folder)]


def beside_a_slow_worker(folder: Path) -> list[Bar]:
    """The three fast workers' throughput, as a share of their throughput when all four are fast."""

    def run(options: dict[str, Any], slower: float) -> Run:
        return Run(
            "parameter-server",
            WORKERS,
            NUM_PARAMETERS,
            GRADIENT_SECONDS,
            seconds=SECONDS,
            last_is_slower=slower,
            options=options,
        )

    found = alternately(
        {f"{rule}, {pace}": run(RULES[rule], SLOWER if pace == "slow" else 1.0) for rule in RULES for pace in PACES},
        ROUNDS,
        lambda runs: launched(runs, folder),
    )
    return [_beside(rule, *(found[f"{rule}, {pace}"] for pace in PACES)) for rule in RULES]


PACES = ("slow", "even")


def _beside(rule: str, slow: Sequence[Sequence[Outcome]], even: Sequence[Sequence[Outcome]]) -> Bar:
    rates, before = ([total_rate(outcomes[:-1]) for outcomes in each] for each in (slow, even))
    make = Bar.at_most if rule == "hybrid" else Bar.at_least
    return make(
        f"one of four workers 10x slower, {rule}: the fast three / the same beside a fast one, throughput",
        median_ratio(rates, before),
        0.15 if rule == "hybrid" else 0.95,
        f"{median(rates):.1f} and {median(before):.1f} gradients/s; three devices alone make "
        f"{(WORKERS - 1) / GRADIENT_SECONDS:.0f}",
    )


def pushes(folder: Path) -> list[Bar]:
    """Gradients that one server accepts and two servers accept, from workers that compute next to nothing."""
    bars = []
    for size, num_parameters in SIZES.items():
        found = alternately(
            {
                str(shards): Run(
                    "parameter-server",
                    PUSHING + shards,
                    num_parameters,
                    steps=PUSHES_OF_A_SIZE[size],
                    options={"shards": shards, "servers": "own"},
                )
                for shards in (1, 2)
            },
            ROUNDS,
            lambda runs: launched(runs, folder),
        )
        one, two = ([total_rate(outcomes[:PUSHING]) for outcomes in found[shards]] for shards in ("1", "2"))
        bars.append(
            Bar.at_least(
                f"{size} parameters, two workers that only push and pull: two servers / one, pushes per second",
                median_ratio(two, one),
                SECOND_SHARD,
                f"{median(one):.0f} pushes/s to one server, {median(two):.0f} to two",
            )
        )
    return bars
