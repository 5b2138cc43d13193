"""Tables of the pages of studies, from their finished cells: `python -m benchmarks.study_tables speed-up`.

The cells are in `docs/results/STUDY/cells.jsonl`, which `benchmarks.study_cells` writes. `--plan` writes the file in
which `starling plan` finds how many mini-batches a strategy needs.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from benchmarks.study_cells import read
from starling.comparing.grid import CellResult, Point
from starling.comparing.table import Estimate, estimate

ROOT = Path(__file__).parents[1]
RESULTS, RECIPE = ROOT / "docs" / "results", ROOT / "recipes" / "speed_up.yaml"
PLAN = ROOT / "src" / "starling" / "predict" / "data_need.json"
STRAGGLERS = ("allreduce", "delay-by-one", "dpsgd", "adpsgd", "ring", "server")
SLOWNESS = ("equal", "slow-2", "slow-10", "slow-100")
EARLY_LOSS, LOSS = 2.0, 1.4
"""The target losses of the studies of stragglers and of speed-up, in nats per frame."""
NEAR_CONVERGENCE = (1.5, 1.0, 0.9)
"""The losses in the study of summed updates, in nats per frame."""
NEAR = 2.0
"""Points of word error rate above the best rate's, within which a rate of the study of tuning counts as good."""
SPEED_UP: Mapping[str, str] = {
    "allreduce": "`allreduce`",
    "dpsgd": "`dpsgd`, random order",
    "delay-by-one": "`delay-by-one`",
    "ring": "`adpsgd`, ring",
    "random": "`adpsgd`, random order",
    "hadpsgd": "`hadpsgd`, four a node",
    "server": "`parameter-server`",
    "diloco": "`diloco`, every 16",
}
"""The arms of the study of speed-up."""


EQUAL_STEPS: Mapping[str, str] = {
    "allreduce": "`allreduce`",
    "noise": "`allreduce` with noise",
    "delay-by-one": "`delay-by-one`",
    "random": "`adpsgd`, random order",
}
"""The arms of the study of large batches at equal steps."""


def cells(study: str) -> list[CellResult]:
    """The finished cells of a study."""
    return read(RESULTS / study / "cells.jsonl")


def text_of(found: Estimate, decimals: int = 2) -> str:
    """The estimate with two decimals, or with one from 10, such as `5.07 ± 1.07`."""
    decimals = decimals if found.mean < 10 else 1
    return f"{found.mean:.{decimals}f}" + ("" if found.half is None else f" ± {found.half:.{decimals}f}")


def reached(target: float, results: Sequence[CellResult]) -> dict[int, Point]:
    """The points at which the training loss falls to a target, by seed; empty unless all seeds reach it."""
    points = {each.cell.seed: each.when(target) for each in results}
    return {} if None in points.values() else {seed: point for seed, point in points.items() if point is not None}


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles), *(f"| {' | '.join(row)} |" for row in rows)]


def stragglers(found: Sequence[CellResult]) -> list[list[str]]:
    """Seconds to the target, by strategy, number of learners and slowness."""
    rows = []
    for learners in (4, 16, 64):
        for arm in STRAGGLERS:
            name, row = f"{arm}-{learners}", [f"`{arm}`", str(learners)]
            for setting in SLOWNESS:
                own = [each for each in found if (each.cell.arm, each.cell.setting) == (name, setting)]
                seconds = [point.seconds for point in reached(EARLY_LOSS, own).values()]
                row.append(text_of(estimate(seconds)) if seconds else "—")
            rows.append(row)
    times = ["equally fast", *(f"{slower} times slower" for slower in (2, 10, 100))]
    return [_table(["strategy", "learners", *times], rows)]


@dataclass(frozen=True)
class Reached:
    """The runs of an arm with a number of learners, at the rate with which they reach a loss first."""

    rate: float
    is_edge: bool
    """Whether the rate is at an end of its grid, so that a better one may lie beyond."""
    points: Mapping[int, Point]
    """Where the loss is reached, by seed."""
    gigabytes: float
    """Bytes that all learners send until then, in units of 10^9, as a mean over seeds."""

    def speed_up(self, alone: "Reached") -> Estimate:
        """How many times as fast as one learner, paired by seed."""
        return estimate([alone.points[seed].seconds / point.seconds for seed, point in self.points.items()])

    def data_efficiency(self, alone: "Reached") -> Estimate:
        """The mini-batches that one learner needs for the loss, divided by those of the arm, paired by seed."""
        return estimate([alone.points[seed].samples / point.samples for seed, point in self.points.items()])


def fastest(found: Sequence[CellResult], arm: str, target: float) -> Reached | None:
    """The rate of an arm with the smallest mean time to a loss, among those with which all seeds reach it."""
    best: Reached | None = None
    rates = _rates(found, arm)
    for rate in rates:
        own = [each for each in found if (each.cell.arm, each.cell.rate) == (arm, rate)]
        if points := reached(target, own):
            sent = [each.bytes_sent * points[each.cell.seed].samples / each.num_samples for each in own]
            this = Reached(rate, rate in (rates[0], rates[-1]), points, fmean(sent) / 1e9)
            if best is None or _mean_seconds(this) < _mean_seconds(best):
                best = this
    return best


def _rates(found: Sequence[CellResult], arm: str) -> list[float]:
    """The rates of an arm that have all its seeds, in ascending order."""
    seeds = Counter(each.cell.rate for each in found if each.cell.arm == arm)
    return sorted(rate for rate, count in seeds.items() if count == max(seeds.values()))


def _mean_seconds(reached: Reached) -> float:
    return fmean(point.seconds for point in reached.points.values())


def word_errors(found: Sequence[CellResult], arm: str) -> Estimate | None:
    """The word error rate of an arm at the end of its budget, in per cent, at the rate with the best validation."""
    own = [each for each in found if each.cell.arm == arm]
    costs = {
        rate: fmean(100.0 if each.diverged else each.valid or 0.0 for each in own if each.cell.rate == rate)
        for rate in _rates(found, arm)
    }
    rate = min(costs, key=lambda rate: costs[rate])
    scores = [each.test for each in own if each.cell.rate == rate and each.test is not None]
    return estimate(scores) if scores else None


def speed_up(found: Sequence[CellResult]) -> list[list[str]]:
    """For an early and a lower loss, strategies and numbers of learners: seconds, speed-up, data efficiency and bytes;
    and the word error rate at the end of the budget."""
    tables = []
    for target in (EARLY_LOSS, LOSS):
        alone = fastest(found, "one", target)
        if alone is None:
            raise SystemExit(f"one learner does not reach a loss of {target:g}")
        rows = [["one learner", "1", *_figures(alone, alone), _score(found, "one")]]
        for learners in (8, 32, 128):
            for arm, name in SPEED_UP.items():
                if any(each.cell.arm == f"{arm}-{learners}" for each in found):
                    best = fastest(found, f"{arm}-{learners}", target)
                    figures = ["—"] * 5 if best is None else _figures(best, alone)
                    rows.append([name, str(learners), *figures, _score(found, f"{arm}-{learners}")])
        titles = [
            "strategy",
            "learners",
            "rate",
            f"seconds to {target:g}",
            "speed-up",
            "data efficiency",
            "GB",
            "WER, %",
        ]
        tables.append(_table(titles, rows))
    return tables


def _figures(best: Reached, alone: Reached) -> list[str]:
    rate = f"{best.rate:g}" + "!" * best.is_edge
    seconds = text_of(estimate([point.seconds for point in best.points.values()]))
    if best is alone:
        return [rate, seconds, "1", "1", "0"]
    return [
        rate,
        seconds,
        text_of(best.speed_up(alone)),
        text_of(best.data_efficiency(alone), 3),
        f"{best.gigabytes:.2f}",
    ]


def _score(found: Sequence[CellResult], arm: str) -> str:
    score = word_errors(found, arm)
    return "—" if score is None else text_of(score)


def tuning(found: Sequence[CellResult]) -> list[list[str]]:
    """Validation errors by learning rate, for each optimizer; and over how many rates they are near the smallest."""
    networks, tables, summary = sorted({each.cell.setting for each in found}), [], []
    for arm in ("adam", "nesterov"):
        own = [each for each in found if each.cell.arm == arm]
        errors = {network: rate_errors([each for each in own if each.cell.setting == network]) for network in networks}
        rows = [[f"{rate:g}", *(text_of(each[rate]) for each in errors.values())] for rate in errors[networks[0]]]
        tables.append(_table([f"rate of {arm}", *(f"`{network}`" for network in networks)], rows))
        for network, by_rate in errors.items():
            best = min(by_rate, key=lambda rate: by_rate[rate].mean)
            near = [rate for rate, error in by_rate.items() if error.mean <= by_rate[best].mean + NEAR]
            at_best = [each for each in own if (each.cell.setting, each.cell.rate) == (network, best)]
            test = estimate([each.test for each in at_best if each.test is not None])
            summary.append(
                [f"`{network}`", arm, f"{best:g}", text_of(test), f"{len(near)} ({near[0]:g} to {near[-1]:g})"]
            )
    titles = ["network", "optimizer", "best rate", "test WER, %", f"rates within {NEAR:g} points"]
    return [_table(titles, sorted(summary)), *tables]


def rate_errors(found: Sequence[CellResult]) -> dict[float, Estimate]:
    """The validation error of each rate, in per cent; 100 for a run whose numbers stopped being finite."""
    rates = sorted({each.cell.rate for each in found})
    costs = [(each.cell.rate, 100.0 if each.diverged else each.valid or 0.0) for each in found]
    return {rate: estimate([cost for at, cost in costs if at == rate]) for rate in rates}


def summed(found: Sequence[CellResult]) -> list[list[str]]:
    """Simulated seconds to three losses, the last loss and the test error, by arm and rate."""
    rows = []
    for arm in ("synchronous", "asynchronous", "summed"):
        for rate in _rates(found, arm):
            own = [each for each in found if (each.cell.arm, each.cell.rate) == (arm, rate)]
            times = [[point.seconds for point in reached(target, own).values()] for target in NEAR_CONVERGENCE]
            scores = [each.test for each in own if each.test is not None]
            last = [each.curve[-1].loss for each in own]
            figures = [text_of(estimate(each)) if each else "—" for each in (*times, last, scores)]
            rows.append([f"`{arm}`", f"{rate:g}", *figures])
    times_to = [f"seconds to {target:g}" for target in NEAR_CONVERGENCE]
    return [_table(["arm", "rate", *times_to, "last loss", "test WER, %"], rows)]


def equal_steps(found: Sequence[CellResult]) -> list[list[str]]:
    """Loss and errors by global batch and arm, each at the rate with the lowest validation error."""
    rows = []
    for batch in sorted({each.cell.setting for each in found}, key=batch_of):
        for arm, name in EQUAL_STEPS.items():
            own = [each for each in found if (each.cell.arm, each.cell.setting) == (arm, batch)]
            if own:
                name = "one learner" if batch.startswith("one") else name
                rows.append([str(batch_of(batch)), name, *_at_best(own)])
    titles = ["batch", "arm", "rate", "last loss", "validation WER, %", "test WER, %"]
    return [_table(titles, rows)]


def batch_of(setting: str) -> int:
    """The global batch of a setting of the study of large batches, such as `batch-256`."""
    return int(setting.rpartition("-")[2])


def at_best(found: Sequence[CellResult]) -> list[CellResult]:
    """The runs at the rate with the lowest mean error on the validation set."""
    errors = rate_errors(found)
    best = min(errors, key=lambda rate: errors[rate].mean, default=None)
    return [each for each in found if each.cell.rate == best]


def _at_best(found: Sequence[CellResult]) -> list[str]:
    """The best rate, with `!` at an end of its grid, and the figures at this rate."""
    errors, own = rate_errors(found), at_best(found)
    losses, scores = (
        [each.loss for each in own if each.loss is not None],
        [each.test for each in own if each.test is not None],
    )
    best = own[0].cell.rate
    rate = f"{best:g}" + "!" * (best in (min(errors), max(errors)))
    return [rate, text_of(estimate(losses)), text_of(errors[best]), text_of(estimate(scores))]


def data_needs(found: Sequence[CellResult]) -> list[dict[str, Any]]:
    """The mini-batches that each strategy needs for `EARLY_LOSS`, relative to one learner, by number of learners: the
    mean over seeds, and the ends of its interval, of which the lower is at least half the smallest ratio."""
    alone = fastest(found, "one", EARLY_LOSS)
    arms = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))["compare"]["arms"]
    needs: dict[str, dict[str, Any]] = {}
    for name, given in arms.items():
        arm, _, learners = name.rpartition("-")
        best = fastest(found, name, EARLY_LOSS)
        if arm and alone and best:
            ratios = [point.samples / alone.points[seed].samples for seed, point in best.points.items()]
            need = estimate(ratios)
            low = max(need.mean - (need.half or 0.0), min(ratios) / 2)
            own = needs.setdefault(arm, {"strategy": _named(given["strategy"]), "needs": {}})
            own["needs"][learners] = [round(each, 3) for each in (need.mean, low, need.mean + (need.half or 0.0))]
    return list(needs.values())


def _named(strategy: str | dict[str, Any]) -> dict[str, Any]:
    return {"name": strategy} if isinstance(strategy, str) else strategy


TABLES: Mapping[str, Callable[[Sequence[CellResult]], list[list[str]]]] = {
    "stragglers": stragglers,
    "speed-up": speed_up,
    "tuning": tuning,
    "summed": summed,
    "equal-steps": equal_steps,
}
"""Functions that return the tables of a page, each a list of lines."""


def main() -> None:
    """Print the tables of a study, or with `--plan` write what `starling plan` tells of the study of speed-up."""
    if sys.argv[1:] == ["--plan"]:
        PLAN.write_text(json.dumps(data_needs(cells("speed-up")), indent=1) + "\n", encoding="utf-8")
        return
    for study in sys.argv[1:]:
        print("\n\n".join("\n".join(lines) for lines in TABLES[study](cells(study))))


if __name__ == "__main__":
    main()
