"""Gradients of virtual learners in several processes of this machine.

A gradient depends on weights, buffers and its mini-batch alone, so that it can be computed elsewhere while the
simulation continues. A process gets the weights in shared memory, and leaves the gradient there. Results are awaited
when the simulated gradient is complete: events and numbers are those of one process with one thread.
"""

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing import current_process
from multiprocessing.connection import Connection, wait
from traceback import format_exception
from typing import Any, NamedTuple

import torch
from torch import Tensor

from starling.checkpoint.state import LearnerState
from starling.engines.virtual.computation import Buffers, Computing, Loss, RealGradients
from starling.errors import ConfigError, StarlingError
from starling.training.flat import FlatModel
from starling.training.gradient import Computed, GradientTask, compute_gradient
from starling.training.job import Job
from starling.training.replica import Replica
from starling.worker_processes import be_a_worker, exit_code_of, worker_processes

_SLOTS = 2
"""Of each process: it computes in one while the other is filled."""


class _Place(NamedTuple):
    line: Connection
    slot: int


@dataclass
class _Begun:
    """A gradient that is under way."""

    learner: Computing
    at: Tensor
    task: GradientTask
    batches: Sequence[Sequence[Any]]
    place: _Place | None = None
    loss: float | None = None


class HostProcesses:
    """Real gradients in `count` processes; each has its own copy of the workload and the model."""

    holds_weights = True

    def __init__(self, job: Job, device: torch.device, count: int) -> None:
        if device.type != "cpu":
            raise ConfigError(f"cluster.compute.processes: {count} are for the CPU, not for {device}; leave it out")
        if current_process().daemon:
            raise ConfigError(
                f"cluster.compute.processes: {count}, but cells that are computed side by side cannot have processes "
                "of their own; leave out cluster.compute.processes, or compare.jobs"
            )
        self._real = RealGradients(job, device)
        first = self._real.new_replica()
        self._memory = first.weights.new_zeros(count * _SLOTS, 2, len(first.weights))
        """Weights and gradient of each slot."""
        self._memory.share_memory_()  # type: ignore[no-untyped-call]
        self._begun: OrderedDict[int, _Begun] = OrderedDict()  # by the learner's identity
        self._exits = ExitStack()

        def problem(error: Exception) -> ConfigError:
            return ConfigError(
                f"cluster.compute.processes: the job cannot be sent to {count} processes ({error}); define its "
                "functions at the top level of a module or of the script, or leave out cluster.compute.processes"
            )

        starting = worker_processes(_serve, (job, self._memory), count, "starling-gradients", problem)
        self._workers = self._exits.enter_context(starting)
        self._free = [
            _Place(line, number * _SLOTS + slot) for slot in range(_SLOTS) for number, line in enumerate(self._workers)
        ]
        self._computing: dict[_Place, _Begun] = {}

    def new_replica(self) -> Replica:
        return self._real.new_replica()

    def new_buffers(self, start: LearnerState | None) -> Buffers:
        return self._real.new_buffers(start)

    def named(self, buffers: Buffers) -> dict[str, Tensor]:
        return self._real.named(buffers)

    def gradient(self, learner: Computing, at: Tensor) -> Loss:
        before = self._begun.get(id(learner))
        if before is not None:  # it was not awaited
            self._wait_for(before)
        task, batches = learner.course.gradient_task(), learner.course.claimed_batches()
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
            if begun.place is None:
                begun.place = self._free.pop(0)
                self._memory[begun.place.slot, 0].copy_(begun.at)
                self._computing[begun.place] = begun
                buffers = [None if buffer is None else buffer.clone() for buffer in begun.learner.buffers]
                with suppress(OSError):  # the process has died, which `_receive` reports
                    begun.place.line.send((begun.place.slot, begun.task, begun.batches, buffers))

    def _wait_for(self, begun: _Begun) -> None:
        """Receive gradients until one is there."""
        self._begun.move_to_end(id(begun.learner), last=False)
        while self._begun.get(id(begun.learner)) is begun:
            self._hand_out()
            self._receive(timeout=None)

    def _receive(self, timeout: float | None) -> None:
        """Take what processes have computed."""
        ready = wait({place.line for place in self._computing}, timeout)
        for line in [line for line in self._workers if line in ready]:
            try:
                slot, computed, buffers = line.recv()
            except (EOFError, OSError):
                code = exit_code_of(self._workers[line])
                raise StarlingError(
                    f"a process that computed gradients ended with exit code {code} (killed, or out of memory?); use "
                    "fewer with cluster.compute.processes"
                ) from None
            if isinstance(computed, Exception):
                raise computed
            place = _Place(line, slot)
            begun = self._computing.pop(place)
            self._free.append(place)
            learner = begun.learner
            learner.replica.gradients.copy_(self._memory[slot, 1])
            learner.buffers, begun.loss = buffers, computed.loss
            learner.course.computed(computed)
            del self._begun[id(learner)]


def _serve(line: Connection, job: Job, memory: Tensor) -> None:
    """Compute gradients until the other end of the connection is closed."""
    be_a_worker()
    torch.set_num_threads(1)
    models: list[FlatModel] = []
    with suppress(EOFError, OSError):
        while True:
            slot, task, batches, buffers = line.recv()
            try:
                models = models or [FlatModel(job.workload.make_model(), memory.device)]
                flat = models[0]
                flat.use_weights(memory[slot, 0])
                flat.use_gradients(memory[slot, 1])
                flat.use_buffers(buffers)
                computed: Computed | Exception = compute_gradient(job, task, batches, flat.model, flat)
                buffers = flat.own_buffers()
            except Exception as error:
                computed = error
                if not isinstance(error, StarlingError):  # it may not be picklable
                    computed = StarlingError("".join(format_exception(error)))
            line.send((slot, computed, buffers))
