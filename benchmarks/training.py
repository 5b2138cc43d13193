"""The training that the first benchmarks measure: the demo's recipe on a smaller corpus, beside a plain loop with
it."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from starling.experiment.claim import claim_folder
from starling.experiment.folder import ExperimentFolder
from starling.speech.recipe import Recipe, load_recipe
from starling.speech.training.set_up import make_job, set_up
from starling.training.job import Job, Observer, StepReport

RECIPE = Path(__file__).parents[1] / "recipes" / "demo.yaml"
WARM_UP = 4
"""Number of steps that are made but not timed."""


def prepare(folder: Path) -> None:
    """Synthesise the corpus once."""

    def say(text: str) -> None:
        sys.stderr.write(f"{text}\n")

    recipe = recipe_for(folder, learners=1, steps=1)
    set_up(recipe, claim_folder(recipe, say), say)


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


class SideBySide(Observer):
    """An observer that makes the steps of a plain loop beside Starling's, and times both.

    The second to step finds memory and caches that suit the mini-batch. So the plain loop makes two steps after every
    second step of Starling's, and is first as often as it is second.
    """

    def __init__(self, plain_steps: Iterator[None], device: torch.device) -> None:
        self.pairs: list[tuple[float, float]] = []
        """Seconds of each step after the warm-up, Starling's and the plain loop's. Starling is first in every other
        pair."""
        self._plain_steps = plain_steps
        self._device = device
        self._num_steps = 0
        self._begin = 0.0
        self._plain_seconds = 0.0

    def on_step(self, report: StepReport) -> None:
        ours = self._now() - self._begin
        is_first = self._num_steps % 2 == 0
        if is_first:
            self._plain_seconds = self._plain_step()
        if self._num_steps >= WARM_UP:
            self.pairs.append((ours, self._plain_seconds))
        if is_first:
            self._plain_seconds = self._plain_step()
        self._num_steps += 1
        self._begin = self._now()

    def _plain_step(self) -> float:
        begin = self._now()
        next(self._plain_steps, None)
        return self._now() - begin

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
