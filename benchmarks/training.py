"""The training that the benchmarks measure: the demo's recipe on a smaller corpus, and a plain PyTorch loop of it."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from starling.checkpoint.state import LearnerState
from starling.engines.job import EpochReport, Job, StepReport
from starling.experiment.folder import ExperimentFolder, claim_folder
from starling.experiment.job import make_job
from starling.experiment.recipe import Recipe, load_recipe
from starling.experiment.setup import set_up
from starling.workload import Ticket

RECIPE = Path(__file__).parents[1] / "recipes" / "demo.yaml"
WARM_UP = 3
"""Steps that are made but not timed."""


def prepare(folder: Path) -> None:
    """Synthesise the corpus once."""
    recipe = recipe_for(folder, learners=1, steps=1)
    set_up(recipe, claim_folder(recipe), say=lambda text: None)


def recipe_for(folder: Path, learners: int, steps: int, strategy: str = "allreduce") -> Recipe:
    """The demo's recipe on the corpus in `folder`."""
    return load_recipe(
        RECIPE,
        [
            "name=bench",
            f"exp={folder / 'exp'}",
            f"data.folder={folder / 'data'}",
            "data.corpus.sets.train=600",
            "data.corpus.sets.dev=20",
            "data.corpus.sets.test=20",
            f"learners={learners}",
            f"strategy={strategy}",
            f"budget={{steps: {steps}}}",
            "batches.num_workers=0",
            "resume=null",
            "overwrite=true",
        ],
    )


def job_for(folder: Path, learners: int, steps: int, strategy: str = "allreduce") -> Job:
    """The job of that recipe."""
    recipe = recipe_for(folder, learners, steps, strategy)
    return make_job(recipe, ExperimentFolder(recipe.folder))


@dataclass
class Stopwatch:
    """An observer that notes when each step was done."""

    device: torch.device
    times: list[float] = field(default_factory=list)

    def on_step(self, report: StepReport) -> None:
        self.note()

    def on_epoch(self, report: EpochReport, state: LearnerState) -> None: ...

    def note(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.times.append(time.perf_counter())

    @property
    def seconds(self) -> float:
        """Of all steps after the warm-up."""
        return self.times[-1] - self.times[WARM_UP - 1]


def plain_loop(
    job: Job, tickets: Sequence[Ticket], device: torch.device, wrap: Callable[[nn.Module], nn.Module] = lambda m: m
) -> Stopwatch:
    """What one writes without Starling: the same model, data, optimizer and clipping, in a bare PyTorch loop."""
    model = wrap(job.workload.make_model().to(device))
    parameters = list(model.parameters())
    optimizer = job.make_optimizer(parameters)
    watch = Stopwatch(device)
    for ticket in tickets:
        for batch in job.workload.load(ticket):
            optimizer.zero_grad()
            loss = job.workload.loss(model, batch.to(device))
            loss.backward()
            if job.clip_norm is not None:
                nn.utils.clip_grad_norm_(parameters, job.clip_norm)
            optimizer.step()
            loss.item()
        watch.note()
    return watch


def tickets_of(job: Job, steps: int, rank: int, world: int) -> Iterator[Ticket]:
    """The tickets that learner `rank` of `world` gets among the first `steps`."""
    epoch, first = 0, 0
    for step in range(steps):
        if step - first >= job.workload.num_batches(epoch):
            first += job.workload.num_batches(epoch)
            epoch += 1
        if step % world == rank:
            yield Ticket(epoch, step - first, step)
