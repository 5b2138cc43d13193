"""How evenly learners of equal speed share a budget."""

from pathlib import Path
from statistics import mean, median

from benchmarks.measuring import Bar
from benchmarks.runs import Run, averaging_in_words
from benchmarks.starting import launched

ROUNDS, WORLD, STEPS = 3, 4, 800
NUM_PARAMETERS, GRADIENT_SECONDS = 13_000, 0.02


def measure(folder: Path) -> list[Bar]:
    """The spread, (most - fewest) / mean, of the steps that four equal learners make under `adpsgd`."""
    run = Run("adpsgd", WORLD, NUM_PARAMETERS, GRADIENT_SECONDS, steps=STEPS)
    found = launched([run] * ROUNDS, folder)
    counts = [[len(outcome.stamps) for outcome in outcomes] for outcomes in found]
    spreads = [spread(steps) for steps in counts]
    middle = min(counts, key=lambda steps: abs(spread(steps) - median(spreads)))
    return [
        Bar.at_most(
            "four equal learners, adpsgd: (most - fewest) / mean steps",
            median(spreads),
            0.05,
            f"{' '.join(str(steps) for steps in middle)} steps; {averaging_in_words(found)}",
        )
    ]


def spread(steps: list[int]) -> float:
    """The range of numbers of steps, as a share of their mean."""
    return (max(steps) - min(steps)) / mean(steps)
