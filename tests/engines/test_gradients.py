"""What a learner's gradient is: of which parameters, of which examples, with whose buffers."""

import copy
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from starling.budget import Budget
from starling.checkpoint.state import LearnerState
from starling.configuration import Config
from starling.engines.virtual.cluster import Cluster, ComputeModel
from starling.engines.virtual.engine import VirtualEngine
from starling.errors import ConfigError
from starling.strategies import STRATEGIES
from starling.strategies.allreduce import AllReduceOptions
from starling.strategies.delayed import DelayOptions
from starling.strategies.hadpsgd import HierarchicalOptions
from starling.strategies.parts.rules import Hybrid
from starling.training.job import Job, Observer, StepReport
from starling.workload import Ticket, Unit, Weighting
from tests.contract.cases import CHOICES, adamw, sgd
from tests.contract.problems import Normalised, Points, SkippingLayers, TinyRegression, Uneven

UNEQUAL = Cluster(compute=ComputeModel(distribution="uniform", seconds=0.1, spread=0.5))


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def states(job: Job, world: int) -> list[LearnerState]:
    return VirtualEngine(job, world, UNEQUAL).run().states


@pytest.mark.parametrize("strategy", ["allreduce", "delayed", "server-hybrid"])
def test_a_parameter_that_no_learner_used_stays_and_one_that_some_used_gets_their_mean(strategy: str) -> None:
    """The plain loop with all mini-batches of a step at once is the oracle, under AdamW, whose decay moves whatever
    has a gradient, even of 0."""
    workload, learners, steps = SkippingLayers(), 3, 8
    model = workload.make_model()
    optimizer = adamw(0.01)(list(model.parameters()))
    unused = []
    for step in range(steps):
        optimizer.zero_grad()
        for number in range(step * learners, (step + 1) * learners):
            (points,) = workload.load(Ticket(number // 12, number % 12, number))
            (workload.loss(model, points) / learners).backward()
        unused.append(sum(parameter.grad is None for parameter in model.parameters()))
        optimizer.step()
    assert 0 in unused and max(unused) > 0  # else this shows nothing
    choice = CHOICES[strategy]
    options = STRATEGIES["delayed"].options(delay=0) if strategy == "delayed" else choice.options(learners)
    job = Job(workload, choice.strategy, Budget(steps=steps * learners), adamw(0.01), options=options)
    torch.testing.assert_close(states(job, learners)[0].weights, flat(model), rtol=0.0, atol=1e-6)


class InParts(TinyRegression):
    """Mini-batches of 32 points, at once or in micro-batches of these sizes."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.sizes = sizes

    def load(self, ticket: Ticket) -> Sequence[Points]:
        generator = torch.Generator().manual_seed(ticket.step)
        inputs, targets = torch.randn(32, 5, generator=generator), torch.randn(32, generator=generator)
        parts = zip(inputs.split(self.sizes), targets.split(self.sizes), strict=True)
        return [Points(*each) for each in parts]

    def loss(self, model: nn.Module, examples: Points) -> Tensor:
        return super().loss(model, examples) if len(examples.targets) else model(torch.zeros(1, 5)).sum() * 0.0


@pytest.mark.parametrize("sizes", [[30, 2], [2, 30], [0, 30, 2], [30, 0, 2], [1, 30, 1, 0]], ids=str)
def test_an_accumulated_gradient_is_that_of_the_whole_mini_batch(sizes: list[int]) -> None:
    """Whatever each micro-batch holds, and with void ones among them; so is the loss that is reported."""

    def run(sizes: Sequence[int]) -> tuple[Tensor, list[float]]:
        losses: list[float] = []

        class Watcher(Observer):
            def on_step(self, report: object) -> None:
                losses.append(report.loss)  # type: ignore[attr-defined]

        job = Job(InParts(sizes), STRATEGIES["allreduce"], Budget(steps=12), sgd(0.3))
        return VirtualEngine(job, 1, observer=Watcher()).run().states[0].weights, losses  # type: ignore[arg-type]

    (weights, losses), (expected, expected_losses) = run(sizes), run([32])
    torch.testing.assert_close(weights, expected, rtol=0.0, atol=1e-6)
    assert losses == pytest.approx(expected_losses, rel=1e-5)


def test_a_void_micro_batch_is_not_computed() -> None:
    """Its zeros would move the statistics of a batch normalisation."""
    seen: list[int] = []

    class Watched(InParts):
        def loss(self, model: nn.Module, examples: Points) -> Tensor:
            seen.append(len(examples.targets))
            return super().loss(model, examples)

    states(Job(Watched([0, 30, 2, 0]), STRATEGIES["allreduce"], Budget(steps=2), sgd(0.3)), 1)
    assert seen == [30, 2, 30, 2]


def test_each_learner_on_the_virtual_clock_has_buffers_of_its_own() -> None:
    """Batch normalisation counts and measures what its own learner computed: a model for each learner, whose gradients
    are averaged, is the oracle."""
    workload, learners, steps = Normalised(), 4, 10
    models = [workload.make_model() for _ in range(learners)]
    for step in range(steps):
        for rank, model in enumerate(models):
            number = step * learners + rank
            model.zero_grad()
            (points,) = workload.load(Ticket(number // 12, number % 12, number))
            workload.loss(model, points).backward()
        means = [sum(each) / learners for each in zip(*([p.grad for p in m.parameters()] for m in models), strict=True)]
        with torch.no_grad():
            for model in models:
                for parameter, mean in zip(model.parameters(), means, strict=True):
                    parameter -= 0.1 * mean
    job = Job(workload, STRATEGIES["allreduce"], Budget(steps=steps * learners), sgd(0.1))
    for state, model in zip(found := states(job, learners), models, strict=True):
        assert state.buffers["1.num_batches_tracked"] == steps
        for name, buffer in model.named_buffers():
            torch.testing.assert_close(state.buffers[name], buffer, rtol=0.0, atol=1e-5)
    assert len({float(state.buffers["1.running_mean"][0]) for state in found}) == learners


def test_a_resumed_simulation_has_the_buffers_it_ended_with() -> None:
    """As weights are: of 24 + 24 mini-batches as of 48."""
    job = Job(Normalised(), STRATEGIES["dpsgd"], Budget(steps=48), sgd(0.1), options=CHOICES["dpsgd-ring"].options(2))
    whole = states(job, 2)
    half = copy.deepcopy(states(replace(job, budget=Budget(steps=24)), 2))
    resumed = VirtualEngine(job, 2, UNEQUAL, start=half).run().states
    for one, other in zip(whole, resumed, strict=True):
        assert one.buffers.keys() == other.buffers.keys()
        assert all(torch.equal(one.buffers[name], other.buffers[name]) for name in one.buffers)


MEAN_GRADIENTS: dict[str, Config] = {
    "allreduce": AllReduceOptions(),
    "delayed": DelayOptions(delay=0),
    "hadpsgd": HierarchicalOptions(per_node=3, pattern="pairs"),
    "parameter-server": Hybrid(),
}
"""Strategies under which three learners step together with the mean of their gradients."""


@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize("strategy", MEAN_GRADIENTS)
def test_learners_that_weigh_by_utterances_go_where_one_goes_with_all_their_mini_batches_at_once(
    strategy: str, num_parts: int
) -> None:
    """The plain loop on the union of a step's mini-batches, of 3, 29, 11 or 6 utterances, is the oracle."""
    workload, learners, steps = Uneven(num_parts), 3, 8
    model = workload.make_model()
    for step in range(steps):
        tickets = [Ticket(0, 0, step * learners + rank, rank % num_parts) for rank in range(learners)]
        batches = [points for ticket in tickets for points in workload.load(ticket)]
        union = Points(torch.cat([each.inputs for each in batches]), torch.cat([each.targets for each in batches]))
        descend(model, workload.loss(model, union))
    job = Job(
        workload,
        STRATEGIES[strategy],
        Budget(steps=steps * learners),
        sgd(0.1),
        options=MEAN_GRADIENTS[strategy],
        weighting="utterances",
    )
    torch.testing.assert_close(states(job, learners)[0].weights, flat(model), rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("weighting", ["batches", "frames"])
def test_a_step_is_the_mean_of_the_learners_gradients_by_the_weighting_of_the_job(weighting: Weighting) -> None:
    """Without one, every mini-batch counts alike. The losses that are reported are each mini-batch's own."""
    workload, learners, steps = Uneven(), 2, 8
    model = workload.make_model()
    expected: list[float] = []
    for step in range(steps):
        tickets = [Ticket(0, 0, step * learners + rank) for rank in range(learners)]
        sizes = [1.0 if weighting == "batches" else workload.planned_size(ticket, weighting) for ticket in tickets]
        losses = [workload.loss(model, *workload.load(ticket)) for ticket in tickets]
        expected += [float(loss.detach()) for loss in losses]
        descend(model, sum(size / sum(sizes) * loss for size, loss in zip(sizes, losses, strict=True)))
    reported: dict[int, float] = {}

    class Watcher(Observer):
        def on_step(self, report: StepReport) -> None:
            reported[report.ticket.step] = report.loss

    job = Job(workload, STRATEGIES["allreduce"], Budget(steps=steps * learners), sgd(0.1), weighting=weighting)
    found = VirtualEngine(job, learners, UNEQUAL, observer=Watcher()).run().states[0].weights
    torch.testing.assert_close(found, flat(model), rtol=0.0, atol=1e-6)
    assert [reported[number] for number in range(steps * learners)] == pytest.approx(expected, rel=1e-4)


def descend(model: nn.Module, loss: Tensor | float) -> None:
    """A step of plain SGD."""
    assert isinstance(loss, Tensor)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    with torch.no_grad():
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter -= 0.1 * gradient


def test_a_mini_batch_of_planned_size_zero_does_not_count_unless_all_are_of_size_zero() -> None:
    """Then each counts alike. To the bit."""

    class OfSize(TinyRegression):
        def __init__(self, *sizes: float) -> None:
            super().__init__()
            self.sizes = sizes

        def planned_size(self, ticket: Ticket, unit: Unit) -> float:
            return self.sizes[ticket.step]

    def run(workload: TinyRegression, learners: int, weighting: Weighting = "batches") -> Tensor:
        job = Job(workload, STRATEGIES["allreduce"], Budget(steps=1), sgd(0.1), weighting=weighting)
        return states(job, learners)[0].weights

    assert torch.equal(run(OfSize(8.0, 0.0), 2, "utterances"), run(TinyRegression(), 1))
    assert torch.equal(run(OfSize(0.0, 0.0), 2, "utterances"), run(TinyRegression(), 2))


@pytest.mark.parametrize("name", ["delay-by-one", "dpsgd-ring", "adpsgd-ring", "hogwild", "server-asynchronous"])
def test_a_weighting_is_refused_where_learners_do_not_average_gradients(name: str) -> None:
    """Each steps with its own, and an optimizer such as Adam would take no notice of the scale."""
    choice = CHOICES[name]
    with pytest.raises(ConfigError, match=f"'frames' .* {choice.strategy.name} .*allreduce"):
        Job(Uneven(), choice.strategy, Budget(steps=2), sgd(0.1), options=choice.options(2), weighting="frames")


def test_a_workload_that_does_not_know_its_sizes_cannot_be_weighted() -> None:
    """The error says which method is missing, and what to do without it."""
    job = Job(TinyRegression(), STRATEGIES["allreduce"], Budget(steps=2), sgd(0.1), weighting="utterances")
    with pytest.raises(ConfigError, match=r"TinyRegression .*planned_size.*batches"):
        states(job, 2)
    assert len(states(job, 1)) == 1
