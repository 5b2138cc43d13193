"""What the learners of a virtual run compute with: real weights and gradients. `timing` puts sizes in their place."""

import copy
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from starling.checkpoint.state import LearnerState
from starling.training.course import Course
from starling.training.flat import FlatModel, load_buffers, split
from starling.training.job import Job
from starling.training.replica import Replica

Buffers = list[Tensor | None]
"""A model's buffers, in the order of its modules."""
Loss = Callable[[], float | None]
"""The loss of a gradient; None where there is none to report."""


class Computing(Protocol):
    """A learner, as its gradients need it."""

    course: Course
    replica: Replica
    buffers: Buffers
    now: Callable[[], float]
    """Simulated seconds."""

    @property
    def rank(self) -> int:
        """Its number among the learners."""


class Computation(Protocol):
    """Makes the learners' replicas, and computes their gradients."""

    holds_weights: bool
    """Whether the weights are numbers, so that a consensus distance can be taken of them."""

    def new_replica(self) -> Replica:
        """A learner's weights and optimizer at the beginning."""

    def new_buffers(self, start: LearnerState | None) -> Buffers:
        """A learner's own buffers: those of a new model, or of the state that it starts from."""

    def named(self, buffers: Buffers) -> dict[str, Tensor]:
        """A learner's buffers by name."""

    def gradient(self, learner: Computing, at: Tensor) -> Loss:
        """Begin the gradient of the claimed mini-batch at the weights `at` `[P]`.

        Once the loss has been asked for, the gradient is in the learner's replica.
        """

    def close(self) -> None:
        """Nothing is computed any more."""


class RealGradients:
    """Real gradients, one after another, with one model that looks at each learner's weights and buffers in turn."""

    holds_weights = True

    def __init__(self, job: Job, device: torch.device) -> None:
        self._job = job
        self._model = FlatModel(job.workload.make_model(), device)
        self._first_buffers = self._model.own_buffers()
        self._workspace = torch.empty_like(self._model.weights)  # for the step of any learner, `[P]`
        self._gradients_of = split(self._workspace, self._model.parameters)

    def new_replica(self) -> Replica:
        job, model = self._job, self._model
        weights = model.weights.clone()
        gradients = torch.zeros_like(weights)
        parameters = [nn.Parameter(view) for view in split(weights, model.parameters)]
        for parameter, gradient in zip(parameters, self._gradients_of, strict=True):
            parameter.grad = gradient
        return Replica(weights, gradients, parameters, job.make_optimizer, job.clip_norm, self._workspace)

    def new_buffers(self, start: LearnerState | None) -> Buffers:
        buffers = copy.deepcopy(list(self._first_buffers))
        if start is not None:
            self._model.use_buffers(buffers)
            load_buffers(self._model.model, start.buffers)
        return buffers

    def named(self, buffers: Sequence[Tensor | None]) -> dict[str, Tensor]:
        self._model.use_buffers(buffers)
        return dict(self._model.model.named_buffers())

    def gradient(self, learner: Computing, at: Tensor) -> Loss:
        loss = self.compute(learner, at)
        return lambda: loss

    def close(self) -> None: ...

    def compute(self, learner: Computing, at: Tensor) -> float:
        """Leave the gradient of the claimed mini-batch at `at` in the learner's replica; the loss."""
        model = self._model
        model.use_weights(at)
        model.use_gradients(learner.replica.gradients)
        model.use_buffers(learner.buffers)
        loss = learner.course.compute_gradient(model.model, model)
        learner.buffers = model.own_buffers()  # a module may have replaced them
        return loss
