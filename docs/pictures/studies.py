"""Pictures of the studies of stragglers and of topologies, from what `starling compare` kept of them.

`python docs/pictures/studies.py stragglers exp/stragglers FILE.svg`, and the same with `topology`.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from starling.topology import PATTERNS, distance_of_noise

COLOURS = {
    "allreduce": "#000000",
    "delay-by-one": "#cc79a7",
    "dpsgd": "#0072b2",
    "adpsgd": "#d55e00",
    "server": "#009e73",
    "ring": "#d55e00",
    "random": "#0072b2",
    "pairs": "#009e73",
    "exponential": "#cc79a7",
}
STEPS = 100
"""Of each learner in the study of topologies."""

Rows = list[dict[str, Any]]


def stragglers(rows: Rows) -> Figure:
    """Simulated seconds to the target loss against how slow a learner is; a panel for each number of learners."""
    figure = Figure(figsize=(7.4, 3.2), layout="constrained")
    counts = sorted({row["learners"] for row in rows})
    panels = figure.subplots(1, len(counts), sharey=True)
    for axes, count in zip(panels, counts, strict=True):
        for arm in ("allreduce", "delay-by-one", "dpsgd", "adpsgd", "server"):
            points = sorted(
                (1 if row["setting"] == "equal" else int(row["setting"].removeprefix("slow-")), row["target_seconds"])
                for row in rows
                if row["arm"] == f"{arm}-{count}" and row["target_seconds"] is not None
            )
            if points:
                axes.loglog(
                    *zip(*points, strict=True), "o-", color=COLOURS[arm], markersize=3, linewidth=1.2, label=arm
                )
        axes.set_title(f"{count} learners", fontsize=9)
        axes.set_xlabel("one learner is slower by")
    panels[0].set_ylabel("simulated seconds to the target")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    return figure


def topology(rows: Rows) -> Figure:
    """Consensus distance over the squared learning rate against what noise alone would keep up, and WER against it."""
    figure = Figure(figsize=(7.4, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    marks = {4: "o", 16: "s", 64: "D"}
    for row in rows:
        strategy, _, rest = row["arm"].partition("-")
        if strategy != "dpsgd" or row["consensus_distance"] is None:
            continue
        pattern = rest.rpartition("-")[0]
        predicted = distance_of_noise(PATTERNS[pattern](row["learners"], 1), STEPS)
        style = {"color": COLOURS[pattern], "marker": marks[row["learners"]], "linestyle": "none"}
        label = f"{pattern}, {row['learners']}"
        left.plot(predicted, row["consensus_distance"] / row["rate"] ** 2, label=label, **style)
        right.errorbar(predicted, row["value"], row["value_half"], capsize=2, **style)
    left.set_yscale("log")
    left.set_ylabel("consensus distance / rate²")
    right.set_ylabel("word error rate, %")
    for axes in (left, right):
        axes.set_xlabel("distance that noise keeps up")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
    return figure


DRAWINGS: dict[str, Callable[[Rows], Figure]] = {"stragglers": stragglers, "topology": topology}


def main() -> None:
    """Draw what the arguments name."""
    study, folder, file = sys.argv[1:]
    rows = json.loads((Path(folder) / "results.json").read_text(encoding="utf-8"))["rows"]
    with mpl.rc_context({"svg.hashsalt": "starling", "svg.fonttype": "none", "font.size": 9}):
        DRAWINGS[study](rows).savefig(file, format="svg", metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    main()
