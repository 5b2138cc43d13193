"""The report page: one HTML file that shows experiments and needs nothing else to be read, with plotly's figures."""

import base64
import gzip
import html
import json
import math
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from itertools import chain, groupby
from operator import attrgetter
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from numpy.typing import NDArray
from plotly import graph_objects as go
from plotly.offline import get_plotlyjs

from starling.launch.messages import Stretch
from starling.reporting.epochs import SPENT, duration, merged
from starling.reporting.evidence import CurvePoint, Evidence, Seconds, newest

_TEMPLATE = Path(__file__).parent / "page.html.jinja"
COLOURS = ("#3b82c4", "#e07b39", "#3a9d5d", "#b05cc6", "#c9a227", "#d1495b", "#5aa9a5", "#8d6e63")
"""Colours of experiments, readable on white and on black."""
COLOURS_OF_TIME = ("#3a9d5d", "#e0a539", "#d1495b")
"""Colours of computing, waiting for data, and waiting for peers."""
MAX_STRETCHES = 3000
"""Largest number of stretches in all timelines of a page together; each adds about 100 bytes to the page."""
MAX_ROWS = 64
"""Largest number of learners in one timeline."""
UNITS = {"h": 3600.0, "min": 60.0, "s": 1.0}
"""Units of time axes, in seconds."""
_WINDOW = 20
"""The timeline's buttons zoom to the duration of the first learner's first `_WINDOW` + 1 stretches."""


def render(experiments: Sequence[Evidence], made: str) -> str:
    """The page that shows experiments; `made` says when it was made.

    Plotly's script is in it once, compressed, and the browser unpacks it. All text is escaped,
    and a content security policy in the page refuses every request.
    """
    unit = unit_of_time(experiments)
    drawn: dict[str, go.Figure] = {
        "time": loss_by_time(experiments, unit),
        "samples": loss_by_samples(experiments),
        "validation": validation(experiments),
        "speed-up": speed_up(experiments),
        "staleness": staleness(experiments),
        "consensus": consensus(experiments),
    }
    most = MAX_STRETCHES // len(experiments)
    drawn |= {f"timeline-{place}": timeline(each, most, unit) for place, each in enumerate(experiments)}
    figures = {name: figure for name, figure in drawn.items() if figure.data}
    specs = "{" + ",".join(f"{json.dumps(name)}:{figure.to_json()}" for name, figure in figures.items()) + "}"
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["duration"] = duration
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        title=", ".join(each.label for each in experiments),
        experiments=experiments,
        figures=set(figures),
        timelines=[(name, each) for place, each in enumerate(experiments) if (name := f"timeline-{place}") in figures],
        max_rows=MAX_ROWS,
        missing=lambda part: [(each.label, each.missing[part]) for each in experiments if part in each.missing],
        scored=[(each, scored) for each in experiments for scored in each.sets],
        specs=Markup(specs.replace("<", "\\u003c").replace("&", "\\u0026")),
        plotly=Markup(base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()),
        made=made,
        version=version("starling-asr"),
    )


def unit_of_time(experiments: Sequence[Evidence]) -> str:
    """The unit of all time axes of a page: the largest one of which the longest run lasts more than three."""
    ends = [point.seconds or 0.0 for each in experiments for point in each.curve]
    longest = max([*ends, *(each.whole.seconds for each in experiments)])
    return next(name for name, seconds in UNITS.items() if longest > 3.0 * seconds or name == "s")


def loss_by_time(experiments: Sequence[Evidence], unit: str = "s") -> go.Figure:
    """Training loss against the time of training, in a unit of `UNITS`."""
    shown = [each for each in experiments if each.curve and each.curve[0].seconds is not None]
    drawing = _Drawing(f"{_clock(shown)}, {unit}", _loss(shown), experiments)
    for each in shown:
        drawing.losses(each, each.curve, [(point.seconds or 0.0) / UNITS[unit] for point in each.curve])
    drawing.scale_losses(shown)
    return drawing


def loss_by_samples(experiments: Sequence[Evidence]) -> go.Figure:
    """Training loss against mini-batches; a button shows it against utterances, if these are recorded."""
    shown = [each for each in experiments if each.curve]
    drawing, unit = _Drawing("mini-batches of all learners", _loss(shown), experiments), _unit_of_examples(shown)
    x: dict[str, list[list[float]]] = {"mini-batches": [], unit: []}
    for each in shown:
        steps, examples = [point.step for point in each.curve], [point.examples or 0 for point in each.curve]
        x["mini-batches"] += drawing.losses(each, each.curve, steps)
        x[unit] += _x_of_losses(each.curve, examples)
    if shown and all(point.examples is not None for each in shown for point in each.curve):
        drawing.buttons(
            {label: [{"x": own}, {"xaxis.title.text": f"{label} of all learners"}] for label, own in x.items()}
        )
    drawing.scale_losses(shown)
    return drawing


def validation(experiments: Sequence[Evidence]) -> go.Figure:
    """Word error rate on the set that is scored during training, epoch by epoch."""
    names = {str(each["set"]) for one in experiments for each in newest(one.events, "validation") if "set" in each}
    drawing = _Drawing("epochs", f"WER on {', '.join(sorted(names))}, %", experiments)
    drawing.update_yaxes(autorangeoptions={"include": [0, 1]})
    for each in experiments:
        drawing.line(each, each.validations, "lines+markers")
    return drawing


def speed_up(experiments: Sequence[Evidence]) -> go.Figure:
    """Throughput relative to the experiments with the fewest learners, beside the ideal line. It is empty if all have
    the same number of learners, or some clocks are real and others simulated."""
    shown = sorted((each for each in experiments if each.throughput), key=attrgetter("strategy", "learners"))
    if len({each.learners for each in shown}) < 2 or len({each.is_virtual for each in shown}) > 1:
        return go.Figure()
    fewest, most = min(each.learners for each in shown), max(each.learners for each in shown)
    base = mean(each.throughput or 0.0 for each in shown if each.learners == fewest) / fewest
    figure = _Drawing("learners", f"throughput, relative to {fewest} learner{'s' * (fewest > 1)}", experiments)
    for place, (strategy, group) in enumerate(groupby(shown, attrgetter("strategy"))):
        points = list(group)
        figure.add_scatter(
            x=[each.learners for each in points],
            y=[(each.throughput or 0.0) / base / fewest for each in points],
            text=[_safe(each.label) for each in points],
            name=_safe(strategy),
            mode="lines+markers",
            line_color=COLOURS[place % len(COLOURS)],
            hovertemplate="%{text}: %{x} learners, %{y:.2f} times",
        )
    ends = [fewest, most]
    figure.add_scatter(
        x=ends, y=[end / fewest for end in ends], name="ideal", mode="lines", line={"dash": "dot", "color": "#888888"}
    )
    figure.update_xaxes(tickvals=sorted({each.learners for each in shown}))
    figure.update_yaxes(rangemode="tozero")
    return figure


def timeline(experiment: Evidence, num_shown: int, unit: str = "s") -> go.Figure:
    """A chart of when each learner computed and when it waited, with at most `num_shown` stretches of up to `MAX_ROWS`
    learners. Its time axis begins where training began, and has a unit of `UNITS`."""
    learners = sorted({each.learner for each in experiment.stretches})[:MAX_ROWS]
    if not learners:
        return go.Figure()
    most, rows = max(1, num_shown // len(learners)), []
    for learner in learners:
        own = [each for each in experiment.stretches if each.learner == learner]
        size = math.ceil(len(own) / most)  # neighbours are merged until there are at most `most`
        rows.append([merged(own[place : place + size]) for place in range(0, len(own), size)])
    began = min(each.begin for each in experiment.stretches)
    height = max(200, 110 + 26 * len(learners))
    figure = _Drawing(f"{_clock([experiment])}, {unit}", "learner", [experiment], height)
    for kind, colour in zip(SPENT, COLOURS_OF_TIME, strict=True):
        words = kind.replace("_", " ")
        x, y, custom = _spans(rows, kind)
        if len(x):
            figure.add_scatter(
                x=(x - began) / UNITS[unit],
                y=y,
                customdata=custom,
                mode="lines",
                name=words,
                line={
                    "width": max(3, min(16, (height - 110) // len(learners) - 6)),
                    "color": colour,
                    "simplify": False,
                },
                hovertemplate=f"learner %{{customdata[0]}} {words} for %{{customdata[1]:.4~g}} s<br>mini-batch "
                "%{customdata[2]}%{customdata[3]}<extra></extra>",
            )
    tick_learners = learners if len(learners) <= 24 else learners[:: len(learners) // 12]
    figure.update_yaxes(
        tickvals=[learners.index(each) for each in tick_learners],
        ticktext=[str(each) for each in tick_learners],
        range=[len(learners) - 0.4, -0.6],
        fixedrange=True,
        showgrid=False,
    )
    figure.update_layout(hovermode="closest", dragmode="zoom")
    end = (max(row[-1].end for row in rows) - began) / UNITS[unit]
    figure.update_xaxes(range=[0.0, end])
    if len(rows[0]) > 2 * _WINDOW:
        width = (rows[0][_WINDOW].end - rows[0][0].begin) / UNITS[unit]
        views = {
            "whole run": [0.0, end],
            "beginning": [0.0, width],
            "middle": [(end - width) / 2, (end + width) / 2],
            "end": [end - width, end],
        }
        figure.buttons({label: [{"xaxis.range": window}] for label, window in views.items()}, "relayout")
    return figure


def staleness(experiments: Sequence[Evidence]) -> go.Figure:
    """The share of gradients with each staleness. It is empty if no gradient of any experiment has one above 0."""
    most = max((len(each.staleness) for each in experiments if any(each.staleness[1:])), default=0)
    if not most:
        return go.Figure()
    drawing = _Drawing("staleness, in changes of the weights", "gradients, %", experiments)
    for each in experiments:
        counts = {place: count for place, count in enumerate(each.staleness) if count}
        if counts:
            drawing.add_bar(
                x=list(counts),
                y=[100.0 * count / sum(counts.values()) for count in counts.values()],
                customdata=list(counts.values()),
                name=_safe(each.label),
                marker_color=drawing._colours[each.label],
                hovertemplate="staleness %{x}: %{y:.3~g} %, %{customdata} gradients",
            )
    drawing.update_layout(barmode="group", hovermode="closest")
    drawing.update_xaxes(range=[-0.6, most - 0.4], tick0=0, dtick=math.ceil(most / 10))
    return drawing


def consensus(experiments: Sequence[Evidence]) -> go.Figure:
    """Distance of the learners' weights from their mean."""
    drawing = _Drawing("mini-batches of all learners", "consensus distance", experiments)
    tens = []
    for each in experiments:
        if "consensus" not in each.missing:
            drawing.line(each, each.distances, "lines+markers")
            tens += [math.log10(distance) for _, distance in each.distances]
    low, high = (math.floor(min(tens)), math.floor(max(tens)) + 1) if tens else (0, 1)
    ticks = {"dtick": math.ceil((high - low) / 8), "exponentformat": "power"}  # no digits between powers of ten
    drawing.update_yaxes(type="log", range=[low, high], **ticks)
    return drawing


class _Drawing(go.Figure):  # type: ignore[misc]
    """A figure in which each experiment of the page has its own colour."""

    def __init__(self, x_title: str, y_title: str, experiments: Sequence[Evidence], height: int = 340) -> None:
        super().__init__()
        self._colours = {each.label: COLOURS[place % len(COLOURS)] for place, each in enumerate(experiments)}
        self.update_layout(
            template=None,
            height=height,
            margin={"l": 58, "r": 12, "t": 36, "b": 46},
            hovermode="x unified",
            legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
            showlegend=True,
            xaxis={"title": {"text": x_title, "standoff": 8}, "zeroline": False, "automargin": True},
            yaxis={"title": {"text": y_title, "standoff": 8}, "zeroline": False, "automargin": True},
        )

    def line(self, experiment: Evidence, points: Sequence[tuple[float, float]], mode: str = "lines") -> None:
        """Draw an experiment's line, if it has points."""
        if points:
            self.add_scatter(
                x=[x for x, _ in points],
                y=[y for _, y in points],
                mode=mode,
                name=_safe(experiment.label),
                legendgroup=_safe(experiment.label),
                line={"color": self._colours[experiment.label], "width": 1.8},
                hovertemplate="%{y:.4~g}",
            )

    def losses(self, experiment: Evidence, points: Sequence[CurvePoint], x: Sequence[float]) -> list[list[float]]:
        """Draw a line, and the area between the lowest and the highest of several runs; returns the x values of
        both."""
        self.line(experiment, list(zip(x, (point.loss for point in points), strict=True)))
        every = _x_of_losses(points, x)
        for area in every[1:]:
            colour = self._colours[experiment.label]
            self.add_scatter(
                x=area,
                y=[*(point.high for point in points), *(point.low for point in reversed(points))],
                mode="none",
                fill="toself",
                fillcolor=f"rgba({', '.join(str(int(colour[place : place + 2], 16)) for place in (1, 3, 5))}, 0.15)",
                hoverinfo="skip",
                legendgroup=_safe(experiment.label),
                showlegend=False,
            )
        return every

    def scale_losses(self, experiments: Sequence[Evidence]) -> None:
        """Use a logarithmic axis if the losses are positive and the largest is more than ten times the smallest."""
        points = [(point.loss, point.low) for each in experiments for point in each.curve]
        losses = [loss for loss in chain(*points) if loss is not None and math.isfinite(loss)]
        if losses and 0.0 < 10.0 * min(losses) < max(losses):
            tens = range(math.floor(math.log10(min(losses))), math.ceil(math.log10(max(losses))) + 1)
            ticks = [digit * 10.0**ten for ten in tens for digit in (1, 2, 5)]
            self.update_yaxes(type="log", tickvals=ticks, tickformat="~g")

    def buttons(self, arguments: Mapping[str, Sequence[Any]], method: str = "update") -> None:
        """Add buttons, each a label with the arguments of plotly's method."""
        height = self.layout.height
        self.update_layout(
            updatemenus=[
                {
                    "type": "buttons",
                    "showactive": False,
                    "direction": "right",
                    "buttons": [{"label": label, "method": method, "args": args} for label, args in arguments.items()],
                    "x": 0,
                    "xanchor": "left",
                    "y": 1.02,
                    "yanchor": "bottom",
                    "pad": {"t": 0, "b": 4},
                    "font": {"size": 11},
                }
            ],
            legend={"yref": "container", "y": 0.0},  # below the title of the x axis, in as many rows as it takes
            margin={"t": 40, "b": 92},
            height=height + 50,
        )


def _x_of_losses(points: Sequence[CurvePoint], x: Sequence[float]) -> list[list[float]]:
    return [[*x], [*x, *reversed(x)]] if points and points[0].low is not None else [[*x]]


def _spans(
    rows: Sequence[Sequence[Stretch]], attribute: str
) -> tuple[NDArray[np.float64], NDArray[np.int16], list[list[Any]]]:
    """The lines of one kind of time, each with begin, middle, end and a gap. A stretch ends with the computing of its
    gradient; the wait for peers, which follows the previous gradient, and the wait for data come before it."""
    x: list[float] = []
    y: list[int] = []
    custom: list[list[Any]] = []
    for place, row in enumerate(rows):
        for each in row:
            seconds: Seconds = getattr(each, attribute)
            behind = {"waiting_for_data": each.computing, "waiting_for_peers": each.computing + each.waiting_for_data}
            end = each.end - behind.get(attribute, 0.0)
            begin = max(each.begin, end - seconds)
            if end - begin <= 1e-6:
                continue
            more = f", with {each.batches - 1} before it" if each.batches > 1 else ""
            told = [each.learner, round(seconds, 6), each.step + 1, more]
            x += [round(begin, 5), round((begin + end) / 2, 5), round(end, 5), math.nan]
            y += [place] * 4
            custom += [told, told, told, []]
    return np.array(x), np.array(y, dtype=np.int16), custom


def _clock(experiments: Sequence[Evidence]) -> str:
    kinds = {each.is_virtual for each in experiments}
    if kinds == {True}:
        return "simulated time"
    return "time of training" if kinds == {False} else "time of training, real or simulated"


def _loss(experiments: Sequence[Evidence]) -> str:
    units = {each.loss_unit for each in experiments}
    return f"training loss per {unit}" if len(units) == 1 and (unit := units.pop()) else "training loss"


def _unit_of_examples(experiments: Sequence[Evidence]) -> str:
    units = {each.unit for each in experiments}
    return units.pop() if len(units) == 1 else "examples"


def _safe(text: str) -> str:
    """The text without the HTML that plotly would interpret."""
    return html.escape(text, quote=False)
