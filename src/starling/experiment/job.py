"""From a recipe to what the engines run."""

import os
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from starling.engines.flat import split, trainable
from starling.engines.job import Job
from starling.experiment.folder import ExperimentFolder
from starling.experiment.recipe import Recipe
from starling.experiment.setup import load_workload
from starling.experiment.workload import SpeechWorkload
from starling.speech.recogniser import Recogniser


def make_job(recipe: Recipe, folder: ExperimentFolder) -> Job:
    """The job of a recipe whose `folder` is set up."""
    return Job(
        workload=load_workload(recipe, folder),
        strategy=recipe.strategy.strategy,
        options=recipe.strategy.options,
        budget=recipe.budget,
        make_optimizer=recipe.optimizer.maker(),
        schedule=recipe.optimizer.schedule,
        clip_norm=recipe.optimizer.clip_norm,
        autocast=recipe.engine.autocast == "bf16",
        num_workers=recipe.batches.num_workers,
        stragglers=recipe.stragglers,
        faults=recipe.faults,
        checkpoint_every=recipe.checkpoints.every,
        seed=recipe.seed,
    )


def most_skipped(recipe: Recipe, job: Job) -> int:
    """How many utterances may be skipped in an epoch before the run of a recipe's job fails."""
    return int(recipe.data.filter.max_skipped * len(cast(SpeechWorkload, job.workload).utterances))


class ModelWriter:
    """Writes the recogniser with given weights `[P]` and buffers, as the checkpoints hold it.

    It is made before training and called beside it: making a network draws from the random generators that the
    training uses. In between it has no weights.
    """

    def __init__(self, initial: Path) -> None:
        self._recogniser = Recogniser.load(initial)
        self._parameters = trainable(self._recogniser.model)
        self._buffers = dict(self._recogniser.model.named_buffers())
        num_weights = sum(parameter.numel() for parameter in self._parameters)
        self._nothing = torch.zeros(1, dtype=self._parameters[0].dtype).expand(num_weights)
        self._look_at(self._nothing)

    def __call__(self, folder: Path, weights: Tensor, buffers: dict[str, Tensor]) -> None:
        self._look_at(weights)
        for name, buffer in buffers.items():
            self._buffers[name].copy_(buffer)
        try:
            self._recogniser.save(folder)
        finally:
            self._look_at(self._nothing)

    def _look_at(self, weights: Tensor) -> None:
        for parameter, view in zip(self._parameters, split(weights, self._parameters), strict=True):
            parameter.data = view


def use_threads(recipe: Recipe, learners_here: int) -> None:
    """Give torch its share of this machine's cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(recipe.engine.threads or max(1, cores // learners_here))
