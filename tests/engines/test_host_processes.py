"""Gradients of virtual learners in several processes: the very events and bits of a run in one process."""

import multiprocessing
import os
from collections.abc import Generator, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from starling.budget import Budget
from starling.engines.virtual.cluster import Cluster, ComputeModel, LinkModel
from starling.engines.virtual.computation import HostProcesses, RealGradients
from starling.engines.virtual.engine import VirtualEngine
from starling.errors import ConfigError, StarlingError
from starling.training.faults import NotFinite
from starling.training.job import Job
from starling.workload import Ticket
from tests.contract.cases import CHOICES, Choice
from tests.contract.conftest import widely
from tests.contract.problems import Normalised, Points, SkippingLayers, TinyRegression

CPU = torch.device("cpu")
CLUSTER = Cluster(
    compute=ComputeModel(distribution="log-normal", seconds=0.1, spread=0.4), link=LinkModel(latency=0.005, jitter=0.3)
)


class Kept(HostProcesses):
    """Serves one run after another."""

    def begin(self, job: Job) -> "Kept":
        RealGradients.__init__(self, job, CPU)
        return self

    def close(self) -> None: ...

    def end(self) -> None:
        super().close()


@pytest.fixture(autouse=True)
def one_thread() -> Generator[None, None, None]:
    """As in the processes that compute gradients."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def kept() -> Generator[Kept, None, None]:
    """Two processes that compute gradients of `TinyRegression`."""
    computation = Kept(job_of(TinyRegression(), CHOICES["allreduce"]), CPU, 2)
    yield computation
    computation.end()


def job_of(workload: object, choice: Choice, **fields: object) -> Job:
    job = Job(
        workload,
        choice.strategy,
        Budget(steps=24),
        partial(torch.optim.SGD, lr=0.05),
        options=choice.options(6),
        seed=5,
    )  # type: ignore[arg-type]
    return replace(job, **fields)


@pytest.mark.wide
@pytest.mark.parametrize("name", widely(CHOICES))
def test_results_do_not_depend_on_the_number_of_processes(name: str, kept: Kept) -> None:
    """One event hash, which holds the bits of every loss, and the same weights."""
    job = job_of(TinyRegression(), CHOICES[name])
    first = VirtualEngine(job, 6, CLUSTER).run()
    second = VirtualEngine(job, 6, CLUSTER, computation=kept.begin(job)).run()
    assert second.event_hash == first.event_hash
    for one, other in zip(first.states, second.states, strict=True):
        assert torch.equal(one.weights, other.weights)


@pytest.mark.wide
@pytest.mark.parametrize("workload", [Normalised(), SkippingLayers()], ids=["buffers", "unused parameters"])
def test_buffers_and_unused_parameters_are_those_of_each_learner(workload: object) -> None:
    """Running means belong to a learner, whichever process computed its gradient; and a fault is injected once."""
    job = job_of(workload, CHOICES["adpsgd-random"], faults=(NotFinite(nan=1, at_step=2),))
    first = VirtualEngine(job, 3, CLUSTER).run()
    second = VirtualEngine(job, 3, CLUSTER, computation=HostProcesses(job, CPU, 1)).run()
    assert second.event_hash == first.event_hash
    for one, other in zip(first.states, second.states, strict=True):
        assert torch.equal(one.weights, other.weights)
        assert all(torch.equal(one.buffers[each], other.buffers[each]) for each in one.buffers)


class Remembering(Normalised):
    """Holds each mini-batch that it has loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[Points] = []

    def load(self, ticket: Ticket) -> Sequence[Points]:
        self.loaded += (batches := super().load(ticket))
        return batches


def test_what_a_simulation_keeps_is_no_open_file() -> None:
    """Mini-batches that a workload keeps, and buffers of the learners, stay out of shared memory: a process may have
    1,024 open files."""
    job = job_of(workload := Remembering(), CHOICES["adpsgd-random"])
    states = VirtualEngine(job, 3, CLUSTER, computation=HostProcesses(job, CPU, 1)).run().states
    assert len(workload.loaded) == 24
    kept = [tensor for points in workload.loaded for tensor in (points.inputs, points.targets)]
    kept += [buffer for state in states for buffer in state.buffers.values()]
    assert not any(tensor.is_shared() for tensor in kept)


@pytest.mark.wide
def test_the_cluster_says_how_many_processes_compute() -> None:
    """With one, nothing is started."""
    job = job_of(TinyRegression(), CHOICES["allreduce"])
    before = set(multiprocessing.active_children())
    engine = VirtualEngine(job, 2, Cluster(compute=ComputeModel(processes=2)))
    assert len(set(multiprocessing.active_children()) - before) == 2
    assert engine.run().event_hash == VirtualEngine(job, 2).run().event_hash
    assert set(multiprocessing.active_children()) == before


class Failing(TinyRegression):
    """Raises in every process but the one that made it."""

    def __init__(self, is_deadly: bool) -> None:
        super().__init__()
        self.is_deadly, self.home = is_deadly, os.getpid()

    def loss(self, model: nn.Module, examples: Points) -> Tensor:
        if os.getpid() != self.home:
            if self.is_deadly:
                os._exit(7)
            raise ValueError("no such loss")
        return super().loss(model, examples)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("is_deadly", "message"),
    [(False, "ValueError: no such loss"), (True, "a process that computed gradients ended with exit code 7")],
)
def test_an_error_in_a_process_ends_the_run_and_all_processes(is_deadly: bool, message: str) -> None:
    """It says what happened there."""
    before, job = set(multiprocessing.active_children()), job_of(Failing(is_deadly), CHOICES["adpsgd-random"])
    with pytest.raises(StarlingError, match=message):
        VirtualEngine(job, 2, CLUSTER, computation=HostProcesses(job, CPU, 1)).run()
    assert set(multiprocessing.active_children()) == before


def test_what_cannot_be_computed_in_processes_is_refused() -> None:
    """Gradients in batches, a GPU, and a job that cannot be pickled."""
    with pytest.raises(ValidationError, match="leave out batched or processes"):
        ComputeModel(batched=True, processes=2)
    job = job_of(TinyRegression(), CHOICES["allreduce"])
    with pytest.raises(ConfigError, match=r"cluster.compute.processes: 2 are for the CPU, not for cuda:0"):
        HostProcesses(job, torch.device("cuda:0"), 2)
    with pytest.raises(ConfigError, match=r"cluster.compute.processes: the job cannot be sent to 2 processes"):
        HostProcesses(replace(job, make_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)), CPU, 2)
