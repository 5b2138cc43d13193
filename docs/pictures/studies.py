"""Pictures of studies, from what `starling compare` kept of them.

`python docs/pictures/studies.py stragglers exp/stragglers FILE.svg`, and so with `topology` and `large-batches`. For
`speed-up`, `tuning` and `summed`, the folder is that of the study in docs/results, which has the cells.
"""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.study_cells import read
from benchmarks.study_tables import EARLY_LOSS, EQUAL_STEPS, LOSS, SPEED_UP, at_best, batch_of, fastest, rate_errors
from starling.comparing.grid import CellResult
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
    "hadpsgd": "#e69f00",
}
STEPS = 100
"""Of each learner in the study of topologies."""
STEPS_OF_LARGE_BATCHES = 209

Rows = list[dict[str, Any]]


def stragglers(rows: Rows) -> Figure:
    """Simulated seconds to the target loss against how slow a learner is; a panel for each number of learners."""
    figure = Figure(figsize=(7.4, 3.2), layout="constrained")
    counts = sorted({row["learners"] for row in rows})
    panels = figure.subplots(1, len(counts), sharey=True)
    for axes, count in zip(panels, counts, strict=True):
        for arm in ("allreduce", "delay-by-one", "dpsgd", "adpsgd", "ring", "server"):
            points = sorted(
                (1 if row["setting"] == "equal" else int(row["setting"].removeprefix("slow-")), row["target_seconds"])
                for row in rows
                if row["arm"] == f"{arm}-{count}" and row["target_seconds"] is not None
            )
            if points:
                colour = COLOURS["hadpsgd" if arm == "ring" else arm]  # as adpsgd, a ring would have the same colour
                axes.loglog(*zip(*points, strict=True), "o-", color=colour, markersize=3, linewidth=1.2, label=arm)
        axes.set_title(f"{count} learners", fontsize=9)
        axes.set_xlabel("one learner is slower by")
    panels[0].set_ylabel("simulated seconds to the target")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
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


def large_batches(rows: Rows) -> Figure:
    """Word error rate against global batch, each arm at its best rate; in a panel, rates against the global batch."""
    figure = Figure(figsize=(7.4, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    arms = [arm for arm in dict.fromkeys(row["arm"] for row in rows) if not arm.endswith("-rule")]
    for number, arm in enumerate(arms):
        own = [row for row in rows if row["arm"] == arm]
        batches = [int(row["setting"].removeprefix("batch-")) * 1.03 ** (number - len(arms) / 2) for row in own]
        colour = COLOURS.get(arm, "#999999")
        wer, half = ([row[key] for row in own] for key in ("value", "value_half"))
        left.errorbar(batches, wer, half, fmt="o-", color=colour, markersize=3, capsize=2, linewidth=1.0, label=arm)
        right.plot(batches, [row["rate"] for row in own], "o-", color=colour, markersize=3, linewidth=1.0)
    sizes = sorted({int(row["setting"].removeprefix("batch-")) for row in rows})
    right.plot(sizes, [3 * size / 64 for size in sizes], ":", color="#666666", label="linear scaling from 3 at 64")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
        axes.set_xlabel("global batch, sub-sequences")
    right.set_yscale("log", base=2)
    left.set_ylabel("word error rate, %")
    right.set_ylabel("best learning rate")
    right.legend(frameon=False, fontsize=8)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
    return figure


def speed_up(cells: Sequence[CellResult]) -> Figure:
    """Speed-up against the number of learners, to an early and to a lower loss, with linear speed-up and the published
    one."""
    figure = Figure(figsize=(7.4, 3.8), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, target in zip(panels, (EARLY_LOSS, LOSS), strict=True):
        alone = fastest(cells, "one", target)
        for number, (arm, name) in enumerate(SPEED_UP.items()):
            found = {count: fastest(cells, f"{arm}-{count}", target) for count in (8, 32, 128)}
            points = {count: each.speed_up(alone) for count, each in found.items() if each and alone}
            places = [count * 1.05 ** (number - 3.5) for count in points]
            axes.errorbar(
                places,
                [each.mean for each in points.values()],
                [each.half or 0.0 for each in points.values()],
                fmt="o-",
                color=mpl.colormaps["tab10"](number),
                markersize=3,
                capsize=2,
                linewidth=1.0,
                label=name.replace("`", ""),
            )
        axes.plot([1, 128], [1, 128], "k:", linewidth=1.0, label="linear")
        axes.vlines(64, 37, 40, color="#000000", linewidth=4, label="published: 37 to 40")
        axes.set(xscale="log", yscale="log", xlabel="learners", title=f"to a loss of {target:g}")
        axes.set_xticks([1, 8, 32, 128], ["1", "8", "32", "128"])
        axes.set_yticks([1, 2, 4, 8, 16, 32, 64, 128], ["1", "2", "4", "8", "16", "32", "64", "128"])
        axes.minorticks_off()
    panels[0].set_ylabel("speed-up over one learner")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8, columnspacing=1.0)
    return figure


def tuning(cells: Sequence[CellResult]) -> Figure:
    """Validation error of two optimizers against the learning rate, in multiples of the best; a panel per network."""
    figure = Figure(figsize=(7.4, 3.2), layout="constrained")
    networks = sorted({each.cell.setting for each in cells})
    panels = figure.subplots(1, len(networks), sharey=True)
    for axes, network in zip(panels, networks, strict=True):
        for arm, colour in (("adam", "#d55e00"), ("nesterov", "#0072b2")):
            errors = rate_errors([each for each in cells if (each.cell.setting, each.cell.arm) == (network, arm)])
            best = min(errors, key=lambda rate: errors[rate].mean)
            means = [each.mean for each in errors.values()]
            label = f"{arm}, best at {best:g}"
            axes.loglog([rate / best for rate in errors], means, "o-", color=colour, markersize=3, label=label)
        axes.set(xlabel="learning rate / best rate", title=network)
        axes.legend(frameon=False, fontsize=8)
    panels[0].set_ylabel("validation WER, %")
    return figure


def summed(cells: Sequence[CellResult]) -> Figure:
    """Training loss against simulated seconds, each arm at its fastest rate, with a thin line for each seed."""
    figure = Figure(figsize=(7.4, 3.4), layout="constrained")
    axes = figure.subplots()
    for arm, colour in (("synchronous", "#000000"), ("asynchronous", "#d55e00"), ("summed", "#0072b2")):
        best = fastest(cells, arm, 1.0)
        own = [each for each in cells if best and (each.cell.arm, each.cell.rate) == (arm, best.rate)]
        for number, each in enumerate(own):
            points = [(point.seconds, point.loss) for point in each.curve]
            label = None if number else f"{arm}, rate {each.cell.rate:g}"
            axes.semilogy(*zip(*points, strict=True), color=colour, linewidth=0.9, label=label)
    axes.set(xlabel="simulated seconds", ylabel="training loss, nats per frame")
    axes.legend(frameon=False)
    return figure


def equal_steps(cells: Sequence[CellResult]) -> Figure:
    """Training loss against steps, means over seeds at the rate with the best validation; a panel for each batch."""
    figure = Figure(figsize=(7.4, 5.4), layout="constrained")
    settings = sorted({each.cell.setting for each in cells}, key=batch_of)
    panels = list(figure.subplots(2, 2, sharex=True, sharey=True).flat)
    for axes, setting in zip(panels, [each for each in settings if not each.startswith("one")], strict=True):
        lines = [(setting, arm, name.replace("`", "")) for arm, name in EQUAL_STEPS.items()]
        lines += [(each, "allreduce", "one learner, batch of 64") for each in settings if each.startswith("one")]
        for number, (batch, arm, name) in enumerate(lines):
            if own := at_best([each for each in cells if (each.cell.setting, each.cell.arm) == (batch, arm)]):
                curves = [[point.loss for point in each.curve] for each in own]
                steps = [point.share * STEPS_OF_LARGE_BATCHES for point in own[0].curve]
                style = {"linewidth": 1.1, "color": mpl.colormaps["tab10"](number)}
                axes.semilogy(steps, [fmean(each) for each in zip(*curves, strict=True)], label=name, **style)
        axes.set_title(f"batch of {batch_of(setting)}", fontsize=9)
        axes.set_yticks(losses := [0.8, 1, 1.5, 2, 3, 4], [f"{each:g}" for each in losses])
        axes.set_yticks([], minor=True)
    for axes in panels[2:]:
        axes.set_xlabel("steps")
    figure.supylabel("training loss, nats per frame", fontsize=9)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    return figure


OF_CELLS: dict[str, Callable[[Sequence[CellResult]], Figure]] = {
    "speed-up": speed_up,
    "tuning": tuning,
    "summed": summed,
    "equal-steps": equal_steps,
}
DRAWINGS: dict[str, Callable[[Rows], Figure]] = {
    "stragglers": stragglers,
    "topology": topology,
    "large-batches": large_batches,
}


def main() -> None:
    """Draw what the arguments name."""
    study, folder, file = sys.argv[1:]
    with mpl.rc_context({"svg.hashsalt": "starling", "svg.fonttype": "none", "font.size": 9}):
        if study in OF_CELLS:
            figure = OF_CELLS[study](read(Path(folder) / "cells.jsonl"))
        else:
            figure = DRAWINGS[study](json.loads((Path(folder) / "results.json").read_text(encoding="utf-8"))["rows"])
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    main()
