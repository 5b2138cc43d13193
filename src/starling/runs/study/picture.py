"""Curves of a study as SVG, the same bytes for the same results."""

import re
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starling.runs.study.arms import ARMS
from starling.runs.study.results import CellResult, Outcomes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {
    "one": "#000000",
    "batch": "#0072b2",
    "delay": "#e69f00",
    "asynchronous": "#d55e00",
    "summed": "#009e73",
}
"""Okabe & Ito's, which colour-blind people can tell apart."""
_STYLE: Any = {
    "svg.hashsalt": "starling",
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
_FINE = re.compile(r"(\d\.\d)\d+(?=\s)")
"""Digits of a coordinate below a tenth of a point: they cannot be seen, and make half of a file."""
_PANEL = (3.4, 2.5)  # inches


def draw_curves(outcomes: Outcomes, folder: Path) -> list[Path]:
    """Draw `curves-<model>-<optimizer>.svg` into a folder: a row for each warm-up, a column for each number of workers.

    Lines are means over seeds, shades the lowest and the highest of them.
    """
    import matplotlib as mpl

    files = []
    with mpl.rc_context(_STYLE):
        for model in outcomes.models:
            for optimizer in outcomes.optimizers:
                files.append(folder / f"curves-{model}-{optimizer}.svg")
                _draw(outcomes, model, optimizer, files[-1])
    return files


def _draw(outcomes: Outcomes, model: str, optimizer: str, file: Path) -> None:
    from matplotlib.figure import Figure

    columns = outcomes.workers
    width, height = _PANEL[0] * len(columns), _PANEL[1] * len(outcomes.warmups) + 0.5
    figure = Figure(figsize=(width, height), layout="constrained")
    panels = figure.subplots(len(outcomes.warmups), len(columns), squeeze=False, sharex=True, sharey=True)
    lines: dict[str, Any] = {}
    for warmup, row in zip(outcomes.warmups, panels, strict=True):
        for workers, axes in zip(columns, row, strict=True):
            for arm in outcomes.arms:
                line = _plot(axes, outcomes.of((model, optimizer, warmup), arm, workers), _COLOURS[arm])
                if line is not None:
                    lines.setdefault(arm, line)
            number = f"{workers} workers, " if workers else ""
            axes.set_title(f"{number}warm-up {warmup:g}", loc="left", fontsize=9)
            axes.set_ylim(0.0, _ceiling(outcomes, model, optimizer))
    figure.suptitle(f"{model}, {optimizer}: training loss", x=0.01, ha="left", fontsize=10, fontweight="bold")
    for axes in panels[-1]:
        axes.set_xlabel("share of the budget spent")
    names = [arm if ARMS[arm].depends else f"{arm} learner" for arm in lines]
    figure.legend(list(lines.values()), names, loc="outside lower center", ncols=len(lines), frameon=False)
    drawing = StringIO()
    figure.savefig(drawing, format="svg", metadata={"Date": None, "Creator": None})
    file.write_text(_FINE.sub(r"\1", drawing.getvalue()), encoding="utf-8")


def _plot(axes: "Axes", results: list[CellResult], colour: str) -> Any:
    """The curve of an arm: the mean of its seeds, as far as all of them went."""
    if not results:
        return None
    points = [dict(result.curve) for result in results]
    shares = sorted(set.intersection(*(set(each) for each in points)))
    losses = [[each[share] for each in points] for share in shares]
    axes.fill_between(shares, [min(each) for each in losses], [max(each) for each in losses], color=colour, alpha=0.15)
    (line,) = axes.plot(shares, [sum(each) / len(each) for each in losses], color=colour, linewidth=1.4)
    return line


def _ceiling(outcomes: Outcomes, model: str, optimizer: str) -> float:
    """The top of the axis: a little above the highest loss after the first tenth of the budget."""
    own = [each for each in outcomes.results if (each.cell.model, each.cell.optimizer) == (model, optimizer)]
    late = [loss for result in own for share, loss in result.curve if share > 0.1]
    return min(1.1 * max(late, default=1.0), 5.0)
