"""A plan for people: a table, the recommendation, crossing points, and what all of it rests on."""

from collections.abc import Iterator

from rich.table import Table

from starling.predict.deciding import TIE
from starling.predict.plan import Forecast, Plan

_COLUMNS = (
    "strategy",
    "learners",
    "h/epoch",
    "h/run",
    "interval",
    "compute",
    "wait",
    "exchange",
    "MB/s",
    "stale",
    "memory",
    "cost",
)


def table(plan: Plan) -> Table:
    """The rows of a plan; the recommended one is bold."""
    made = Table(*_COLUMNS, title="Predicted")
    has_memory = any(row.memory_gigabytes is not None for row in plan.rows)
    has_cost = any(row.cost is not None for row in plan.rows)
    made.columns[-2].max_width = None if has_memory else 6
    for row in plan.rows:
        style = "bold" if row == plan.recommended else None
        made.add_row(*_cells(row, has_cost), style=style)
    return made


def _cells(row: Forecast, has_cost: bool) -> list[str]:
    return [
        str(row),
        str(row.learners),
        f"{row.hours_per_epoch:.3g}",
        f"{row.hours:.3g}",
        f"{row.hours_low:.3g} to {row.hours_high:.3g}",
        f"{row.computing:.0%}",
        f"{row.waiting:.0%}",
        f"{row.exchanging:.0%}",
        f"{row.megabytes_per_second:.3g}",
        f"{row.staleness_mean:.2g} (≤ {row.staleness_95})",
        "" if row.memory_gigabytes is None else f"{row.memory_gigabytes:.2g} GB",
        "" if not has_cost or row.cost is None else f"{row.cost:,.2f}",
    ]


def lines(plan: Plan, explains: bool) -> Iterator[str]:
    """What stands below the table; with `explains`, also what the columns mean and what was assumed."""
    yield f"recommended: {plan.recommended}"
    yield from (f"  {line}" for line in plan.reason)
    if plan.crossings:
        yield f"crossing points (another strategy makes more progress, by more than {TIE:.0%}):"
        yield from (f"  {crossing}" for crossing in plan.crossings)
    else:
        yield "crossing points: none within 1,000 times the bandwidth and 100 times the slowness, or none asked for"
    if not explains:
        yield from (f"note: {note}" for note in plan.notes if "left out" in note or "rank of" in note)
        return
    yield "what this rests on:"
    yield from (f"  {note}" for note in plan.notes)
    yield from (f"  {line}" for line in _EXPLANATIONS)


_EXPLANATIONS = (
    "hours: the steady speed of the strategy's own text on the simulated clock, the median of 3 seeds",
    "interval: these seeds, the 95 % interval of the gradient time, and the error of the last validation",
    "wait: what is left of the waiting where every message arrives at once; exchange: what a faster link would end",
    "MB/s: what a learner sends in a second of the run; stale: mean staleness, and the 95 % quantile",
    "recommended: the most progress, which is speed times what a mini-batch is worth, or, within 5 % of that, the "
    "strategy whose mini-batches are worth most",
)
