"""The table of a study, in Markdown that also reads well on a terminal."""

from collections.abc import Sequence

from starling.runs.study.arms import ARMS
from starling.runs.study.intervals import Estimate
from starling.runs.study.outcomes import Outcomes, mean_of
from starling.runs.study.results import CellResult


def error_rates(outcomes: Outcomes) -> list[str]:
    """Word error rates: a row for each setting and number of workers, a column for each arm."""
    rows = []
    columns: list[int | None] = [*outcomes.workers] or [None]
    for setting in outcomes.settings:
        for workers in columns:
            cells = [_error_rate(outcomes.of(setting, arm, workers)) for arm in outcomes.arms]
            number = "" if workers is None else str(workers)
            rows.append([setting.model, setting.optimizer, f"{setting.warmup:g}", number, *cells])
    return markdown(["model", "optimizer", "warm-up", "workers", *outcomes.arms], rows)


def details(outcomes: Outcomes) -> list[str]:
    """Everything else that was measured, a row for each arm."""
    rows = []
    for setting in outcomes.settings:
        for arm in outcomes.arms:
            numbers: list[int | None] = [*outcomes.workers] if ARMS[arm].depends else [None]
            for workers in numbers:
                found = outcomes.of(setting, arm, workers)
                if found:
                    labels = [setting.model, setting.optimizer, f"{setting.warmup:g}", arm, str(workers or "")]
                    rows.append([*labels, *_measured(found)])
    titles = ["WER", "last loss", "staleness", "at most", "gradients", "steps", "simulated s", "seeds", "diverged"]
    return markdown(["model", "optimizer", "warm-up", "arm", "workers", *titles], rows)


def legend(outcomes: Outcomes, words: int) -> list[str]:
    """What the columns are."""
    return [
        f"Word error rates in per cent of {words} words, means over seeds with 95 % intervals (Student's t; none for "
        "one seed). A cross counts runs whose numbers stopped being finite; they count as 100 %.",
        "",
        *(f"- `{arm}`: {ARMS[arm].summary}" for arm in outcomes.arms),
    ]


def markdown(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table with columns as wide as their widest cell."""
    widths = [max(len(row[column]) for row in [titles, *rows]) for column in range(len(titles))]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in [titles, *rows]]
    lines.insert(1, ["-" * width for width in widths])
    return [f"| {' | '.join(line)} |" for line in lines]


def plus_minus(estimate: Estimate, digits: int = 1) -> str:
    """`12.3 ± 1.5`, or the mean alone."""
    mean = f"{estimate.mean:.{digits}f}"
    return mean if estimate.half is None else f"{mean} ± {estimate.half:.{digits}f}"


def _error_rate(results: Sequence[CellResult]) -> str:
    found = mean_of(results, lambda result: result.wer)
    if found is None:
        return "—"
    num_diverged = sum(result.diverged for result in results)
    return plus_minus(found) + (f" †{num_diverged}" if num_diverged else "")


def _measured(results: Sequence[CellResult]) -> list[str]:
    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    loss = mean_of(results, lambda result: result.loss)
    return [
        _error_rate(results),
        "—" if loss is None else plus_minus(loss, 2),
        f"{mean([result.mean_staleness for result in results]):.1f}",
        str(max(result.largest_staleness for result in results)),
        f"{mean([result.num_gradients for result in results]):.0f}",
        f"{mean([result.num_steps for result in results]):.0f}",
        f"{mean([result.simulated_seconds for result in results]):.1f}",
        str(len(results)),
        str(sum(result.diverged for result in results)),
    ]
