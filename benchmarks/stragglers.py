"""Four learners on emulated devices, one of them ten times slower: what that costs the other three."""

from pathlib import Path
from typing import Any

from benchmarks.measuring import Bar
from benchmarks.runs import Run, median_ratio
from benchmarks.starting import alternately, launched

ROUNDS, WORLD, SLOWER = 3, 4, 10.0
NUM_PARAMETERS, GRADIENT_SECONDS = 13_000, 0.03


def measure(folder: Path) -> list[Bar]:
    """What the fast learners keep of a lone learner's throughput: the slowest of them under `adpsgd`, the fastest under
    `allreduce`."""
    device: dict[str, Any] = {"num_parameters": NUM_PARAMETERS, "gradient_seconds": GRADIENT_SECONDS}
    found = alternately(
        {
            "solo": Run("allreduce", world=1, seconds=3.0, **device),
            "adpsgd": Run("adpsgd", WORLD, seconds=3.0, last_is_slower=SLOWER, **device),
            "allreduce": Run("allreduce", WORLD, seconds=3.0, last_is_slower=SLOWER, **device),
        },
        ROUNDS,
        lambda runs: launched(runs, folder),
    )
    solo = [outcomes[0].rate for outcomes in found["solo"]]
    fast = {
        strategy: [[outcome.rate for outcome in outcomes[:-1]] for outcomes in found[strategy]]
        for strategy in ("adpsgd", "allreduce")
    }
    slowest = [min(rates) for rates in fast["adpsgd"]]
    fastest = [max(rates) for rates in fast["allreduce"]]
    solo_text = f"of {sorted(solo)[ROUNDS // 2]:.1f} gradients/s alone"
    return [
        Bar.at_least(
            "one of four learners 10x slower, adpsgd: the fast ones / alone, throughput",
            median_ratio(slowest, solo),
            0.95,
            f"{sorted(slowest)[ROUNDS // 2]:.1f} {solo_text}",
        ),
        Bar.at_most(
            "one of four learners 10x slower, allreduce: the fast ones / alone, throughput",
            median_ratio(fastest, solo),
            0.15,
            f"{sorted(fastest)[ROUNDS // 2]:.1f} {solo_text}",
        ),
    ]
