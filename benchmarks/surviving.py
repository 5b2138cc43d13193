"""The pause of the others when a learner is killed, on the demo's model and with default settings."""

import os
import signal
import sys
import time
from collections.abc import Callable, Container
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.measuring import Bar
from benchmarks.training import job_for
from starling.engines.processes.member import run_learner
from starling.engines.processes.place import choose_device
from starling.launch.joiners import Changes
from starling.launch.launcher import launch
from starling.launch.link import Link, reported_errors
from starling.launch.messages import Activity, LearnerMessage, Reached, values_of
from starling.launch.rendezvous import find_membership, find_place
from starling.training.job import Observer, StepReport

WORLD, VICTIM, STEPS, REPEATS = 3, 1, 90, 3
KILLED_AT = 30
"""The mini-batch at which the victim is killed."""
LONGEST = 2.0
"""Longest pause in seconds."""
Seconds = float


def measure(folder: Path) -> list[Bar]:
    """The longest time in which a survivor of a kill -9 made no gradient, less the time of a gradient."""
    return [_measure(folder, strategy) for strategy in ("adpsgd", "allreduce")]


def _measure(folder: Path, strategy: str) -> Bar:
    pauses = [pause for number in range(REPEATS) for pause in _pauses(folder, strategy, number)]
    name = f"{WORLD} learners, {strategy}: longest pause of a survivor of a kill -9, seconds / {LONGEST:g} s"
    detail = f"{max(pauses):.2f} s, the longest of {len(pauses)} survivors; their median {median(pauses):.2f} s"
    return Bar.at_most(name, max(pauses) / LONGEST, 1.0, detail)


def _pauses(folder: Path, strategy: str, number: int) -> list[Seconds]:
    killing = Killing(WORLD, KILLED_AT, lambda pids: os.kill(pids[VICTIM], signal.SIGKILL))
    command = [sys.executable, "-m", "benchmarks.surviving", str(folder), strategy]
    launch(command, WORLD, folder / f"log-{strategy}-{number}", killing.on_message, Changes("continue"))
    return killing.pauses({VICTIM})


class Killing:
    """Kills once all learners train, and records when each made its gradients."""

    def __init__(self, world: int, at_step: int, kill: Callable[[dict[int, int]], None]) -> None:
        """`kill` is called with the process id of each learner."""
        self._at_step, self._kill = at_step, kill
        self._moments: dict[int, list[float]] = {learner_id: [] for learner_id in range(world)}
        self._pids: dict[int, int] = {}
        self._met: set[int] = set()
        self._killed: float | None = None

    def on_message(self, learner_id: int, message: LearnerMessage) -> None:
        """Record the times and the process id in a learner's message, and kill when it is time."""
        told: dict[str, Any] = dict(values_of(message))
        if "pid" in told:
            self._pids[learner_id] = told["pid"]
        if isinstance(message, Reached) and message.stage == "entered":
            self._met.add(learner_id)
        if "at" in told:
            self._moments[learner_id].append(told["at"])
            all_train = len(self._met) == len(self._moments)
            if told["step"] >= self._at_step and all_train and self._killed is None:
                self._killed = time.monotonic()
                self._kill(self._pids)

    def pauses(self, lost: Container[int]) -> list[Seconds]:
        """The pause of each survivor."""
        if self._killed is None:
            raise RuntimeError("no learner was killed")
        return [_pause_of(own, self._killed) for each, own in self._moments.items() if each not in lost]


def _pause_of(moments: list[float], killed: float) -> Seconds:
    """The longest time between two gradients after the kill, less the median of the times before it."""
    usual = [after - before for before, after in pairwise(moments) if after < killed]
    later = [after - before for before, after in pairwise(moments) if after >= killed]
    return max(0.0, max(later) - median(usual))


class Moments(Observer):
    """An observer that tells the launcher when each gradient was made."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def on_step(self, report: StepReport) -> None:
        self._link.send(Activity(values={"at": time.monotonic(), "step": report.ticket.step}))


def _learn(folder: Path, strategy: str, link: Link) -> None:
    torch.set_num_threads(1)
    place = find_place()
    link.send(Activity(values={"pid": os.getpid()}))
    job = job_for(folder, WORLD, STEPS, strategy)
    device = choose_device("auto", place)
    run_learner(job, place, device, "bench", Moments(link), membership=find_membership(place, link))


if __name__ == "__main__":
    own = Link.from_environment()
    with reported_errors(own):
        if own is not None:
            _learn(Path(sys.argv[1]), sys.argv[2], own)
