"""The cost of averaging: processor time per megabyte exchanged, and steps per second beside DDP."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.measuring import Bar
from benchmarks.perceptron import LARGE, SMALL
from benchmarks.runs import (
    DDP,
    LEAST_ROUNDS,
    Outcome,
    Run,
    averaging_in_words,
    median_ratio,
    rounds_per_gradient,
    total_rate,
)
from benchmarks.starting import alternately, launched

ROUNDS, WORLD = 3, 4
MEGABYTE = 1e6
NEVER = 1e9
"""Number of gradients before a round that is too large for any round to open."""
EMULATED_PARAMETERS, EMULATED_SECONDS, EMULATED_STEPS = 1 << 22, 0.4, WORLD * 12
MOST_SECONDS_PER_MEGABYTE = 0.005
"""Limit for a megabyte's averaging: a copy takes some 0.2 ms, and a megabyte is copied about ten times from weights to
weights."""
SMALL_STEPS, LARGE_STEPS = WORLD * 1000, WORLD * 40


def measure(folder: Path) -> list[Bar]:
    """Processor time on emulated devices, where learners compute nothing but averaging, and speed with real
    gradients."""
    return [
        processor_time(folder),
        *speed("13 k parameters", SMALL, SMALL_STEPS, folder),
        *speed("4 M parameters", LARGE, LARGE_STEPS, folder),
    ]


def processor_time(folder: Path) -> Bar:
    """Processor seconds per megabyte sent, of all learners' processes with gloo's threads, beyond the same run in which
    no round ever opens: snapshots, copies, sending, receiving, mixing and applying."""
    found = alternately(
        {
            averages: Run(
                "adpsgd",
                WORLD,
                EMULATED_PARAMETERS,
                EMULATED_SECONDS,
                steps=EMULATED_STEPS,
                options={"period": 1.0 if averages == "averages" else NEVER},
            )
            for averages in ("averages", "does not")
        },
        ROUNDS,
        lambda runs: launched(runs, folder),
    )
    costs = [
        (cpu_seconds(with_it) - cpu_seconds(without)) / megabytes_sent(with_it)
        for with_it, without in zip(found["averages"], found["does not"], strict=True)
    ]
    sent = median(megabytes_sent(outcomes) for outcomes in found["averages"])
    spent, alone = (median(cpu_seconds(outcomes) for outcomes in found[name]) for name in ("averages", "does not"))
    return Bar.at_most(
        "four learners, 4 M parameters, adpsgd: processor seconds of averaging per megabyte exchanged",
        median(costs),
        MOST_SECONDS_PER_MEGABYTE,
        f"{1000 * median(costs):.2f} ms/MB; {sent:.0f} MB; {spent:.1f} s against {alone:.1f} s without averaging",
    )


def cpu_seconds(outcomes: Sequence[Outcome]) -> float:
    """Processor seconds of all learners together."""
    return sum(outcome.cpu_seconds for outcome in outcomes)


def megabytes_sent(outcomes: Sequence[Outcome]) -> float:
    """Megabytes that all learners together sent; each was received once."""
    return sum(outcome.bytes_sent for outcome in outcomes) / MEGABYTE


def speed(model: str, widths: tuple[int, ...], steps: int, folder: Path) -> list[Bar]:
    """Mini-batches per second of all learners, each with one thread and real gradients, as a share of tuned DDP's; and
    how often they average meanwhile."""
    found = alternately(
        {name: Run(name, WORLD, widths=widths, steps=steps) for name in ("adpsgd", DDP)},
        ROUNDS,
        lambda runs: launched(runs, folder),
    )
    rates = {name: [total_rate(outcomes) for outcomes in found[name]] for name in found}
    averaging = averaging_in_words(found["adpsgd"])
    return [
        Bar.at_least(
            f"four learners, {model}: adpsgd / DDP, steps per second",
            median_ratio(rates["adpsgd"], rates[DDP]),
            1.0,
            f"{median(rates['adpsgd']):.0f} and {median(rates[DDP]):.0f} steps/s; {averaging}",
        ),
        Bar.at_least(
            f"four learners, {model}: adpsgd, averaging rounds per gradient",
            median(rounds_per_gradient(outcomes) for outcomes in found["adpsgd"]),
            LEAST_ROUNDS,
            f"{averaging}; {median(rates['adpsgd']):.0f} steps/s",
        ),
    ]
