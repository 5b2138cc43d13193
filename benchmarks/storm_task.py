"""The task of the storms in `storm.yaml`: learners whose gradient is a small computation and a fixed sleep, so that
several learners do not compete for the cores. A perceptron learns another one's classification of points."""

import time
from collections.abc import Sequence
from typing import Any

from pydantic import Field
from torch import Tensor, nn

from benchmarks.auto_task import BATCH_SIZE, TEACHER, Imitation
from benchmarks.perceptron import perceptron
from benchmarks.workloads import Batch
from starling import Task, TaskRecipe, job_of
from starling.chance import derive_seed
from starling.workload import Ticket

HIDDEN = (768, 896)
"""Widths of the hidden layers of a model with 750,000 weights."""
NUM_BATCHES = 256
"""Number of mini-batches in an epoch."""


class Sleeping(Imitation):
    """Cross-entropy of the teacher's choice among ten classes; each gradient takes `seconds` longer than it needs. The
    seed chooses the points that are trained on."""

    def __init__(self, seconds: float, hidden: Sequence[int] = HIDDEN, seed: int = 3) -> None:
        super().__init__(seconds)
        self._seed = seed
        self._widths = (TEACHER[0], *hidden, TEACHER[-1])

    def make_model(self) -> nn.Module:
        return self.keep(perceptron(self._widths))

    def num_batches(self, epoch: int) -> int:
        return NUM_BATCHES

    def load(self, ticket: Ticket) -> Sequence[Batch]:
        return [self._points(derive_seed(self._seed, "points", ticket.epoch, ticket.index), BATCH_SIZE)]

    def loss(self, model: nn.Module, examples: Batch) -> Tensor:
        found = nn.functional.cross_entropy(model(examples.inputs), examples.targets)
        if self.seconds > 0.0:  # a sleep of 0 s would still give the core away
            time.sleep(self.seconds)
        return found


class StormRecipe(TaskRecipe):
    """A recipe of the storms."""

    seconds: float = Field(default=0.6, ge=0.0)
    """Seconds that each gradient sleeps; simulations need 0."""
    hidden: tuple[int, ...] = HIDDEN
    """Widths of the hidden layers."""


class Storm(Task[StormRecipe]):
    """Trains the perceptron, and scores it by its loss on points that were not trained on."""

    settings = StormRecipe

    def make_job(self, recipe: StormRecipe, folder: Any, learners_here: int | None = None) -> Any:
        return job_of(recipe, Sleeping(recipe.seconds, recipe.hidden, recipe.seed))

    def score(self, recipe: StormRecipe, folder: Any, tell: Any, console: Any, may_be_best: bool = False) -> None:
        loss = Sleeping(0.0, recipe.hidden).validation_loss(self.trained_model(recipe, folder))
        tell(f"loss on new points: {loss:.4f}")


STORM = Storm()
