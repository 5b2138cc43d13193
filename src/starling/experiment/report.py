"""`starling report`: one HTML page that shows experiments, from the contents of their folders."""

import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, groupby
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import Any

from starling.errors import ConfigError, DataError, StarlingError, require
from starling.events import Event, read_events
from starling.experiment.folder import ExperimentFolder, existing
from starling.experiment.record import read_timeline
from starling.experiment.task import task_of
from starling.files import replace_file, writing
from starling.launch.messages import Status, Stretch, decode_file
from starling.recipe import Tree, read_recipe
from starling.reporting.epochs import merged
from starling.reporting.evidence import CurvePoint, Evidence, ScoredSet, Section, is_number, newest
from starling.reporting.progress import Say
from starling.strategies import STRATEGIES

PAGE = "report.html"
MAX_POINTS = 100
"""Largest number of points of one experiment's loss curve: with more, the noise of single mini-batches hides the
curve."""


@dataclass(frozen=True)
class Report:
    """A page that was written, and its contents."""

    path: Path
    experiments: tuple[Evidence, ...]


def report(experiments: Path | str | Sequence[Path | str], output: Path | str | None = None) -> Report:
    """Write one self-contained HTML page that shows one or several experiments, real or simulated.

    Data that an experiment did not record are left out, and the page says so. For a comparison, the page shows the
    training losses: for each row of its table, the mean over seeds.

    Args:
        experiments: Folders that `starling train`, `starling simulate`, `starling compare` or `starling.train` wrote.
        output: The path of the page; None writes `report.html` to the experiment's folder, or to the current one for
            several.

    Raises:
        ConfigError: A folder is no experiment, or the page cannot be written.
        MissingExtraError: plotly is not installed; the extra `report` installs it.

    Example:
        >>> starling.report(["exp/sync", "exp/async"], "strategies.html").path  # doctest: +SKIP
    """
    require("report", "starling report")
    from starling.reporting.page import render

    given = [experiments] if isinstance(experiments, Path | str) else list(experiments)
    paths = list(dict.fromkeys(map(Path, given)))
    if not paths:
        raise ConfigError("starling report: name an experiment, such as exp/demo")
    page = Path(output) if output is not None else (paths[0] / PAGE if len(paths) == 1 else Path(PAGE))
    found: tuple[Evidence, ...] = ()
    for path, label in zip(paths, _labels(paths), strict=True):
        comparison = _read_comparison(path)
        found += _rows_of(path, label, comparison) if comparison else (collect(existing(path), label),)
    text = render(found, time.strftime("%Y-%m-%d %H:%M"))
    with writing(page, "give another place with --output"):
        page.parent.mkdir(parents=True, exist_ok=True)
        replace_file(page, text)
    return Report(page, found)


def write_report(experiments: Sequence[Path], output: Path | None, tell: Say) -> None:
    """Write the page, and print its path and what is missing from it."""
    written = report(experiments, output)
    for each in written.experiments:
        for sentence in each.missing.values():
            tell(f"{each.label}: {sentence}")
    tell(f"wrote {written.path} ({written.path.stat().st_size / 1e6:.1f} MB)")


def collect(folder: ExperimentFolder, label: str) -> Evidence:
    """The evidence in an experiment's folder. Raises ConfigError for a config.yaml that cannot be read; anything else
    that is missing or damaged is left out, with a sentence."""
    settings = read_recipe(folder.config)
    strategy, has_one_model = _strategy(settings)
    events, stretches = read_events(folder.log / "events.jsonl"), read_timeline(folder.seen)
    is_virtual = (folder.log / "virtual.log").is_file()
    missing: dict[Section, str] = {}
    found = Evidence(
        label=label,
        path=folder.path,
        strategy=strategy,
        learners=int(settings["learners"]) if isinstance(settings.get("learners"), int) else 1,
        is_virtual=is_virtual,
        outcome=_outcome(folder, events),
        unit="utterances" if "data" in settings else "examples",
        loss_unit={"ctc": "token", "frames": "frame"}.get(str(settings.get("loss")), "") if "data" in settings else "",
        events=events,
        stretches=stretches,
        curve=_curve_of(stretches or _read_tensorboard(folder.tensorboard)) or _curve_of_epochs(events),
        sets=_sets(folder, settings, missing),
        missing=missing,
    )
    drawn_from = "The loss is drawn from its TensorBoard curves or its epochs: it has no record of times."
    no_scores = "No WER by epoch: simulations score no valid set while they train." if is_virtual else None
    one_model = f"No consensus distance is drawn: {strategy} keeps learners' weights equal." if has_one_model else None
    parts: Sequence[tuple[Section, bool, str]] = (
        ("training", bool(found.curve and stretches), drawn_from if found.curve else "No training loss was recorded."),
        ("validation", bool(found.validations), no_scores or "No WER by epoch: no model was scored during training."),
        (
            "timeline",
            bool(stretches),
            "No timeline: the run did not record when its learners computed (seen/*/learner-*.jsonl).",
        ),
        (
            "staleness",
            any(found.staleness[1:]),
            "No staleness above 0: all gradients were computed at the newest weights."
            if found.staleness
            else "No staleness was recorded.",
        ),
        (
            "consensus",
            bool(found.distances) and not has_one_model,
            one_model or "No consensus distance is drawn: fewer than two above 0 were recorded before the end.",
        ),
        ("events", bool(events), "The run recorded no events (log/events.jsonl)."),
    )
    missing |= {section: sentence for section, is_there, sentence in parts if not is_there}
    return found


def _read_comparison(path: Path) -> Mapping[str, Any] | None:
    """The results of `starling compare`; None for any other folder."""
    try:
        content = json.loads((path / "results.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and {"compare", "rows", "cells"} <= content.keys() else None


def _rows_of(path: Path, label: str, comparison: Mapping[str, Any]) -> tuple[Evidence, ...]:
    """Each row of a comparison as if it were an experiment: its training loss at its best rate."""
    return tuple(
        Evidence(
            label=f"{label}: {row['setting']}{': ' * bool(row['setting'])}{row['arm']}, {row['learners']}",
            path=path,
            strategy=row["strategy"] or row["arm"],
            learners=row["learners"],
            is_virtual=comparison["compare"]["engine"] == "virtual",
            outcome=str(row["verdict"]),
            unit="examples",
            curve=tuple(_mean_curve([each for each in comparison["cells"] if row.items() >= _key_of(each).items()])),
        )
        for row in comparison["rows"]
    )


def _key_of(result: Event) -> Event:
    """The keys and values that a cell shares with its row at the row's best rate."""
    return {key: value for key, value in result["cell"].items() if key != "seed"}


def _mean_curve(cells: Sequence[Event]) -> Iterator[CurvePoint]:
    """The mean over the cells of several seeds, up to where the shortest of them ended."""
    curves = [{share: rest for share, *rest in cell["curve"]} for cell in cells]
    examples_per_batch = fmean(cell["num_samples"] / max(1, cell["num_gradients"]) for cell in cells)
    for share in sorted(set.intersection(*map(set, curves))):
        samples, seconds, losses = zip(*(curve[share] for curve in curves), strict=True)
        examples = fmean(samples)
        step = round(examples / examples_per_batch)
        spread = (min(losses), max(losses)) if len(losses) > 1 else (None, None)
        yield CurvePoint(fmean(seconds), step, round(examples), fmean(losses), *spread)


def _labels(paths: Sequence[Path]) -> list[str]:
    """The names of folders; with their paths if several have the same name."""
    names = [path.resolve().name for path in paths]
    return [name if names.count(name) == 1 else str(path) for name, path in zip(names, paths, strict=True)]


def _strategy(settings: Tree) -> tuple[str, bool]:
    """The strategy with its options as text, and whether it is one of Starling's strategies that keep the weights of
    all learners the same."""
    given = settings.get("strategy", "?")
    options = dict(given) if isinstance(given, dict) else {"name": given}
    name = str(options.pop("name", "?"))
    told = ", ".join(f"{key}={value}" for key, value in options.items())
    return f"{name} ({told})" if told else name, name in STRATEGIES and STRATEGIES[name].has_one_model


def _outcome(folder: ExperimentFolder, events: Sequence[Event]) -> str:
    last = next((each for each in reversed(events) if each["kind"] in ("start", "end")), None)
    if last is not None and last["kind"] == "end":
        code = last.get("exit_code")
        return f"{last.get('message', '')}" + (f" (exit code {code})" if code else "")
    with suppress(OSError, StarlingError):
        status = decode_file(Status, folder.status.read_bytes())
        if status.stage == "ended":
            return status.message
    return "no end on record: it still runs, or was killed" if last is not None else "not on record"


def _curve_of(found: Iterable[Stretch]) -> list[CurvePoint]:
    """The points of a loss curve over all learners; each is a mean over the same number of mini-batches, at least one
    per learner."""
    stretches = sorted(found, key=attrgetter("end"))
    begin = min((each.begin for each in stretches), default=0.0)
    size = max(len({each.learner for each in stretches}), math.ceil(merged(stretches).batches / MAX_POINTS))
    before = accumulate((each.batches for each in stretches), initial=0)
    parts = [merged(part) for _, part in groupby(stretches, lambda each: next(before) // size)]
    if len(parts) > 1 and 2 * parts[-1].batches < size:  # so few mini-batches would be mostly noise
        parts[-2:] = [merged(parts[-2:])]
    so_far = accumulate(parts, lambda *both: merged(both))
    return [
        CurvePoint(until.end - begin, until.step + 1, until.examples or None, part.loss)
        for part, until in zip(parts, so_far, strict=True)
        if part.frames
    ]


def _read_tensorboard(folder: Path) -> Iterator[Stretch]:
    """The points of learners' loss curves, each as if it were a stretch of one frame; no points without TensorBoard."""
    for place, learner in enumerate(sorted(folder.glob("learner-*"))):
        try:
            from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator
        except ModuleNotFoundError:
            return
        with suppress(Exception):  # of a damaged file TensorBoard may raise anything
            read = EventAccumulator(str(learner), {SCALARS: MAX_POINTS}).Reload()
            for each in read.Scalars("train/loss"):
                if math.isfinite(each.value):
                    yield Stretch(place, each.wall_time, step=each.step, batches=1, frames=1, losses=each.value)


def _curve_of_epochs(events: Sequence[Event]) -> list[CurvePoint]:
    return [
        CurvePoint(None, int(each["step"]), None, float(each["loss"]))
        for each in newest(events, "epoch")
        if is_number(each.get("loss")) and is_number(each.get("step"))
    ]


def _sets(folder: ExperimentFolder, settings: Tree, missing: dict[Section, str]) -> tuple[ScoredSet, ...]:
    """The sets that were scored greedily and by other searches, with audio if the prepared data are there."""
    files = sorted(folder.decode.rglob("recogs-*.txt"), key=lambda file: (file.name, len(file.parts), file))
    if not files:
        missing["scores"] = "No set was scored (`starling evaluate`)."
        return ()
    try:
        task = task_of(settings)
        task.require("the table of scores")
    except ConfigError as error:
        missing["scores"] = f"Scores are not shown: {error}."
        return ()
    sets = []
    problems: list[str] = []
    for file in files:
        try:
            scored, without = task.scored_set(folder, file)
        except (DataError, OSError) as error:
            missing["scores"] = f"A set is not shown: {error}."
            continue
        sets.append(scored)
        problems += [without] if without else []
    if problems:
        missing["audio"] = " ".join(dict.fromkeys(problems))
    return tuple(sets)
