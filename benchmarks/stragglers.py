"""Four learners on emulated devices, one of them ten times slower: what this costs the other three."""

from pathlib import Path
from statistics import median

from benchmarks.measuring import Bar
from benchmarks.runs import Run, averaging_in_words, median_ratio
from benchmarks.starting import alternately, launched

ROUNDS, WORLD, SLOWER = 3, 4, 10.0
MODELS = {"13 k": (13_000, 0.03, 3.0), "4 M": (1 << 22, 0.1, 8.0)}
"""Number of parameters, seconds of a gradient, and seconds of a run of each model. Averaging the small model costs next
to nothing; a round of the large one, 16 MB to and from two neighbours, costs two cores a good part of a gradient's
time."""


def measure(folder: Path) -> list[Bar]:
    """The share of a lone learner's throughput that the fast learners keep: the slowest of them under `adpsgd`, the
    fastest under `allreduce`."""
    return [bar for model in MODELS for bar in measure_model(model, folder)]


def measure_model(model: str, folder: Path) -> list[Bar]:
    """The two bars of one of `MODELS`."""
    num_parameters, gradient_seconds, seconds = MODELS[model]

    def run(strategy: str, world: int, slower: float = 1.0) -> Run:
        return Run(strategy, world, num_parameters, gradient_seconds, seconds=seconds, last_is_slower=slower)

    found = alternately(
        {
            "solo": run("allreduce", 1),
            "adpsgd": run("adpsgd", WORLD, SLOWER),
            "allreduce": run("allreduce", WORLD, SLOWER),
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
    name = f"{model} parameters, one of four learners 10x slower"
    alone = f"of {median(solo):.1f} gradients/s alone"
    averaging = averaging_in_words([outcomes[:-1] for outcomes in found["adpsgd"]])
    return [
        Bar.at_least(
            f"{name}, adpsgd: the fast ones / alone, throughput",
            median_ratio(slowest, solo),
            0.95,
            f"{median(slowest):.1f} {alone}; the fast ones: {averaging}",
        ),
        Bar.at_most(
            f"{name}, allreduce: the fast ones / alone, throughput",
            median_ratio(fastest, solo),
            0.15,
            f"{median(fastest):.1f} {alone}",
        ),
    ]
