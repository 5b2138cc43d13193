"""Curves of a comparison as SVG, the same bytes for the same results."""

import re
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starling.comparing.results import CellResult
from starling.comparing.table import Comparison

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#e69f00", "#cc79a7", "#56b4e9", "#999933")
"""Okabe & Ito's, which colour-blind people can tell apart; an arm has a colour."""
_DASHES: tuple[Any, ...] = ("-", (0, (4, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)), (0, (8, 3)))
"""A number of learners has a kind of line."""
_STYLE: Any = {
    "svg.hashsalt": "starling",
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
_FINE = re.compile(r"(\d\.\d)\d+(?=\s)")
"""Digits of a coordinate below a tenth of a point: they cannot be seen, and make half of a file."""


def draw_curves(comparison: Comparison) -> list[Path]:
    """Draw `curves.svg`, or `curves-<setting>.svg` for each setting: training loss against samples and against time.

    Lines are means over the seeds at each row's best rate, shades the lowest and the highest of them.
    """
    import matplotlib as mpl

    files = []
    with mpl.rc_context(_STYLE):
        for setting in comparison.section.settings or ("",):
            files.append(comparison.folder / f"curves{f'-{setting}' if setting else ''}.svg")
            _draw(comparison, setting, files[-1])
    return files


def _draw(comparison: Comparison, setting: str, file: Path) -> None:
    from matplotlib.figure import Figure

    rows = [row for row in comparison.section.rows if row.setting == setting]
    arms, counts = ([*dict.fromkeys(key)] for key in zip(*((row.arm, row.learners) for row in rows), strict=True))
    figure = Figure(figsize=(7.4, 3.2 + 0.17 * len(rows) / 3), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    lines: dict[str, Any] = {}
    for row in rows:
        for axes, field in zip(panels, ("samples", "seconds"), strict=True):
            line = _plot(axes, comparison.at_best(row), field)
            if line is not None:
                line.set(color=_COLOURS[arms.index(row.arm) % len(_COLOURS)])
                line.set(linestyle=_DASHES[counts.index(row.learners) % len(_DASHES)])
                lines.setdefault(f"{row.arm}, {row.learners}", line)
    late = [point.loss for row in rows for each in comparison.at_best(row) for point in each.curve if point.share > 0.1]
    for axes, title in zip(panels, ("samples", "seconds"), strict=True):
        axes.set_xlabel(title)
        axes.set_ylim(min([0.0, *late]), max([0.0, *late]) * 1.1 or 1.0)
        if comparison.section.target is not None:
            axes.axhline(comparison.section.target, color="#888888", linewidth=0.8)
    figure.suptitle(f"{setting}: training loss" if setting else "training loss", x=0.01, ha="left", fontsize=10)
    figure.legend(list(lines.values()), list(lines), loc="outside lower center", ncols=3, frameon=False)
    drawing = StringIO()
    figure.savefig(drawing, format="svg", metadata={"Date": None, "Creator": None})
    file.write_text(_FINE.sub(r"\1", drawing.getvalue()), encoding="utf-8")


def _plot(axes: "Axes", results: list[CellResult], field: str) -> Any:
    """The curve of a row: the mean of its seeds, as far as all of them went."""
    points = [{point.share: point for point in result.curve} for result in results]
    shares = sorted(set.intersection(*(set(each) for each in points)))
    if not shares:
        return None
    along = [sum(getattr(each[share], field) for each in points) / len(points) for share in shares]
    losses = [[each[share].loss for each in points] for share in shares]
    axes.fill_between(along, [min(each) for each in losses], [max(each) for each in losses], color="#888", alpha=0.15)
    (line,) = axes.plot(along, [sum(each) / len(each) for each in losses], linewidth=1.4)
    return line
