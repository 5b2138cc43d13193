"""`starling report`: one HTML page that shows experiments, from what their folders hold."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from starling.errors import ConfigError, DataError, StarlingError
from starling.experiment.folder import ExperimentFolder, existing
from starling.experiment.seen import read_timeline
from starling.experiment.task import task_of
from starling.extras import require
from starling.files import replace_file
from starling.launch.messages import Status, decode_file
from starling.recipe.file import Tree, read_recipe
from starling.reporting.events import Event, read_events
from starling.reporting.evidence import CurvePoint, Evidence, Happening, ScoredSet, Section, Stretch, Validation
from starling.strategies import STRATEGIES

if TYPE_CHECKING:
    from starling.reporting.progress import Say

PAGE = "report.html"
MAX_POINTS = 100
"""Of one experiment's loss curve: with more, the noise of single mini-batches hides the curve."""
MAX_EVENTS = 200
"""Of one experiment's table of events: the first and the last ones."""


@dataclass(frozen=True)
class Report:
    """A page that was written, and what it shows."""

    path: Path
    experiments: tuple[Evidence, ...]


def report(experiments: Path | str | Sequence[Path | str], output: Path | str | None = None) -> Report:
    """Write one self-contained HTML page that shows one or several experiments, real or simulated.

    What an experiment did not record is left out, and the page says so. Of a comparison, the page shows the training
    losses: for each row of its table, the mean over seeds.

    Args:
        experiments: Folders that `starling train`, `starling simulate`, `starling compare` or `starling.train` wrote.
        output: The page; None: `report.html` in the experiment's folder, or in the current one for several.

    Raises:
        ConfigError: for a folder that is no experiment, or a page that cannot be written.
        MissingExtraError: without plotly, which the extra `report` installs.

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
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        replace_file(page, text)
    except OSError as error:
        raise ConfigError(
            f"{page}: the report cannot be written ({error}); give another place with --output"
        ) from error
    return Report(page, found)


def write_report(experiments: Sequence[Path], output: Path | None, tell: Say) -> None:
    """Write the page, and tell where it is and what it lacks."""
    written = report(experiments, output)
    for each in written.experiments:
        for sentence in each.missing.values():
            tell(f"{each.label}: {sentence}")
    tell(f"wrote {written.path} ({written.path.stat().st_size / 1e6:.1f} MB)")


def collect(folder: ExperimentFolder, label: str) -> Evidence:
    """What an experiment's folder tells. Raises ConfigError for a config.yaml that cannot be read; whatever else is
    missing or damaged is left out, with a sentence."""
    settings = read_recipe(folder.config)
    events = read_events(folder.log / "events.jsonl")
    is_virtual = (folder.log / "virtual.log").is_file()
    stretches = read_timeline(folder.seen)
    curve = _curve_of(stretches) or _curve_of_tensorboard(folder.tensorboard) or _curve_of_epochs(events)
    validations = _validations(events)
    staleness = _staleness(events)
    has_one_model = _has_one_model(settings)
    distances = [] if has_one_model else _distances(events)
    no_curve = "No training loss was recorded."
    drawn_from = "The loss is drawn from its TensorBoard curves or its epochs: it has no record of times."
    no_scores = (
        "Simulations score no valid set while they train." if is_virtual else "No model was scored while it trained."
    )
    one_model = f"Under {_strategy(settings)}, all learners have the same weights."
    no_distance = "No consensus distance was recorded, or it was 0."
    parts: Sequence[tuple[Section, bool, str]] = (
        ("training", bool(curve and stretches), drawn_from if curve else no_curve),
        ("validation", bool(validations), no_scores),
        (
            "timeline",
            bool(stretches),
            "No timeline: the run did not record when its learners computed (seen/*/times-*.tsv).",
        ),
        ("staleness", sum(staleness) > 0, "No staleness was recorded."),
        ("consensus", any(distance > 0.0 for _, distance in distances), one_model if has_one_model else no_distance),
        ("events", bool(events), "The run recorded no events (log/events.jsonl)."),
    )
    missing = {section: sentence for section, is_there, sentence in parts if not is_there}
    sets = _sets(folder, settings, missing)
    return Evidence(
        label=label,
        path=str(folder.path),
        strategy=_strategy(settings),
        learners=int(settings["learners"]) if isinstance(settings.get("learners"), int) else 1,
        is_virtual=is_virtual,
        outcome=_outcome(folder, events),
        settings=_text(folder.config),
        environment=_text(folder.environment),
        commands=tuple(dict.fromkeys(str(each["command"]) for each in events if each.get("command"))),
        unit="utterances" if "data" in settings else "examples",
        stretches=tuple(stretches),
        curve=tuple(curve),
        validations=tuple(validations),
        staleness=tuple(staleness),
        distances=tuple(distances),
        sets=sets,
        happenings=tuple(_happenings(events, is_virtual)),
        missing=missing,
    )


def _read_comparison(path: Path) -> Mapping[str, Any] | None:
    """What `starling compare` found; None for the folder of anything else."""
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
            path=str(path),
            strategy=row["strategy"] or row["arm"],
            learners=row["learners"],
            is_virtual=comparison["compare"]["engine"] == "virtual",
            outcome=str(row["verdict"]),
            settings=_text(path / "compare.yaml"),
            environment=_text(path / "env.txt"),
            commands=(),
            unit="examples",
            curve=tuple(_mean_curve([each for each in comparison["cells"] if row.items() >= _key_of(each).items()])),
        )
        for row in comparison["rows"]
    )


def _key_of(result: Event) -> Event:
    """What a cell shares with its row at the row's best rate."""
    return {key: value for key, value in result["cell"].items() if key != "seed"}


def _mean_curve(cells: Sequence[Event]) -> Iterator[CurvePoint]:
    """The mean over the cells of several seeds, as far as all of them went."""
    curves = [{share: rest for share, *rest in cell["curve"]} for cell in cells]
    examples_per_batch = fmean(cell["num_samples"] / max(1, cell["num_gradients"]) for cell in cells)
    for share in sorted(set.intersection(*map(set, curves))):
        samples, seconds, losses = zip(*(curve[share] for curve in curves), strict=True)
        examples = fmean(samples)
        step = round(examples / examples_per_batch)
        spread = (min(losses), max(losses)) if len(losses) > 1 else (None, None)
        yield CurvePoint(fmean(seconds), step, round(examples), fmean(losses), *spread)


def _labels(paths: Sequence[Path]) -> list[str]:
    """The names of folders; with their paths where two have one name."""
    names = [path.resolve().name for path in paths]
    return [name if names.count(name) == 1 else str(path) for name, path in zip(names, paths, strict=True)]


def _strategy(settings: Event) -> str:
    strategy = settings.get("strategy", "?")
    if not isinstance(strategy, dict):
        return str(strategy)
    options = ", ".join(f"{key}={value}" for key, value in strategy.items() if key != "name")
    return f"{strategy.get('name', '?')}{f' ({options})' if options else ''}"


def _has_one_model(settings: Event) -> bool:
    """Whether the strategy is one of Starling's that keep the weights of all learners the same."""
    given = settings.get("strategy")
    strategy = STRATEGIES.get(str(given.get("name") if isinstance(given, dict) else given))
    return strategy is not None and strategy.has_one_model


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


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


def _curve_of(stretches: Sequence[Stretch]) -> list[CurvePoint]:
    """Means over equally many mini-batches each, over all learners: at least one of each."""
    total = sum(each.batches for each in stretches)
    size = max(len({each.learner for each in stretches}), math.ceil(total / MAX_POINTS))
    points = []
    num_batches = num_examples = step = 0
    summed, frames = 0.0, 0
    first = min((each.begin for each in stretches), default=0.0)
    last = len(stretches) - 1
    for place, each in enumerate(stretches):
        before = num_batches // size
        num_batches += each.batches
        num_examples += each.examples
        step = max(step, each.step + 1)
        if each.frames and math.isfinite(each.loss):
            summed, frames = summed + each.loss * each.frames, frames + each.frames
        if frames and (num_batches // size > before or place == last):
            points.append(CurvePoint(each.end - first, step, num_examples, summed / frames))
            summed, frames = 0.0, 0
    return points


def _curve_of_tensorboard(folder: Path) -> list[CurvePoint]:
    """Those of all learners together; nothing without TensorBoard."""
    learners = sorted(folder.glob("learner-*"))
    if not learners:
        return []
    try:
        from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator
    except ModuleNotFoundError:
        return []
    found = []
    for learner in learners:
        with suppress(Exception):  # of a damaged file TensorBoard may raise anything
            read = EventAccumulator(str(learner), {SCALARS: MAX_POINTS}).Reload()
            if "train/loss" in read.Tags()["scalars"]:
                found += [each for each in read.Scalars("train/loss") if math.isfinite(each.value)]
    found.sort(key=lambda each: each.step)
    began = min((each.wall_time for each in found), default=0.0)
    size = max(1, math.ceil(len(found) / MAX_POINTS))
    parts = [found[place : place + size] for place in range(0, len(found), size)]
    return [
        CurvePoint(
            max(each.wall_time for each in part) - began,
            part[-1].step + 1,
            None,
            sum(each.value for each in part) / len(part),
        )
        for part in parts
    ]


def _curve_of_epochs(events: Sequence[Event]) -> list[CurvePoint]:
    return [
        CurvePoint(None, int(each["step"]), None, float(each["loss"]))
        for each in _newest(events, "epoch")
        if _is_number(each.get("loss")) and _is_number(each.get("step"))
    ]


def _newest(events: Sequence[Event], kind: str) -> list[Event]:
    """Events of a kind, each step once: a resumed run tells again what it computes again."""
    by_step = {step: each for each in events if each["kind"] == kind and _is_number(step := each.get("step"))}
    return [by_step[step] for step in sorted(by_step)]


def _validations(events: Sequence[Event]) -> list[Validation]:
    """By epochs; inside an epoch, by the share of it that was done."""
    epochs = {each["step"]: each for each in _newest(events, "epoch")}
    ends = [(step, float(each["epoch"])) for step, each in epochs.items() if _is_number(each.get("epoch"))]
    found = []
    for each in _newest(events, "validation"):
        if _is_number(each.get("wer")):
            done: object = each.get("epochs")
            at = float(done) if _is_number(done) else _interpolated(float(each["step"]), ends)
            if at is not None:
                found.append(Validation(str(each.get("set", "")), at, int(each["step"]), float(each["wer"])))
    return found


def _interpolated(step: float, ends: Sequence[tuple[float, float]]) -> float | None:
    """How many epochs a step is, between the ends of epochs."""
    steps, epochs = zip((0.0, 0.0), *ends, strict=True)
    return float(np.interp(step, steps, epochs)) if ends and step <= steps[-1] else None


def _staleness(events: Sequence[Event]) -> list[int]:
    given = [each.get("staleness") for each in _newest(events, "epoch")]
    counts = [each for each in given if isinstance(each, list) and all(isinstance(count, int) for count in each)]
    return [sum(each) for each in zip_longest(*counts, fillvalue=0)]


def _distances(events: Sequence[Event]) -> list[tuple[int, float]]:
    """From checkpoints, whose names tell the mini-batches, and from epochs of simulations."""
    found: dict[int, float] = {}
    for each in events:
        step, distance = each.get("step"), each.get("consensus_distance")
        if each["kind"] == "checkpoint":
            number = Path(str(each.get("folder", ""))).name.removeprefix("step-").partition("-")[0]
            step = int(number) if number.isdecimal() else None
        if each["kind"] in ("checkpoint", "epoch") and _is_number(step) and _is_number(distance):
            found[int(step)] = float(distance)
    return sorted(found.items())


def _happenings(events: Sequence[Event], is_virtual: bool) -> list[Happening]:
    """What is not in a figure, in words."""
    began = next((each["time"] for each in events if _is_number(each.get("time"))), 0.0)
    told = []
    for event in events:
        if text := _told(event):
            at = float(event["time"]) - began if _is_number(event.get("time")) and not is_virtual else None
            told.append(Happening(at, str(event["kind"]), text))
    if len(told) > MAX_EVENTS:
        left_out = len(told) - MAX_EVENTS
        half = MAX_EVENTS // 2
        told[half:-half] = [Happening(None, "…", f"{left_out} events are not shown; all are in log/events.jsonl")]
    return told


def _told(event: Event) -> str:
    match event["kind"]:
        case "start":
            return f"{event.get('learners')} learners, {event.get('strategy')}"
        case "loss" | "left-out":
            return str(event.get("reason", ""))
        case "join":
            return f"learner {event.get('learner')} joined; {event.get('num_learners')} learners train now"
        case "checkpoint":
            return f"{event.get('folder')} ({event.get('moment')})"
        case "end":
            return f"{event.get('message', '')} (exit code {event.get('exit_code')})"
        case "stall" | "stall-over" | "advice" | "message":
            return str(event.get("text", ""))
        case _:
            return ""


def _sets(folder: ExperimentFolder, settings: Tree, missing: dict[Section, str]) -> tuple[ScoredSet, ...]:
    """The scored sets, with audio where the prepared data are there."""
    files = sorted(folder.decode.glob("recogs-*.txt"))
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


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
