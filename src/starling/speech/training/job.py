"""Makes the job of a recipe, and writes its models."""

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from starling.engines.processes.place import cores_here
from starling.experiment.folder import ExperimentFolder
from starling.experiment.task import job_of
from starling.speech.recipe import Recipe
from starling.speech.recogniser import Recogniser
from starling.speech.training.set_up import load_workload
from starling.speech.training.workload import FrameWorkload, SpeechWorkload
from starling.training.flat import split, trainable
from starling.training.freezing import Freeze, freeze
from starling.training.job import Job

Seconds = float
MIN_AUDIO_FOR_PROCESSES: Seconds = 1800.0
"""If a learner loads less audio in a run, loading processes take longer to start than they save. One core loads this
much in 10 to 20 s."""
AUDIO_PER_SECOND = 100.0
"""The assumed seconds of audio that a learner trains on in a second, to estimate the audio of a budget in minutes."""
MAX_PROCESSES = 4
"""The maximum of loading processes per learner on an accelerator, or with data from an object store."""


def make_job(recipe: Recipe, folder: ExperimentFolder, learners_here: int | None = None) -> Job:
    """The job of a recipe whose `folder` is set up. `learners_here` is the number of learners on this machine, None in
    a simulation."""
    workload = load_workload(recipe, folder)
    num_workers = recipe.batches.num_workers
    if num_workers == "auto" and isinstance(workload, FrameWorkload):
        num_workers = 0  # what it loads is ready on the disk
    if num_workers == "auto":
        epoch = float(workload.plan.speech_set.durations[workload.plan.utterances].sum(dtype=np.float64))
        num_workers = 0 if learners_here is None else loading_processes(recipe, learners_here, cores_here(), epoch)
    return job_of(
        recipe,
        workload,
        num_workers=num_workers,
        weighting=recipe.batches.weighting,
        freeze=tuple(each for each in recipe.freeze if each.until is not None),
    )


def loading_processes(recipe: Recipe, learners_here: int, cores: int, epoch: Seconds) -> int:
    """The number of loading processes per learner for `batches.num_workers: auto`; `epoch` is the audio of an epoch.

    Zero if learners have less than a core each, or if a learner loads little audio. A model on the CPU needs one
    process.
    """
    budget, batch = recipe.budget, recipe.batches.max_duration * recipe.batches.accumulate
    limits = [
        None if budget.epochs is None else budget.epochs * epoch,
        None if budget.steps is None else budget.steps * batch,
        None if budget.minutes is None else budget.minutes * 60.0 * AUDIO_PER_SECOND * recipe.num_workers,
    ]
    audio = min(each for each in limits if each is not None) / recipe.num_workers
    if cores < learners_here or audio < MIN_AUDIO_FOR_PROCESSES:
        return 0
    is_slow = recipe.data.remote is not None or (recipe.engine.device != "cpu" and torch.cuda.is_available())
    return max(1, min(MAX_PROCESSES, cores // learners_here - 1)) if is_slow else 1


def max_skipped(recipe: Recipe, job: Job) -> int:
    """How many utterances of an epoch may be skipped; if it is more, the run fails."""
    return int(recipe.data.filter.max_skipped * len(cast(SpeechWorkload | FrameWorkload, job.workload).plan.utterances))


class ModelWriter:
    """Writes a recogniser with the given weights `[P]` and buffers into a checkpoint.

    The network is created once, before training, because creating it draws from the random generators that training
    uses. Between two calls its parameters occupy no memory.
    """

    def __init__(self, initial: Path, frozen: Sequence[Freeze] = ()) -> None:
        self._recogniser = Recogniser.load(initial)
        freeze(self._recogniser.model, frozen)
        self._parameters = trainable(self._recogniser.model)
        self._buffers = dict(self._recogniser.model.named_buffers())
        num_weights = sum(parameter.numel() for parameter in self._parameters)
        self._empty = torch.zeros(1, dtype=self._parameters[0].dtype).expand(num_weights)
        self._set_weights(self._empty)

    def __call__(self, folder: Path, weights: Tensor, buffers: dict[str, Tensor]) -> None:
        self._set_weights(weights)
        for name, buffer in buffers.items():
            self._buffers[name].copy_(buffer)
        try:
            self._recogniser.save(folder)
        finally:
            self._set_weights(self._empty)

    def _set_weights(self, weights: Tensor) -> None:
        """Make the parameters views of `weights`."""
        for parameter, view in zip(self._parameters, split(weights, self._parameters), strict=True):
            parameter.data = view
