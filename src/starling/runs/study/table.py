"""The table of a study: each arm's results, and its paired difference from one learner."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from starling.runs.study.arms import ARMS
from starling.runs.study.results import CellResult, Outcomes, Setting

BASELINE = "one"


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % interval, mean - half to mean + half, by Student's t; None for one value."""

    mean: float
    half: float | None

    def text(self, digits: int = 1, sign: str = "") -> str:
        """`12.3 ± 1.5`, or the mean alone."""
        mean = f"{self.mean:{sign}.{digits}f}"
        return mean if self.half is None else f"{mean} ± {self.half:.{digits}f}"


@dataclass(frozen=True)
class Row:
    """One arm in one setting."""

    model: str
    optimizer: str
    warmup: float
    workers: int | None
    arm: str
    wer: Estimate
    """In per cent."""
    difference: Estimate | None
    """WER less that of the baseline, in points, over the seeds that both have; None where they share none."""
    p: float | None
    """Of a paired t-test of the difference, corrected for all comparisons of the study; None without two seeds."""
    loss: Estimate | None
    """Of the last tenth of the budget."""
    staleness: float
    largest_staleness: int
    num_gradients: float
    num_steps: float
    simulated_seconds: float
    num_seeds: int
    num_diverged: int


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of independent values with its interval."""
    from scipy import stats

    mean, count = math.fsum(values) / len(values), len(values)
    return Estimate(mean, float(stats.t.ppf(0.975, count - 1) * stats.sem(values)) if count > 1 else None)


def rows_of(outcomes: Outcomes) -> list[Row]:
    """A row for each arm, setting and number of workers, with p values corrected after Benjamini & Hochberg 1995."""
    from scipy import stats

    rows = [
        _row(outcomes, setting, arm, workers, found)
        for setting in outcomes.settings
        for arm in outcomes.arms
        for workers in (outcomes.workers if ARMS[arm].depends else [None])
        if (found := outcomes.of(setting, arm, workers))
    ]
    tested = [number for number, row in enumerate(rows) if row.p is not None]
    corrected = stats.false_discovery_control([rows[number].p for number in tested]) if tested else []
    for number, p in zip(tested, corrected, strict=True):
        rows[number] = replace(rows[number], p=float(p))
    return rows


def _row(outcomes: Outcomes, setting: Setting, arm: str, workers: int | None, found: list[CellResult]) -> Row:
    losses = [result.loss for result in found if result.loss is not None]
    difference, p = None, None
    if arm != BASELINE and BASELINE in outcomes.arms:
        difference, p = _compared(outcomes.of(setting, BASELINE, workers), found)
    return Row(
        *setting,
        workers=workers,
        arm=arm,
        wer=estimate([result.wer for result in found]),
        difference=difference,
        p=p,
        loss=estimate(losses) if losses else None,
        staleness=_mean([result.mean_staleness for result in found]),
        largest_staleness=max(result.largest_staleness for result in found),
        num_gradients=_mean([result.num_gradients for result in found]),
        num_steps=_mean([result.num_steps for result in found]),
        simulated_seconds=_mean([result.simulated_seconds for result in found]),
        num_seeds=len(found),
        num_diverged=sum(result.diverged for result in found),
    )


def _compared(before: list[CellResult], after: list[CellResult]) -> tuple[Estimate | None, float | None]:
    """The difference of word error rates, paired by seed, and the p value of a paired t-test."""
    from scipy import stats

    first, second = ({result.cell.seed: result.wer for result in each} for each in (before, after))
    common = sorted(first.keys() & second.keys())
    differences = [second[seed] - first[seed] for seed in common]
    if not common:
        return None, None
    if len(set(differences)) == 1:  # no spread at all: the test divides by zero
        return estimate(differences), None if len(common) == 1 else float(differences[0] == 0.0)
    return estimate(differences), float(stats.ttest_1samp(differences, 0.0).pvalue)


def error_rates(outcomes: Outcomes, rows: Sequence[Row]) -> list[str]:
    """Word error rates: a row for each setting and number of workers, a column for each arm."""
    rates = {(row.model, row.optimizer, row.warmup, row.workers, row.arm): _rate(row) for row in rows}
    lines = []
    for setting in outcomes.settings:
        for workers in outcomes.workers:
            keys = [(*setting, workers if ARMS[arm].depends else None, arm) for arm in outcomes.arms]
            labels = [setting[0], setting[1], f"{setting[2]:g}", str(workers or "")]
            lines.append([*labels, *(rates.get(key, "—") for key in keys)])
    return markdown(["model", "optimizer", "warm-up", "workers", *outcomes.arms], lines)


def details(rows: Sequence[Row]) -> list[str]:
    """Everything that was measured."""
    titles = ["model", "optimizer", "warm-up", "arm", "workers", "WER", f"less `{BASELINE}`", "p", "last loss"]
    titles += ["staleness", "at most", "gradients", "steps", "simulated s", "seeds", "diverged"]
    return markdown(titles, [list(_cells(row)) for row in rows])


def _cells(row: Row) -> Iterator[str]:
    yield from (row.model, row.optimizer, f"{row.warmup:g}", row.arm, str(row.workers or ""), _rate(row))
    yield "—" if row.difference is None else row.difference.text(sign="+")
    yield "—" if row.p is None else f"{row.p:.3f}" if row.p >= 0.001 else "< 0.001"
    yield "—" if row.loss is None else row.loss.text(2)
    yield from (f"{row.staleness:.1f}", str(row.largest_staleness), f"{row.num_gradients:.0f}", f"{row.num_steps:.0f}")
    yield from (f"{row.simulated_seconds:.1f}", str(row.num_seeds), str(row.num_diverged))


def legend(outcomes: Outcomes) -> list[str]:
    """What the columns are."""
    words = max(result.words for result in outcomes.results)
    return [
        f"Word error rates in per cent of {words} words, means over seeds with 95 % intervals by Student's t (none for "
        f"one seed). † counts runs whose numbers stopped being finite; they count as 100 %. `less {BASELINE}` is the "
        "difference from one learner in points, paired by seed; p is that of a paired t-test, corrected for all "
        "comparisons in the table (Benjamini & Hochberg).",
        "",
        *(f"- `{arm}`: {ARMS[arm].summary}" for arm in outcomes.arms),
    ]


def markdown(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table with columns as wide as their widest cell."""
    widths = [max(len(row[column]) for row in [titles, *rows]) for column in range(len(titles))]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in [titles, *rows]]
    lines.insert(1, ["-" * width for width in widths])
    return [f"| {' | '.join(line)} |" for line in lines]


def _rate(row: Row) -> str:
    return row.wer.text() + (f" †{row.num_diverged}" if row.num_diverged else "")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
