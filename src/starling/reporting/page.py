"""The report page: one HTML file that shows experiments and needs nothing else to be read."""

import base64
import gzip
import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from plotly import graph_objects as go
from plotly.offline import get_plotlyjs

from starling.reporting import figures
from starling.reporting.evidence import Evidence, Section
from starling.reporting.lines import duration

_TEMPLATE = Path(__file__).parent / "page.html.jinja"


def render(experiments: Sequence[Evidence], made: str) -> str:
    """The page that shows experiments; `made` says when it was made.

    Plotly's script is in it once, compressed, and the browser unpacks it. All text is escaped,
    and a content security policy in the page refuses every request.
    """
    drawn: dict[str, go.Figure | None] = {
        "time": figures.loss_by_time(experiments),
        "samples": figures.loss_by_samples(experiments),
        "validation": figures.validation(experiments),
        "speed-up": figures.speed_up(experiments),
        "staleness": figures.staleness(experiments),
        "consensus": figures.consensus(experiments),
    }
    timelines = {
        f"timeline-{place}": (each, figures.timeline(each, figures.MAX_STRETCHES // len(experiments)))
        for place, each in enumerate(experiments)
    }
    drawn |= {name: figure for name, (_, figure) in timelines.items()}
    specs = "{" + ",".join(f"{json.dumps(name)}:{figure.to_json()}" for name, figure in drawn.items() if figure) + "}"
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["duration"] = duration
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        title=", ".join(each.label for each in experiments),
        experiments=experiments,
        figures={name for name, figure in drawn.items() if figure},
        timelines=[(name, each) for name, (each, figure) in timelines.items() if figure],
        max_rows=figures.MAX_ROWS,
        missing=lambda section: _missing(experiments, section),
        scored=[(each, scored) for each in experiments for scored in each.sets],
        specs=Markup(specs.replace("<", "\\u003c").replace("&", "\\u0026")),
        plotly=Markup(base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()),
        made=made,
        version=version("starling-asr"),
    )


def _missing(experiments: Sequence[Evidence], section: Section) -> list[tuple[str, str]]:
    """Label and sentence of the experiments that lack a part of the page."""
    return [(each.label, each.missing[section]) for each in experiments if section in each.missing]
