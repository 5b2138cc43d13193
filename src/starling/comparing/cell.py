"""One cell of a comparison: trained on either engine, and scored."""

import math
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn

from starling.checkpoint.manifest import read_manifest
from starling.checkpoint.state import LearnerState
from starling.comparing.grid import Cell, CellResult, Point
from starling.comparing.subject import Subject
from starling.engines.virtual.engine import VirtualEngine
from starling.errors import NonFiniteError
from starling.experiment.any_job import train_quietly
from starling.experiment.record import read_timeline
from starling.experiment.simulate import Simulated
from starling.launch.messages import Stretch
from starling.reporting.epochs import SPENT, Tally, merged
from starling.reporting.events import read_events
from starling.reporting.lines import mean_staleness, share
from starling.training.job import EpochReport, Job, Observer, StepReport

CURVE_POINTS = 50
LAST = 0.9
"""Share of the budget after which losses count as the last ones."""


class Watcher(Observer):
    """An observer that keeps the figures that a comparison reports about a run."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.seconds = 0.0
        self.consensus_distance: float | None = None
        self._num_samples = 0
        self._ends: list[Stretch] = []

    def on_step(self, report: StepReport) -> None:
        self._num_samples += report.num_examples
        self.seconds = 60.0 * report.minutes
        self.points.append(Point(report.fraction, self._num_samples, self.seconds, report.loss))

    def on_epoch(self, report: EpochReport, state: LearnerState) -> None:
        tally = Tally()
        tally.end_epoch(report, 0)
        self._ends.append(tally.progress(tally.all).so_far)
        if report.consensus_distance is not None and math.isfinite(report.consensus_distance):
            self.consensus_distance = report.consensus_distance

    def measured(self) -> dict[str, Any]:
        """The fields of a result."""
        every = merged(self._ends)
        workers = merged(each for each in self._ends if each.batches)  # a server waits for nothing
        return {
            **_trained_on(self.points),
            "num_gradients": len(self.points),
            "seconds": self.seconds,
            "consensus_distance": self.consensus_distance,
            "mean_staleness": mean_staleness(every.staleness),
            "largest_staleness": max(every.staleness, default=0),
            "bytes_sent": every.bytes_sent,
            **{key: share(workers, key) for key in SPENT},
        }


def _trained_on(points: Sequence[Point]) -> dict[str, Any]:
    """The fields of a result about the training loss, from the loss of each mini-batch, and about the samples."""
    finite = [point for point in points if math.isfinite(point.loss)]
    last = [point.loss for point in finite if point.share >= LAST]
    parts: dict[int, list[Point]] = {}
    for point in finite:
        parts.setdefault(min(int(point.share * CURVE_POINTS), CURVE_POINTS - 1), []).append(point)
    curve = [
        Point((part + 0.5) / CURVE_POINTS, *(fmean([point[field] for point in own]) for field in (1, 2, 3)))
        for part, own in sorted(parts.items())
    ]
    num_samples = points[-1].samples if points else 0
    return {"loss": fmean(last) if last else None, "curve": tuple(curve), "num_samples": num_samples}


def run_cell(subject: Subject, cell: Cell, digest: str, runs: Path) -> CellResult:
    """Train and score a cell. If numbers stop being finite, the cell's result is `diverged`.

    A run of real learners is in the folder `runs`, which keeps its log and no checkpoint. An error is raised with a
    note that names the cell.
    """
    begin = _cpu_seconds()
    is_virtual = subject.section.engine == "virtual"
    try:
        job = replace(subject.job(cell), most_not_finite=1)
        model, measured = _simulated(subject, job, cell) if is_virtual else _trained(subject, job, cell, runs)
        if model is not None and not all(bool(torch.isfinite(each).all()) for each in model.state_dict().values()):
            model = None
        scores = {} if model is None else subject.score(cell, model)
    except Exception as error:
        error.add_note(f"in cell {cell.name}")
        raise
    if not all(math.isfinite(value) for value in scores.values()):
        model, scores = None, {}
    return CellResult(
        cell=cell, digest=digest, diverged=model is None, **scores, **measured, cpu_seconds=_cpu_seconds() - begin
    )


def _simulated(subject: Subject, job: Job, cell: Cell) -> tuple[nn.Module | None, dict[str, Any]]:
    """The consensus model, or None if it diverged, and the measured fields of the result."""
    # results must not depend on how many cores there are
    torch.set_num_threads(subject.engine(cell).get("threads") or 1)
    watcher, model = Watcher(), None
    with suppress(NonFiniteError):
        outcome = VirtualEngine(job, cell.learners, subject.cluster(cell), watcher).run()
        model, watcher.seconds = Simulated(job, outcome).model(), outcome.seconds
    return model, watcher.measured()


def _trained(subject: Subject, job: Job, cell: Cell, runs: Path) -> tuple[nn.Module | None, dict[str, Any]]:
    folder, trained = runs / cell.name, None
    with suppress(NonFiniteError):
        trained = train_quietly(job, cell.learners, name=cell.name, exp=runs, engine=subject.engine(cell))
    measured = _measured(folder)
    if trained is None:
        return None, measured
    model, seconds = trained.model(), 60.0 * read_manifest(trained.checkpoint).minutes
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return model, measured | {"seconds": seconds}


def _measured(folder: Path) -> dict[str, Any]:
    """The fields of a result, from a run's record of its mini-batches and from its events."""
    events, stretches = read_events(folder / "log" / "events.jsonl"), read_timeline(folder / "seen")
    total, done, samples = sum(each.batches for each in stretches), 0, 0
    points = []
    for each in stretches:
        samples += each.examples
        points.append(Point(done / total, samples, each.end, each.loss))
        done += each.batches
    ends = [end for event in events if event["kind"] == "epoch" for end in event["learners"].values()]
    workers = [end for end in ends if end["steps"]]
    steps, seconds = (sum(end[key] for end in workers) for key in ("steps", "seconds"))
    distances = [event["consensus_distance"] for event in events if event["kind"] == "checkpoint"]
    return {
        **_trained_on(points),
        "num_gradients": total,
        "seconds": points[-1].seconds if points else 0.0,
        "consensus_distance": distances[-1] if distances else None,
        "mean_staleness": sum(end["mean_staleness"] * end["steps"] for end in workers) / max(1, steps),
        "largest_staleness": max((end["largest_staleness"] for end in workers), default=0),
        "bytes_sent": sum(end["bytes_sent"] for end in ends),
        **{key: 100.0 * sum(end[key] for end in workers) / seconds if seconds else 0.0 for key in SPENT},
    }


def _cpu_seconds() -> float:
    """The processor time of this process and of the child processes that it waited for."""
    return sum(os.times()[:4])
