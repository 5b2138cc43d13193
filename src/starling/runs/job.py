"""From a recipe to what the engines run."""

from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from starling.runs.cores import cores_here
from starling.runs.experiment.folder import ExperimentFolder
from starling.runs.frames import FrameWorkload
from starling.runs.recipe.recipe import Recipe
from starling.runs.setup import load_workload
from starling.runs.workload import SpeechWorkload
from starling.speech.recogniser import Recogniser
from starling.training.flat import split, trainable
from starling.training.job import Job

Seconds = float
WORTH_PROCESSES: Seconds = 1800.0
"""Audio that a learner loads in a run, from which on loading processes gain more than the seconds that they take to
start. On one core, this much is loaded in 10 to 20 s."""
AUDIO_PER_SECOND = 100.0
"""Audio that a learner trains on in a second, to guess how much a budget in minutes allows."""
MOST_PROCESSES = 4
"""For one learner; on an accelerator, or from an object store, where loading takes longest beside the computation."""


def make_job(recipe: Recipe, folder: ExperimentFolder, learners_here: int | None = None) -> Job:
    """The job of a recipe whose `folder` is set up, for one of `learners_here` on this machine; None: simulated."""
    workload = load_workload(recipe, folder)
    num_workers = recipe.batches.num_workers
    if num_workers == "auto" and isinstance(workload, FrameWorkload):
        num_workers = 0  # what it loads is ready on the disk
    if num_workers == "auto":
        epoch = float(workload.plan.speech_set.durations[workload.plan.utterances].sum(dtype=np.float64))
        num_workers = 0 if learners_here is None else loading_processes(recipe, learners_here, cores_here(), epoch)
    return Job(
        workload=workload,
        strategy=recipe.strategy.strategy,
        options=recipe.strategy.options,
        budget=recipe.budget,
        make_optimizer=recipe.optimizer.maker(),
        schedule=recipe.optimizer.schedule,
        clip_norm=recipe.optimizer.clip_norm,
        autocast=recipe.engine.autocast == "bf16",
        num_workers=num_workers,
        stragglers=recipe.stragglers,
        faults=recipe.faults,
        checkpoint_every=recipe.checkpoints.every,
        weighting=recipe.batches.weighting,
        seed=recipe.seed,
    )


def loading_processes(recipe: Recipe, learners_here: int, cores: int, epoch: Seconds) -> int:
    """How many processes load for one learner where the recipe says `auto`; `epoch` is the audio of an epoch.

    None where learners have less than a core each, or the whole run loads so little that starting processes would
    take longer. One is enough beside a model that computes on the CPU.
    """
    budget, batch = recipe.budget, recipe.batches.max_duration * recipe.batches.accumulate
    limits = [
        None if budget.epochs is None else budget.epochs * epoch,
        None if budget.steps is None else budget.steps * batch,
        None if budget.minutes is None else budget.minutes * 60.0 * AUDIO_PER_SECOND * recipe.num_workers,
    ]
    audio = min(each for each in limits if each is not None) / recipe.num_workers
    if cores < learners_here or audio < WORTH_PROCESSES:
        return 0
    is_slow = recipe.data.remote is not None or (recipe.engine.device != "cpu" and torch.cuda.is_available())
    return max(1, min(MOST_PROCESSES, cores // learners_here - 1)) if is_slow else 1


def most_skipped(recipe: Recipe, job: Job) -> int:
    """How many utterances may be skipped in an epoch before the run of a recipe's job fails."""
    return int(recipe.data.filter.max_skipped * len(cast(SpeechWorkload | FrameWorkload, job.workload).plan.utterances))


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
