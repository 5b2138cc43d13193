"""The cost of a checkpoint: two learners on the demo's model, with checkpoints every few seconds and without."""

import shutil
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.measuring import Bar
from benchmarks.training import WARM_UP, job_for, recipe_for
from starling.checkpoint.state import LearnerState
from starling.checkpoint.writer import CheckpointWriter
from starling.engines.processes.member import run_learner
from starling.engines.processes.place import choose_device
from starling.experiment.folder import ExperimentFolder
from starling.experiment.learning import SharedCounts
from starling.experiment.observers import Saver, Together
from starling.launch.launcher import launch
from starling.launch.link import Link, reported_errors
from starling.launch.messages import Activity, LearnerMessage, Saved, values_of
from starling.launch.rendezvous import find_membership, find_place, save_requests_of
from starling.speech.recipe import fingerprints
from starling.speech.training.set_up import ModelWriter
from starling.training.job import Observer, StepReport

WORLD, STEPS, PAIRS = 2, 900, 3
EVERY_SECONDS = 3.0
LARGEST_SHARE = 0.02
"""Largest share of the throughput that checkpoints may cost, at one checkpoint per minute."""


def measure(folder: Path) -> list[Bar]:
    """The share of the throughput that a checkpoint per minute costs: the seconds that one takes, divided by 60."""
    lost: list[float] = []
    saved: list[int] = []
    for pair in range(PAIRS):
        seconds: dict[bool, float] = {}
        for with_checkpoints in (True, False) if pair % 2 else (False, True):
            seconds[with_checkpoints], num_saved = _run(folder, with_checkpoints, f"{pair}-{with_checkpoints}")
            saved += [num_saved] * with_checkpoints
        lost.append((seconds[True] - seconds[False]) / saved[-1])
    name = f"{WORLD} learners on the demo's model: share of the throughput that a checkpoint every minute costs"
    detail = (
        f"{1000 * median(lost):.0f} ms lost for each of {sum(saved)} checkpoints, one every {EVERY_SECONDS:g} s "
        f"(median of {PAIRS} pairs of runs, {1000 * min(lost):.0f} to {1000 * max(lost):.0f})"
    )
    return [Bar.at_most(name, median(lost) / 60.0, LARGEST_SHARE, detail)]


def _run(folder: Path, with_checkpoints: bool, name: str) -> tuple[float, int]:
    """Train; returns the seconds from the warm-up to the end, including what is being saved, and the number of
    checkpoints in that time."""
    begins: list[float] = []
    ends: list[float] = []
    saved: list[Saved] = []

    def on_message(rank: int, message: LearnerMessage) -> None:
        told: dict[str, Any] = dict(values_of(message))
        if "begin" in told:
            begins.append(told["begin"])
        if "end" in told:
            ends.append(told["end"])
        if isinstance(message, Saved):
            saved.append(message)

    shutil.rmtree(ExperimentFolder(recipe_for(folder, WORLD, STEPS).folder).checkpoints, ignore_errors=True)
    minutes = str(EVERY_SECONDS / 60.0) if with_checkpoints else "none"
    command = [sys.executable, "-m", "benchmarks.checkpointing", str(folder), minutes]
    launch(command, WORLD, folder / f"log-checkpointing-{name}", on_message)
    return max(ends) - max(begins), len(saved)


class _Begin(Observer):
    """An observer that tells the launcher when the warm-up is over."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._num_steps = 0

    def on_step(self, report: StepReport) -> None:
        self._num_steps += 1
        if self._num_steps == WARM_UP:
            self._link.send(Activity(values={"begin": time.monotonic()}))


class _MarksOnly(Observer):
    """An observer that passes barriers inside epochs on to a saver, but no ends of epochs, which both kinds of run
    would have."""

    def __init__(self, saver: Saver) -> None:
        self._saver = saver

    def on_step(self, report: StepReport) -> None:
        self._saver.on_step(report)

    def on_barrier(self, state: LearnerState) -> None:
        self._saver.on_barrier(state)


def _learn(folder: Path, minutes: float | None, link: Link) -> None:
    torch.set_num_threads(1)
    place = find_place()
    recipe = recipe_for(folder, WORLD, STEPS, "delay-by-one")
    experiment = ExperimentFolder(recipe.folder)
    counts = SharedCounts(place)
    model = ModelWriter(experiment.initial)
    writer = CheckpointWriter(experiment.checkpoints, counts.arrive, model, fingerprints(recipe))
    saver = Saver(writer, link.send, experiment.tensorboard)
    observer = Together([_Begin(link), _MarksOnly(saver)])
    with save_requests_of(link, minutes) as save_requests, saver:
        run_learner(
            job_for(folder, WORLD, STEPS, "delay-by-one"),
            place,
            choose_device("auto", place),
            "bench",
            observer,
            membership=find_membership(place, link),
            save_requests=save_requests,
        )
    link.send(Activity(values={"end": time.monotonic()}))


if __name__ == "__main__":
    own = Link.from_environment()
    with reported_errors(own):
        if own is not None:
            _learn(Path(sys.argv[1]), None if sys.argv[2] == "none" else float(sys.argv[2]), own)
