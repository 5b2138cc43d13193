"""Four learners on emulated devices that step together, one of them at half speed: what batch shares recover."""

from pathlib import Path
from statistics import median

from benchmarks.measuring import Bar
from benchmarks.runs import Run, median_ratio
from benchmarks.starting import alternately, launched

ROUNDS, WORLD, SLOWER, SHARE = 5, 4, 2.0, 2
NUM_PARAMETERS, GRADIENT_SECONDS, SECONDS = 13_000, 0.03, 3.0
STRATEGIES = {"allreduce": {}, "local-sgd": {"every": 8}}


def measure(folder: Path) -> list[Bar]:
    """Mini-batches per second of all learners, with a share of two for the fast ones over without shares; at best 1.75,
    since seven mini-batches take the time of four."""
    return [_measure(strategy, folder) for strategy in STRATEGIES]


def _measure(strategy: str, folder: Path) -> Bar:
    def run(shares: dict[str, int]) -> Run:
        return Run(
            strategy,
            WORLD,
            NUM_PARAMETERS,
            GRADIENT_SECONDS,
            seconds=SECONDS,
            last_is_slower=SLOWER,
            options=STRATEGIES[strategy],
            batch_shares=shares,
        )

    runs = {"equal": run({}), "shared": run({str(rank): SHARE for rank in range(WORLD - 1)})}
    found = alternately(runs, ROUNDS, lambda every: launched(every, folder))
    rates = {name: [sum(outcome.rate for outcome in outcomes) for outcomes in found[name]] for name in runs}
    return Bar.at_least(
        f"{strategy}, one of four learners at half speed: shares 2, 2, 2, 1 / equal shares, throughput",
        median_ratio(rates["shared"], rates["equal"]),
        1.5,
        f"{median(rates['shared']):.1f} of {median(rates['equal']):.1f} mini-batches/s",
    )
