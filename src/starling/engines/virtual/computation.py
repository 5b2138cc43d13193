"""The computations of learners in a virtual run: real weights and gradients, in this process or in several.

`timing` replaces these computations with sizes. A gradient depends only on weights, buffers and its mini-batch, so it
can be computed elsewhere while the simulation continues.
"""

import copy
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing import current_process
from multiprocessing.connection import wait
from typing import Any

import torch
from torch import Tensor, nn

from starling.checkpoint.state import LearnerState
from starling.errors import ConfigError
from starling.training.course import CourseLearner
from starling.training.flat import FlatModel, load_buffers, split
from starling.training.gradient import Computed, GradientTask, compute_gradient
from starling.training.job import Job
from starling.training.replica import Replica
from starling.worker_processes import answer_of, worker_processes

Buffers = list[Tensor | None]
"""A model's buffers, in the order of its modules."""
Loss = Callable[[], float | None]
"""Function that returns the loss of a gradient, or None if there is no loss to report."""


class Member(CourseLearner):
    """A learner of a membership."""

    buffers: Buffers

    @abstractmethod
    def begin(self) -> None:
        """Start the strategy."""


class Computation(ABC):
    """Creates the learners' replicas, and computes their gradients."""

    holds_weights = True
    """Whether the weights have values, so that a consensus distance can be computed."""

    @abstractmethod
    def new_replica(self) -> Replica:
        """Create a learner's replica: its initial weights and its optimizer."""

    def new_buffers(self, start: LearnerState | None) -> Buffers:
        """Return a learner's own buffers, which are those of a new model or of the state from which it starts."""
        return []

    def named(self, buffers: Buffers) -> dict[str, Tensor]:
        """Return a learner's buffers by name."""
        return {}

    @abstractmethod
    def gradient(self, learner: Member, at: Tensor) -> Loss:
        """Begin the gradient of the claimed mini-batch at the weights `at` `[P]`.

        Once the loss has been requested, the gradient is in the learner's replica.
        """

    def close(self) -> None:  # noqa: B027 - most subclasses have nothing to close
        """End the computation. No gradient may follow."""


class RealGradients(Computation):
    """Computes real gradients one after another, with one model that views each learner's weights and buffers in
    turn."""

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

    def gradient(self, learner: Member, at: Tensor) -> Loss:
        loss = self.compute(learner, at)
        return lambda: loss

    def compute(self, learner: Member, at: Tensor) -> float:
        """Compute the gradient of the claimed mini-batch at `at` in the learner's replica, and return the loss."""
        model = self._model
        model.use_weights(at)
        model.use_gradients(learner.replica.gradients)
        model.use_buffers(learner.buffers)
        loss = learner.compute_gradient(model.model, model)
        learner.buffers = model.own_buffers()  # a module may have replaced them
        return loss


_SLOTS = 2
"""Number of slots of each process. The process computes in one slot while the other is filled."""


@dataclass
class _Begun:
    """A gradient under way."""

    learner: Member
    at: Tensor
    task: GradientTask
    batches: Sequence[Sequence[Any]]
    slot: int | None = None
    loss: float | None = None


class HostProcesses(RealGradients):
    """Computes real gradients in `count` processes, each of which has its own copy of the workload and the model.

    A process reads the weights from shared memory, and writes the gradient to it. Results are awaited when the
    simulated gradient is complete, so that events and numbers are the same as with one process with one thread.
    """

    def __init__(self, job: Job, device: torch.device, count: int) -> None:
        if device.type != "cpu":
            raise ConfigError(f"cluster.compute.processes: {count} are for the CPU, not for {device}; leave it out")
        if current_process().daemon:
            raise ConfigError(
                f"cluster.compute.processes: {count}, but cells that are computed side by side cannot have processes "
                "of their own; leave out cluster.compute.processes, or compare.jobs"
            )
        super().__init__(job, device)
        self._memory = self._workspace.new_zeros(count * _SLOTS, 2, len(self._workspace))
        """The weights and the gradient in each slot."""
        self._memory.share_memory_()  # type: ignore[no-untyped-call]
        self._begun: OrderedDict[int, _Begun] = OrderedDict()  # gradients by the learner's `id`
        self._exits = ExitStack()

        work, key = _Worker(job, self._memory), "cluster.compute.processes"
        self._workers = self._exits.enter_context(worker_processes(work, count, "starling-gradients", "the job", key))
        self._lines = list(self._workers) * _SLOTS
        """Connection that serves each slot."""
        self._free = list(range(count * _SLOTS))
        self._computing: dict[int, _Begun] = {}  # gradients by slot

    def gradient(self, learner: Member, at: Tensor) -> Loss:
        before = self._begun.get(id(learner))
        if before is not None:  # the previous gradient was not awaited
            self._wait_for(before)
        task, batches = learner.gradient_task()
        begun = self._begun[id(learner)] = _Begun(learner, at, task, batches)
        self._receive(timeout=0.0)
        self._hand_out()

        def loss() -> float | None:
            if self._begun.get(id(learner)) is begun:
                self._wait_for(begun)
            return begun.loss

        return loss

    def close(self) -> None:
        self._exits.close()

    def _hand_out(self) -> None:
        """Give the gradients that are under way to free processes, in order."""
        for begun in self._begun.values():
            if not self._free:
                return
            if begun.slot is None:
                begun.slot = self._free.pop(0)
                self._memory[begun.slot, 0].copy_(begun.at)
                self._computing[begun.slot] = begun
                batches = copy.deepcopy(begun.batches)  # a tensor that is sent moves to shared memory: an open file
                with suppress(OSError):  # the process has died, which `answer_of` reports
                    self._lines[begun.slot].send((begun.slot, begun.task, batches, _copied(begun.learner.buffers)))

    def _wait_for(self, begun: _Begun) -> None:
        """Receive gradients until the gradient `begun` has arrived."""
        self._begun.move_to_end(id(begun.learner), last=False)
        while self._begun.get(id(begun.learner)) is begun:
            self._hand_out()
            self._receive(timeout=None)

    def _receive(self, timeout: float | None) -> None:
        """Receive the gradients that processes have computed."""
        ready = wait({self._lines[slot] for slot in self._computing}, timeout)
        for line in [line for line in self._workers if line in ready]:
            which, advice = "a process that computed gradients", "use fewer with cluster.compute.processes"
            slot, computed, buffers = answer_of(line, self._workers[line], which, advice)
            begun = self._computing.pop(slot)
            self._free.append(slot)
            learner = begun.learner
            learner.replica.gradients.copy_(self._memory[slot, 1])
            learner.buffers, begun.loss = _copied(buffers), computed.loss
            learner.computed(computed)
            del self._begun[id(learner)]


def _copied(buffers: Buffers) -> Buffers:
    return [None if buffer is None else buffer.clone() for buffer in buffers]


class _Worker:
    """The state of a process that computes gradients: the job's model, which is created for the first gradient, and the
    memory of all slots."""

    def __init__(self, job: Job, memory: Tensor) -> None:
        self._job, self._memory = job, memory
        self._flat: FlatModel | None = None

    def __call__(
        self, slot: int, task: GradientTask, batches: Sequence[Sequence[Any]], buffers: Buffers
    ) -> tuple[int, Computed, Buffers]:
        if self._flat is None:
            torch.set_num_threads(1)
            self._flat = FlatModel(self._job.workload.make_model(), self._memory.device)
        flat = self._flat
        flat.use_weights(self._memory[slot, 0])
        flat.use_gradients(self._memory[slot, 1])
        flat.use_buffers(buffers)
        computed = compute_gradient(self._job, task, batches, flat.model, flat)
        return slot, computed, flat.own_buffers()
