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
from starling.errors import ConfigError, NonFiniteError
from starling.experiment.any_job import Simulated, train_quietly
from starling.launch.messages import EpochEnd
from starling.reporting.epochs import Meter, together
from starling.reporting.events import Event, read_events
from starling.reporting.lines import share
from starling.training.job import EpochReport, Job, Silence, StepReport
from starling.workload import Ticket, Workload

CURVE_POINTS = 50
LAST = 0.9
"""The share of the budget after which losses count as the last ones."""


class Watcher(Silence):
    """An observer that keeps what a comparison reports of a run."""

    def __init__(self) -> None:
        self.num_gradients = self.num_samples = 0
        self.seconds = 0.0
        self.consensus_distance: float | None = None
        self._points: list[Point] = []
        self._ends: list[EpochEnd] = []

    def on_step(self, report: StepReport) -> None:
        self.num_gradients += 1
        self.num_samples += report.num_examples
        self.seconds = 60.0 * report.minutes
        if math.isfinite(report.loss):
            self._points.append(Point(report.fraction, self.num_samples, self.seconds, report.loss))

    def on_epoch(self, report: EpochReport, state: LearnerState) -> None:
        self._ends.append(Meter(world=1).end_epoch(report, step=0))
        if report.consensus_distance is not None and math.isfinite(report.consensus_distance):
            self.consensus_distance = report.consensus_distance

    def measured(self) -> dict[str, Any]:
        """The fields of a result."""
        every = together(self._ends)
        workers = together([each for each in self._ends if each.num_steps])  # a server waits for nothing
        last = [point.loss for point in self._points if point.share >= LAST]
        parts: dict[int, list[Point]] = {}
        for point in self._points:
            parts.setdefault(min(int(point.share * CURVE_POINTS), CURVE_POINTS - 1), []).append(point)
        curve = [
            Point((part + 0.5) / CURVE_POINTS, *(fmean([point[field] for point in own]) for field in (1, 2, 3)))
            for part, own in sorted(parts.items())
        ]
        return {
            "loss": fmean(last) if last else None,
            "curve": tuple(curve),
            "num_gradients": self.num_gradients,
            "num_samples": self.num_samples,
            "consensus_distance": self.consensus_distance,
            "mean_staleness": every.mean_staleness,
            "largest_staleness": every.largest_staleness,
            "bytes_sent": every.bytes_sent,
            **{key: share(workers, key) for key in _SPENT},
        }


def run_cell(subject: Subject, cell: Cell, digest: str, runs: Path) -> CellResult:
    """Train and score a cell. Numbers that stop being finite are a result: the cell is `diverged`.

    A run of real learners is in the folder `runs`, which keeps its log and no checkpoint.
    """
    begin = _cpu_seconds()
    is_virtual = subject.section.engine == "virtual"
    job = replace(subject.job(cell), most_not_finite=1)
    model, measured = _simulated(subject, job, cell) if is_virtual else _trained(subject, job, cell, runs)
    if model is not None and not all(bool(torch.isfinite(each).all()) for each in model.state_dict().values()):
        model = None
    scores = {} if model is None else subject.score(cell, model)
    if not all(math.isfinite(value) for value in scores.values()):
        model, scores = None, {}
    return CellResult(
        cell=cell, digest=digest, diverged=model is None, **scores, **measured, cpu_seconds=_cpu_seconds() - begin
    )


def _simulated(subject: Subject, job: Job, cell: Cell) -> tuple[nn.Module | None, dict[str, Any]]:
    """The consensus model, None if it diverged, and what was measured."""
    torch.set_num_threads(
        subject.engine(cell).get("threads") or 1
    )  # results must not depend on how many cores there are
    watcher, model = Watcher(), None
    with suppress(NonFiniteError):
        outcome = VirtualEngine(job, cell.learners, subject.cluster(cell), watcher).run()
        model, watcher.seconds = Simulated(job, outcome).model(), outcome.seconds
    return model, {"seconds": watcher.seconds} | watcher.measured()


def _trained(subject: Subject, job: Job, cell: Cell, runs: Path) -> tuple[nn.Module | None, dict[str, Any]]:
    folder, trained = runs / cell.name, None
    with suppress(NonFiniteError):
        trained = train_quietly(job, cell.learners, name=cell.name, exp=runs, engine=subject.engine(cell))
    measured = _measured(read_events(folder / "log" / "events.jsonl"), examples_per_batch(job.workload))
    if trained is None:
        return None, measured
    model, seconds = trained.model(), 60.0 * read_manifest(trained.checkpoint).minutes
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return model, measured | {"seconds": seconds}


def _measured(events: Sequence[Event], examples: float) -> dict[str, Any]:
    """The fields of a result, from the events of a run: a point of the curve for each epoch."""
    epochs = [event for event in events if event["kind"] == "epoch"]
    learners = [each for epoch in epochs for each in epoch["learners"].values() if each["steps"]]
    total, seconds = max((epoch["step"] for epoch in epochs), default=0), 0.0
    curve = []
    for epoch in epochs:
        middle, half = epoch["step"] - 0.5 * epoch["steps_in_epoch"], seconds + 0.5 * epoch["seconds"]
        seconds += epoch["seconds"]
        if epoch["loss"] is not None:
            curve.append(Point(middle / total, middle * examples, half, epoch["loss"]))
    steps = sum(each["steps"] for each in learners)
    distances = [event["consensus_distance"] for event in events if event["kind"] == "checkpoint"]
    total_seconds = sum(each["seconds"] for each in learners)
    spent = {key: sum(each[key] for each in learners) for key in _SPENT}
    return {
        "loss": curve[-1].loss if curve else None,
        "curve": tuple(curve),
        "num_gradients": steps,
        "num_samples": steps * examples,
        "seconds": seconds,
        "consensus_distance": distances[-1] if distances else None,
        "mean_staleness": sum(each["mean_staleness"] * each["steps"] for each in learners) / max(1, steps),
        "largest_staleness": max((each["largest_staleness"] for each in learners), default=0),
        "bytes_sent": sum(each["bytes_sent"] for epoch in epochs for each in epoch["learners"].values()),
        **{key: 100.0 * spent[key] / total_seconds if total_seconds else 0.0 for key in _SPENT},
    }


_SPENT = ("computing", "waiting_for_data", "waiting_for_peers")


def examples_per_batch(workload: Workload[Any]) -> float:
    """The mean over the first epoch, as planned; that of the first mini-batch where nothing is planned."""
    tickets = [Ticket(0, index, index) for index in range(workload.num_batches(0))]
    try:
        return fmean([workload.planned_size(ticket, "utterances") for ticket in tickets])
    except ConfigError:
        return float(sum(each.num_examples for each in workload.load(tickets[0])))


def _cpu_seconds() -> float:
    """Of this process and of those that it waited for."""
    return sum(os.times()[:4])
