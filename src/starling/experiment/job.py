"""From a recipe to what the engines run."""

import os
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from starling.engines.flat import FlatModel
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
        checkpoint_every=recipe.checkpoints.every,
        seed=recipe.seed,
    )


def most_skipped(recipe: Recipe, job: Job) -> int:
    """How many utterances may be skipped in an epoch before the run of a recipe's job fails."""
    return int(recipe.data.filter.max_skipped * len(cast(SpeechWorkload, job.workload).utterances))


class ModelWriter:
    """Writes the recogniser with given weights `[P]` and buffers, as the checkpoints hold it."""

    def __init__(self, initial: Path) -> None:
        self._initial = initial

    def __call__(self, folder: Path, weights: Tensor, buffers: dict[str, Tensor]) -> None:
        recogniser = Recogniser.load(self._initial)
        flat = FlatModel(recogniser.model, torch.device("cpu"))
        flat.weights.copy_(weights)
        flat.load_buffers(buffers)
        recogniser.save(folder)


def use_threads(recipe: Recipe, learners_here: int) -> None:
    """Give torch its share of this machine's cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(recipe.engine.threads or max(1, cores // learners_here))
