"""The program of a learner that trains under several strategies, one run after another: `auto_learner RUNS FOLDER`.

With `auto`, the learners first measure and choose, as torchrun's learners do; the time includes this.
"""

import json
import sys
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.nn.utils import parameters_to_vector

from benchmarks.auto_task import Imitation
from starling.budget import Budget
from starling.engines.processes.handshake import Peers
from starling.engines.processes.member import run_learner
from starling.engines.processes.place import Place
from starling.experiment.auto import measured_choice
from starling.launch.link import Link, reported_errors
from starling.launch.rendezvous import find_place
from starling.recipe.run import RunConfig, StrategyChoice
from starling.training.job import Job, Observer, StepReport
from starling.training.speeds import Stragglers

TIMEOUT_SECONDS = 120.0
LEARNING_RATE = 0.03
EVERY = 0.5
"""Seconds between two copies of a learner's weights."""


@dataclass(frozen=True)
class Training:
    """A run that is timed."""

    strategy: dict[str, Any]
    gradient_seconds: float
    slowest: float
    """Factor by which the last learner's gradients take longer."""
    steps: int
    minutes: float

    def job(self, world: int) -> Job:
        """The job of the run, for an engine; under `auto`, with a placeholder for the strategy."""
        choice = StrategyChoice.model_validate(self.strategy)
        return Job(
            Imitation(self.gradient_seconds),
            choice.strategy,
            Budget(steps=self.steps, minutes=self.minutes),
            partial(torch.optim.SGD, lr=LEARNING_RATE),
            options=choice.options,
            stragglers=Stragglers(slow={world - 1: self.slowest} if self.slowest > 1.0 else {}),
        )


@dataclass
class Copies(Observer):
    """An observer that copies the weights of its learner from time to time."""

    workload: Imitation
    begin: float
    times: list[float] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)

    def on_step(self, report: StepReport) -> None:
        now = time.monotonic() - self.begin
        if not self.times or now - self.times[-1] >= EVERY:
            self.copy(now)

    def copy(self, now: float) -> None:
        """Copy the weights at `now`, in seconds since the run's beginning."""
        if self.workload.model is not None:
            self.times.append(now)
            self.weights.append(parameters_to_vector(self.workload.model.parameters()).detach().clone())


def main(runs: list[Training], folder: Path) -> None:
    torch.set_num_threads(1)
    place = find_place()
    for number, run in enumerate(runs):
        own = replace(place, store=PrefixStore(f"run{number}", place.store))
        Peers(own, TIMEOUT_SECONDS).part()  # all begin at one moment
        said = train(run, own, folder / f"run-{number}-{place.rank}")
        if place.rank == 0:
            (folder / f"said-{number}.json").write_text(json.dumps(said))
    Peers(place, TIMEOUT_SECONDS).part()


def train(run: Training, place: Place, files: Path) -> dict[str, Any]:
    """Train, and write the copies; returns what was chosen, and the seconds that choosing took."""
    begin, job = time.monotonic(), run.job(place.world)
    said: dict[str, Any] = {"strategy": run.strategy, "lines": [], "choosing": 0.0}
    if run.strategy["name"] == "auto":
        settings = RunConfig.model_validate(
            {
                "name": "bench",
                "learners": place.world,
                "strategy": run.strategy,
                "budget": job.budget,
                "engine": {"threads": 1, "device": "cpu"},
            }
        )
        found = measured_choice(settings, replace(place, store=PrefixStore("choosing", place.store)), job)
        choosing = time.monotonic() - begin
        said = {
            "strategy": found.strategy.model_dump(),
            "lines": found.lines,
            "choosing": choosing,
            **found.notes["measured"],
        }
        job = replace(run.job(place.world), strategy=found.strategy.strategy, options=found.strategy.options)
    assert isinstance(job.workload, Imitation)
    copies = Copies(job.workload, begin)
    run_learner(job, place, torch.device("cpu"), "bench", copies, timeout_seconds=TIMEOUT_SECONDS)
    copies.copy(time.monotonic() - begin)
    torch.stack(copies.weights).numpy().tofile(files.with_suffix(".weights"))
    files.with_suffix(".times").write_text(json.dumps(copies.times))
    return said


if __name__ == "__main__":
    with reported_errors(Link.from_environment()):
        main([Training(**each) for each in json.loads(sys.argv[1])], Path(sys.argv[2]))
