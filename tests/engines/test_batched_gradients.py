"""Gradients of many virtual learners in one call: the events of a run that computes them one after another, and its
weights to rounding."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from starling.budget import Budget
from starling.engines.virtual import batching
from starling.engines.virtual.batching import BatchedGradients
from starling.engines.virtual.cluster import Cluster, ComputeModel, LinkModel
from starling.engines.virtual.engine import Outcome, VirtualEngine
from starling.errors import DataError
from starling.training.job import Job, Observer, StepReport
from starling.training.speeds import Stragglers
from starling.workload import Ticket, Workload
from tests.contract.cases import CHOICES, NOT_FINITE, Choice, adamw, sgd
from tests.contract.conftest import widely
from tests.contract.problems import Normalised, Points, SkippingLayers, TinyRegression, Uneven

CPU = torch.device("cpu")
CLUSTER = Cluster(
    compute=ComputeModel(distribution="log-normal", seconds=0.1, spread=0.4), link=LinkModel(latency=0.005, jitter=0.3)
)


class Steps(Observer):
    """An observer that keeps every step's report."""

    def __init__(self) -> None:
        self.reports: list[StepReport] = []

    def on_step(self, report: StepReport) -> None:
        self.reports.append(report)


def job_of(workload: Workload[Any], choice: Choice, world: int, optimizer: Any = None, **fields: Any) -> Job:
    return Job(
        workload,
        choice.strategy,
        Budget(steps=48),
        optimizer or sgd(0.05),
        options=choice.options(world),
        stragglers=Stragglers(slow={1: 3.0}),
        seed=5,
        **fields,
    )


def both(job: Job, world: int) -> tuple[Outcome, Outcome, BatchedGradients, list[StepReport], list[StepReport]]:
    """A run one gradient after another, and a batched one."""
    single, batched, computation = Steps(), Steps(), BatchedGradients(job, CPU)
    first = VirtualEngine(job, world, CLUSTER, single).run()  # type: ignore[arg-type]
    second = VirtualEngine(job, world, CLUSTER, batched, computation=computation).run()  # type: ignore[arg-type]
    return first, second, computation, single.reports, batched.reports


@pytest.mark.wide
@pytest.mark.parametrize("name", widely(CHOICES))
def test_batched_gradients_change_no_event_and_no_weight_beyond_rounding(name: str) -> None:
    """The same tickets on the same learners at the same simulated times, with the same losses; the same weights."""
    first, second, computation, single, batched = both(job_of(TinyRegression(), CHOICES[name], 6), 6)
    assert computation.problem is None
    assert computation.most_together >= 2 or CHOICES[name].options(6).model_dump().get("update") == "synchronous"
    assert (first.seconds, first.num_events) == (second.seconds, second.num_events)
    assert [(each.rank, each.ticket, each.minutes) for each in single] == [
        (each.rank, each.ticket, each.minutes) for each in batched
    ]
    assert [each.loss for each in batched] == pytest.approx([each.loss for each in single], rel=1e-4)
    for one, other in zip(first.states, second.states, strict=True):
        torch.testing.assert_close(other.weights, one.weights, rtol=1e-4, atol=1e-6)


def test_batched_runs_repeat_to_the_bit() -> None:
    """One seed has one event hash, here as anywhere on this engine."""
    job = job_of(TinyRegression(), CHOICES["adpsgd-random"], 6)
    cluster = CLUSTER.model_copy(update={"compute": CLUSTER.compute.model_copy(update={"batched": True})})
    assert VirtualEngine(job, 6, cluster).run().event_hash == VirtualEngine(job, 6, cluster).run().event_hash


def test_gradients_are_computed_one_after_another_unless_asked_otherwise() -> None:
    """The event hashes of existing runs stay as they are."""
    assert not Cluster().compute.batched


@pytest.mark.parametrize(
    ("workload", "fields", "problem"),
    [
        (TinyRegression(dropout=0.2), {}, "random"),
        (Normalised(), {}, "the model has buffers"),
        (SkippingLayers(), {}, "vmap"),
        (Uneven(), {"weighting": "utterances"}, "weighted by utterances"),
        (TinyRegression(), {"faults": NOT_FINITE}, "faults are injected"),
    ],
)
def test_what_cannot_be_batched_is_computed_one_after_another(
    workload: Workload[Any], fields: dict[str, Any], problem: str
) -> None:
    """To the bit as without batching, and the reason is known."""
    first, second, computation, _, _ = both(job_of(workload, CHOICES["allreduce"], 4, **fields), 4)
    assert problem in str(computation.problem)
    assert computation.most_together == 0
    assert first.event_hash == second.event_hash


def test_mini_batches_of_several_micro_batches_are_computed_alone() -> None:
    """Their weights in the mean are each learner's own."""
    first, second, computation, _, _ = both(job_of(TinyRegression(micro_batches=3), CHOICES["allreduce"], 4), 4)
    assert (computation.problem, computation.most_together) == (None, 0)
    assert first.event_hash == second.event_hash


def test_mini_batches_of_unequal_shapes_are_grouped_by_shape() -> None:
    """Of 3, 29, 11 and 6 points: learners with as many are computed together."""
    first, second, computation, _, _ = both(job_of(Uneven(), CHOICES["adpsgd-ring"], 12), 12)
    assert computation.problem is None
    assert 2 <= computation.most_together <= 6
    for one, other in zip(first.states, second.states, strict=True):
        torch.testing.assert_close(other.weights, one.weights, rtol=1e-4, atol=1e-6)


class HalfUsed(TinyRegression):
    """Half of the parameters are never used."""

    def make_model(self) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(7)
            return nn.ModuleList([nn.Linear(5, 1), nn.Linear(5, 1)])

    def loss(self, model: nn.Module, examples: Points) -> Tensor:
        assert isinstance(model, nn.ModuleList)
        return ((model[1](examples.inputs).squeeze(1) - examples.targets) ** 2).mean()


def test_a_parameter_without_a_gradient_stays_where_it_is() -> None:
    """Weight decay moves weights whose gradient is 0, and none that got no gradient."""
    first, second, computation, _, _ = both(job_of(HalfUsed(), CHOICES["allreduce"], 4, adamw(0.01)), 4)
    assert (computation.problem, computation.most_together) == (None, 4)
    start = torch.cat([each.detach().reshape(-1) for each in HalfUsed().make_model().parameters()])
    for one, other in zip(first.states, second.states, strict=True):
        assert torch.equal(other.weights[:6], start[:6]) and not torch.equal(other.weights[6:], start[6:])
        torch.testing.assert_close(other.weights, one.weights, rtol=1e-4, atol=1e-6)


def test_batched_learners_step_in_one_call_and_their_saved_states_do_not_show_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another engine continues from such a state as if it were its own. Loops that earlier tests of this process left
    unclosed watch every optimizer; here nothing does."""
    monkeypatch.setattr(batching, "_global_optimizer_pre_hooks", {})
    job = job_of(TinyRegression(), CHOICES["allreduce"], 4, adamw(0.01))
    first, second, computation, _, _ = both(job, 4)
    for one, other in zip(first.states, second.states, strict=True):
        assert other.optimizer["param_groups"] == one.optimizer["param_groups"]
        torch.testing.assert_close(other.weights, one.weights, rtol=1e-4, atol=1e-6)
    replica = computation.new_replica()
    optimizer = replica.optimizer
    assert [group["fused"] for group in optimizer.param_groups] == [True]
    assert replica.fast_step is not None
    optimizer.load_state_dict(first.states[0].optimizer)
    assert [group["fused"] for group in optimizer.param_groups] == [True]


def test_what_cannot_be_batched_keeps_its_optimizer() -> None:
    """Its steps are to the bit as without batching, also for AdamW, whose steps in one call are rounded otherwise."""
    job = job_of(SkippingLayers(), CHOICES["adpsgd-ring"], 4, adamw(0.01))
    first, second, computation, _, _ = both(job, 4)
    assert computation.most_together == 0
    assert first.event_hash == second.event_hash
    assert [group["fused"] for group in computation.new_replica().optimizer.param_groups] == [None]


def test_an_optimizer_whose_maker_chose_how_it_steps_keeps_that() -> None:
    """Only what is left to torch is decided here."""
    choose = lambda parameters: torch.optim.SGD(parameters, lr=0.05, foreach=False)  # noqa: E731
    _, _, computation, _, _ = both(job_of(TinyRegression(), CHOICES["allreduce"], 4, choose), 4)
    assert computation.most_together == 4
    (group,) = computation.new_replica().optimizer.param_groups
    assert (group["fused"], group["foreach"]) == (None, False)


@pytest.mark.parametrize("make", [sgd(0.05), adamw(0.01)])
def test_a_step_without_torchs_wrapper_is_the_step_with_it(make: Callable[[list[nn.Parameter]], Optimizer]) -> None:
    """To the bit, also the optimizer's state, and after a saved state is loaded."""
    job = job_of(TinyRegression(), CHOICES["allreduce"], 4, make, clip_norm=0.5)
    _, _, computation, _, _ = both(job, 4)
    fast, plain = computation.new_replica(), computation.new_replica()
    plain.fast_step = None
    generator = torch.Generator().manual_seed(3)
    for number in range(6):
        gradient = torch.randn(fast.weights.shape, generator=generator)
        assert fast.step(gradient, 0.5) and plain.step(gradient, 0.5)
        assert torch.equal(fast.weights, plain.weights) and not fast.weights.requires_grad
        assert str(fast.optimizer.state_dict()) == str(plain.optimizer.state_dict())
        if number == 3:
            fast.restore(plain.weights, copy.deepcopy(plain.optimizer.state_dict()), {})


@pytest.mark.parametrize("is_global", [False, True])
def test_hooks_after_each_step_are_still_called(is_global: bool) -> None:
    """A hook of the optimizer's maker, or of the whole program."""
    calls: list[Optimizer] = []

    def note(optimizer: Optimizer, *_: Any) -> None:
        calls.append(optimizer)

    def make(parameters: list[nn.Parameter]) -> Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=0.05)
        if not is_global:
            optimizer.register_step_post_hook(note)
        return optimizer

    job = job_of(TinyRegression(), CHOICES["allreduce"], 4, make)
    added = register_optimizer_step_post_hook(note) if is_global else None
    try:
        _, _, computation, _, _ = both(job, 4)
    finally:
        if added is not None:
            added.remove()
    assert computation.most_together == 4
    assert len(calls) == 2 * 48


@dataclass(frozen=True)
class Scaled(Points):
    """Points with what is no tensor: a number, and their names."""

    scale: float = 1.0
    ids: tuple[str, ...] = ()

    def to(self, device: torch.device) -> "Scaled":
        return replace(self, inputs=self.inputs.to(device), targets=self.targets.to(device))


class Named(TinyRegression):
    """Mini-batches with names; with `by`, also a factor of the loss that differs from one to the next."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def load(self, ticket: Ticket) -> Sequence[Points]:
        (points,) = super().load(ticket)
        return [Scaled(points.inputs, points.targets, 2.0 + self.by * ticket.index, (str(ticket.step),))]

    def loss(self, model: nn.Module, examples: Points) -> Tensor:
        assert isinstance(examples, Scaled)
        return super().loss(model, examples) * examples.scale


def test_a_loss_may_use_non_tensors_only_if_all_learners_have_the_same() -> None:
    """Names may differ, because the loss does not use them. A factor that differs is noticed."""
    first, second, computation, single, batched = both(job_of(Named(0.0), CHOICES["allreduce"], 4), 4)
    assert (computation.problem, computation.most_together) == (None, 4)
    assert [each.loss for each in batched] == pytest.approx([each.loss for each in single], rel=1e-4)
    first, second, computation, _, _ = both(job_of(Named(1.0), CHOICES["allreduce"], 4), 4)
    assert "TypeError" in str(computation.problem)
    assert first.event_hash == second.event_hash


def test_an_error_of_a_workload_is_raised_unchanged() -> None:
    """A batch that cannot be computed is the workload's error, batched or not."""

    class Broken(TinyRegression):
        def loss(self, model: nn.Module, examples: Points) -> Tensor:
            raise DataError("utterance u7 is broken")

    job = job_of(Broken(), CHOICES["allreduce"], 4)
    with pytest.raises(DataError, match="utterance u7 is broken"):
        VirtualEngine(job, 4, CLUSTER, computation=BatchedGradients(job, CPU)).run()
