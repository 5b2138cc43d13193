"""The result of a comparison, which contains each arm at its best rate, its paired difference from the baseline, and
its costs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from starling.comparing.grid import CellResult, CompareConfig, Metric, Point, Row
from starling.errors import MissingExtraError
from starling.reporting.epochs import SPENT

if TYPE_CHECKING:
    import pandas

SIGNIFICANT = 0.05
Value = str | int | float | None


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % interval, mean - half to mean + half, by Student's t. A single value has no `half`."""

    mean: float
    half: float | None


@dataclass(frozen=True)
class Best:
    """The rate of a row with the best validation result."""

    rate: float
    edge: str = ""
    """`lowest` or `highest` if the rate is at that end of its grid, so that a better one may lie beyond."""


def choose(results: Sequence[CellResult], rates: Sequence[float], metric: Metric) -> Best:
    """Return the rate whose mean validation result is best. A rate with a run that diverged is worse than any other.

    If validation results are equal, the rate with the lower training loss is better. With `metric.of_loss`, only the
    training loss counts.
    """
    if len(rates) == 1:
        return Best(rates[0])
    sign = -1.0 if metric.higher_is_better else 1.0

    def cost(rate: float) -> tuple[float, float]:
        own = [result for result in results if result.cell.rate == rate]
        by_loss = fmean([math.inf if each.diverged or each.loss is None else each.loss for each in own])
        by_valid = fmean([math.inf if each.valid is None else sign * each.valid for each in own])
        return 0.0 if metric.of_loss else by_valid, by_loss

    best = min(rates, key=cost)
    return Best(best, {rates[0]: "lowest", rates[-1]: "highest"}.get(best, ""))


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of independent values with its interval."""
    from scipy import stats

    mean, count = fmean(values), len(values)
    return Estimate(mean, float(stats.t.ppf(0.975, count - 1) * stats.sem(values)) if count > 1 else None)


def paired(before: dict[int, float], after: dict[int, float]) -> tuple[Estimate | None, float | None]:
    """Return the mean difference of values over the seeds that both sides have, and the p value of a paired t-test.

    Equal differences, which are common among coarse results, do not show that there is no noise. In that case the
    spread within each side is used (Welch's test).
    """
    from scipy import stats

    seeds = sorted(before.keys() & after.keys())
    first, second = ([values[seed] for seed in seeds] for values in (before, after))
    differences = [two - one for one, two in zip(first, second, strict=True)]
    if len(seeds) < 2:
        return estimate(differences) if seeds else None, None
    if max(differences) - min(differences) > 1e-9 * max(map(abs, [*first, *second])):
        return estimate(differences), float(stats.ttest_1samp(differences, 0.0).pvalue)
    if len(set(first)) == 1:  # no spread anywhere: the test divides by zero
        return estimate(differences), float(differences[0] == 0.0)
    test = stats.ttest_ind(second, first, equal_var=False)
    interval = test.confidence_interval()
    return Estimate(fmean(differences), float(interval.high - interval.low) / 2.0), float(test.pvalue)


@dataclass
class Comparison:
    """The result of `starling.compare` and `starling compare`. `rows` returns a row for each arm and number of
    learners."""

    folder: Path
    """Folder of table.md and results.json."""
    section: CompareConfig
    """The settings of the comparison."""
    metric: Metric
    """The metric by which arms are compared."""
    best: dict[Row, Best]
    """Best learning rate of each row."""
    results: Sequence[CellResult]
    """Results of every cell, at every rate."""

    def at_best(self, row: Row) -> list[CellResult]:
        """Return the results of a row at its best rate, one for each seed."""
        rate = self.best[row].rate
        return [each for each in self.results if each.cell.row == row and each.cell.rate == rate]

    def rows(self) -> list[dict[str, Any]]:
        """Return one flat record for each row, which pandas can read. See docs/comparing.md for the columns."""
        return self._rows

    @cached_property
    def _rows(self) -> list[dict[str, Any]]:
        from scipy import stats

        rows = [self._row(row) for row in self.section.rows]
        tested = [row for row in rows if row["p"] is not None]
        # corrected for the number of comparisons, after Benjamini & Hochberg 1995
        corrected = stats.false_discovery_control([row["p"] for row in tested]) if tested else []
        for row, p in zip(tested, corrected, strict=True):
            row["p"] = float(p)
            is_better = (row["difference"] > 0.0) == self.metric.higher_is_better
            row["verdict"] = "inconclusive" if p >= SIGNIFICANT else "better" if is_better else "worse"
        for row in rows:
            row["verdict"] = row["verdict"] or "inconclusive"  # there is no test of one seed
        return rows

    def to_pandas(self) -> "pandas.DataFrame":
        """Return `rows` as a pandas.DataFrame. Raises `MissingExtraError` if pandas is not installed."""
        try:
            import pandas
        except ModuleNotFoundError as error:
            raise MissingExtraError("Comparison.to_pandas needs pandas: pip install pandas") from error
        return pandas.DataFrame(self.rows())

    def value(self, result: CellResult) -> float | None:
        """Return the value by which a run is compared. It is the test result, else the validation result, else the
        training loss. With `metric.of_loss`, it is always the training loss."""
        if result.diverged:
            return self.metric.diverged
        return result.loss if self.metric.of_loss or result.score is None else result.score

    def _values(self, row: Row) -> dict[int, float]:
        """Return the values of a row by seed, or an empty dictionary if a run has no value."""
        values = {result.cell.seed: self.value(result) for result in self.at_best(row)}
        return {} if None in values.values() else {seed: value for seed, value in values.items() if value is not None}

    def _row(self, row: Row) -> dict[str, Any]:
        found, base = self.at_best(row), self.section.baseline_of(row)
        values, theirs = self._values(row), self._values(base)
        own = estimate(list(values.values())) if values else None
        verdict, difference, p = "baseline" if row == base else self._limit(values, theirs), None, None
        if not verdict:
            difference, p = paired(theirs, values)
        strategy = self.section.all_arms[row.arm].strategy
        return {
            "setting": row.setting,
            "arm": row.arm,
            "strategy": "" if strategy is None else strategy.name,
            "learners": row.learners,
            "rate": self.best[row].rate,
            "edge": self.best[row].edge,
            "seeds": len(found),
            "diverged": sum(result.diverged for result in found),
            **_with_half("value", own),
            **self._beside(found),
            "valid": _mean_of([each.valid for each in found]),
            "baseline": base.arm,
            **_with_half("difference", difference),
            "p": p,
            "verdict": verdict,
            "loss": _mean_of([each.loss for each in found]),
            **self._costs(found, self.at_best(base)),
        }

    def _beside(self, found: list[CellResult]) -> dict[str, Any]:
        """Return the score that is reported beside the training loss by which arms are compared."""
        if not self.metric.of_loss:
            return {}
        scores = [each.score for each in found if each.score is not None]
        return _with_half("score", estimate(scores) if len(scores) == len(found) else None)

    def _limit(self, own: dict[int, float], base: dict[int, float]) -> str:
        """Return the reason why a row is not compared with the baseline, or an empty text if it is compared."""
        for values, whose in ((own, ""), (base, "baseline: ")):
            reason = self.metric.limit(fmean(list(values.values()))) if values else "diverged"
            if reason:
                return whose + reason
        return ""

    def _costs(self, own: list[CellResult], base: list[CellResult]) -> dict[str, Any]:
        """Return times, traffic and waits as means over seeds. The speed-up refers to the time to the target or,
        without a target, to the throughput."""
        reached, ours, theirs = self._reached(own), self._slowness(own), self._slowness(base)
        speedup = theirs / ours if ours and theirs else None
        learners = base[0].cell.learners / own[0].cell.learners
        return {
            "target_seconds": reached and reached.seconds,
            "target_samples": reached and reached.samples,
            "speedup": speedup,
            "efficiency": None if speedup is None else 100.0 * speedup * learners,
            **{name: _mean_of([getattr(each, name) for each in own]) for name in _COSTS},
        }

    def _reached(self, results: list[CellResult]) -> Point | None:
        """Return the mean point at which runs reach the target, or None unless all runs reach it."""
        target = self.section.target
        points = [each.when(target) for each in results if target is not None]
        there = [point for point in points if point is not None]
        return Point(*map(fmean, zip(*there, strict=True))) if len(there) == len(results) else None

    def _slowness(self, results: list[CellResult]) -> float | None:
        """Return the mean seconds to the target, or per sample if there is no target."""
        if self.section.target is not None:
            reached = self._reached(results)
            return reached and reached.seconds
        samples = sum(each.num_samples for each in results)
        return sum(each.seconds for each in results) / samples if samples else None

    def warnings(self) -> list[str]:
        """Warnings about rows whose best rate lies at an end of its grid, and about a target that is met at once."""
        target = self.section.target
        first = {row: [each.curve[0].loss for each in self.at_best(row) if each.curve] for row in self.best}
        met = [row for row, losses in first.items() if target is not None and min(losses, default=math.inf) <= target]
        at_once = [
            f"warning: {_named(row)}: the first losses already meet the target, {target:g}, as after a warm start, "
            "so times to it say nothing; choose a lower target"
            for row in met
        ]
        return at_once + [
            f"warning: {_named(row)}: the best rate, {best.rate:g}, is the {best.edge} of its grid; a better one may "
            f"lie beyond, so add {'lower' if best.edge == 'lowest' else 'higher'} rates"
            for row, best in self.best.items()
            if best.edge
        ]

    def content(self) -> dict[str, Any]:
        """Return the whole comparison in the form of results.json."""
        return {
            "compare": self.section.model_dump(mode="json", fallback=str),
            "metric": self.metric.model_dump(mode="json"),
            "warnings": self.warnings(),
            "rows": self.rows(),
            "cells": [result.model_dump(mode="json") for result in self.results],
        }

    def markdown(self, width: int | None = None) -> list[str]:
        """The lines of the table for a terminal. If it is wider than `width`, it has fewer columns."""
        has_settings = bool(self.section.settings)
        time = "seconds" if self.section.target is None else f"seconds to loss {self.section.target:g}"
        titles = ["arm", "learners", "rate", self.metric.name, "difference", "p", "verdict", time, "speed-up"]
        beside = [self.metric.beside] if self.metric.of_loss and self.metric.beside else []
        titles[4:4] = beside
        lines = []
        for row in self.rows():
            own = row["seconds" if self.section.target is None else "target_seconds"]
            value = _text(row["value"], row["value_half"]) + (f" †{row['diverged']}" if row["diverged"] else "")
            shown = [row["arm"], str(row["learners"]), f"{row['rate']:g}{' !' * bool(row['edge'])}", value]
            shown += [_text(row["score"], row["score_half"]) for _ in beside]
            shown += [_text(row["difference"], row["difference_half"], "+"), _p(row["p"]), row["verdict"]]
            shown += [_text(own), _text(row["speedup"], digits=2)]
            lines.append([row["setting"], *shown] if has_settings else shown)
        titles = ["setting", *titles] if has_settings else titles
        table = _table(titles, lines)
        is_named = len({(row["setting"], row["arm"]) for row in self.rows()}) == len(lines)  # without its `learners`
        for title in ("rate", *["learners"] * is_named, "p", *beside, "difference", "verdict"):
            if width is None or len(table[0]) <= width:
                break
            place = titles.index(title)
            titles, *lines = ([*row[:place], *row[place + 1 :]] for row in (titles, *lines))
            table = _table(titles, lines)
        return table

    def page(self) -> list[str]:
        """The lines of table.md."""
        arms = [f"- `{label}`: {arm.summary}" for label, arm in self.section.all_arms.items() if arm.summary]
        pages = [f"# {self.folder.name}: {self.metric.name}", "", *_LEGEND, "", *arms, "", *self.markdown(), ""]
        pages += self.warnings()
        keys = [key for key in self.rows()[0] if key not in _IN_SHORT and any(row[key] for row in self.rows())]
        lines = [[_short(row[key]) for key in ["arm", "learners", *keys]] for row in self.rows()]
        return [*pages, "", "## Everything measured", "", *_table(["arm", "learners", *keys], lines), "", *self._grid()]

    def _grid(self) -> list[str]:
        """The lines of a table of validation results at every rate."""
        lines = []
        for row in self.section.rows:
            own = [each for each in self.results if each.cell.row == row]
            for rate in sorted({each.cell.rate for each in own}):
                found = [each for each in own if each.cell.rate == rate]
                chosen = "chosen" if rate == self.best[row].rate else ""
                valid = _mean_of([each.loss if self.metric.of_loss else each.valid for each in found])
                num_diverged = sum(each.diverged for each in found)
                lines.append([_named(row), f"{rate:g}", _short(valid), str(num_diverged), str(len(found)), chosen])
        titles = ["row", "rate", "training loss" if self.metric.of_loss else "validation", "diverged", "seeds", ""]
        return ["## Learning rates", "", *_table(titles, lines)]


_COSTS = ("seconds", "num_samples", "consensus_distance", "mean_staleness", "largest_staleness", "bytes_sent", *SPENT)
_IN_SHORT = {
    *("arm", "learners", "value", "value_half", "score", "score_half", "difference", "difference_half", "p", "verdict"),
    "speedup",
}
_LEGEND = [
    "Means over seeds with 95 % intervals by Student's t (none for one seed), each row at its best learning rate; "
    "`!` marks a rate at an end of its grid. † counts runs whose numbers stopped being finite. "
    "`difference` is the difference from the baseline, paired by seed; `p` comes from a paired t-test and is corrected "
    "for all comparisons in the table (Benjamini & Hochberg). Differences with `p` of 0.05 or more are inconclusive; "
    "rows with everything wrong or right are not compared. docs/comparing.md explains the columns.",
]


def _with_half(name: str, found: Estimate | None) -> dict[str, Any]:
    return {name: found and found.mean, f"{name}_half": found and found.half}


def _named(row: Row) -> str:
    setting = f"{row.setting}, " if row.setting else ""
    return f"{setting}{row.arm} with {row.learners} learner{'s' if row.learners > 1 else ''}"


def _text(mean: Value, half: Value = None, sign: str = "", digits: int | None = None) -> str:
    """Return a mean with its interval as text, with two digits for values below 10."""
    if not isinstance(mean, float | int):
        return "—"
    size = max(abs(mean), half if isinstance(half, float) else 0.0)
    shown = digits if digits is not None else 1 if size >= 10.0 else 2 if size >= 1.0 else 4
    return f"{mean:{sign}.{shown}f}" + (f" ± {half:.{shown}f}" if isinstance(half, float) else "")


def _p(p: Value) -> str:
    return "—" if not isinstance(p, float) else f"{p:.3f}" if p >= 0.001 else "< 0.001"


def _short(value: Value) -> str:
    return "—" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table whose columns are as wide as their widest cells."""
    widths = [max(len(row[column]) for row in [titles, *rows]) for column in range(len(titles))]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in [titles, *rows]]
    lines.insert(1, ["-" * width for width in widths])
    return [f"| {' | '.join(line)} |" for line in lines]


def _mean_of(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values that are not None."""
    there = [value for value in values if value is not None]
    return fmean(there) if there else None
