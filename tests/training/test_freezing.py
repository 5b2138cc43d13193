"""Frozen parameters: named by patterns, left alone by training and averaging, thawed when they should be."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from starling.budget import Budget, Schedule
from starling.checkpoint.state import LearnerState
from starling.engines.virtual.batching import BatchedGradients
from starling.engines.virtual.cluster import Cluster, ComputeModel
from starling.engines.virtual.engine import VirtualEngine
from starling.errors import ConfigError
from starling.strategies import find_strategy
from starling.training.flat import trainable
from starling.training.freezing import Freeze, Until, freeze, in_words
from starling.training.job import Job
from tests.contract.cases import FROZEN, NUM_FROZEN, THAWED, adamw
from tests.contract.problems import TinyRegression

UNEQUAL = Cluster(compute=ComputeModel(distribution="uniform", seconds=0.1, spread=0.5))
EQUAL = Cluster(compute=ComputeModel(seconds=0.1))


class Net(nn.Module):
    """The names of a recogniser's network, in small."""

    def __init__(self) -> None:
        super().__init__()
        self.subsampling = nn.Linear(2, 2)
        self.layers = nn.ModuleList([nn.LSTM(2, 3), nn.LSTM(3, 3)])
        self.output = nn.Linear(3, 4)


class HalfFrozen(TinyRegression):
    """Its first layer is never trained."""

    def make_model(self) -> nn.Module:
        model = super().make_model()
        freeze(model, [Freeze.model_validate("0")])
        return model


def job(strategy: str, steps: int = 24, frozen: Sequence[Freeze] = (THAWED,), **changes: Any) -> Job:
    chosen = find_strategy(strategy)
    kept = Schedule(decay="constant")
    return Job(
        **{"workload": TinyRegression(), "freeze": tuple(frozen), **changes},
        strategy=chosen,
        options=chosen.options(),
        budget=Budget(steps=steps),
        make_optimizer=adamw(0.01),
        schedule=kept,
        seed=3,
    )


def run(
    job: Job, world: int, cluster: Cluster = UNEQUAL, start: list[LearnerState] | None = None
) -> list[LearnerState]:
    return VirtualEngine(job, world, cluster, start=start).run().states


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("encoder", {"subsampling.weight", "subsampling.bias", *(f"layers.{n}" for n in (0, 1))}),
        ("layers.0", {"layers.0"}),
        ("layers", {"layers.0", "layers.1"}),
        ("layers.*.weight_hh_l0", {"layers.0.weight_hh_l0", "layers.1.weight_hh_l0"}),
        ("*.bias", {"subsampling.bias", "output.bias"}),
    ],
)
def test_parameters_are_named_by_modules_and_wildcards(pattern: str, names: set[str]) -> None:
    """`encoder` is all but the output layer."""
    model = Net()
    freeze(model, [Freeze.model_validate(pattern)])
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {
        name
        for name, _ in model.named_parameters()
        if any(name == each or name.startswith(f"{each}.") for each in names)
    }
    assert {id(each) for each in trainable(model)} == {id(each) for each in model.parameters() if each.requires_grad}


def test_freezing_the_encoder_leaves_the_outputs_of_tokens_and_phones_trainable() -> None:
    """Both are new if the tokens or the lexicon are."""
    model = Net()
    model.phones = nn.ModuleDict({"output": nn.Linear(3, 2)})
    freeze(model, [Freeze.model_validate("encoder")])
    assert [each for each, parameter in model.named_parameters() if parameter.requires_grad] == [
        "output.weight",
        "output.bias",
        "phones.output.weight",
        "phones.output.bias",
    ]


def test_what_cannot_be_frozen_is_refused() -> None:
    """With the names that there are; before anything is trained."""
    with pytest.raises(ConfigError, match=r"'layer.0' fits no parameter; .* subsampling, layers.0, layers.1, output"):
        freeze(Net(), [Freeze.model_validate("layer.0")])
    later = Freeze(parameters=("output",), until=Until(epochs=2))
    with pytest.raises(ConfigError, match="no parameter to train at the beginning"):
        freeze(Net(), [Freeze.model_validate("encoder"), later])
    with pytest.raises(ConfigError, match=r"0 have no `until`; freeze .* in make_model"):
        job("allreduce", frozen=[Freeze.model_validate("0")])
    with pytest.raises(ConfigError, match="no parameter to train"):
        run(job("allreduce", frozen=[FROZEN, FROZEN.model_copy(update={"parameters": ("3",)})]), 1)
    for wrong in ({}, {"epochs": 1, "fraction": 0.5}, {"fraction": 1.0}):
        with pytest.raises(ValidationError):
            Until.model_validate(wrong)


def test_thawing_goes_by_epochs_or_by_the_share_of_the_budget() -> None:
    """From that moment on, not after it."""
    assert [Until(epochs=2).is_over(epochs, 0.9) for epochs in (1.99, 2.0)] == [False, True]
    assert [Until(fraction=0.5).is_over(9.0, share) for share in (0.49, 0.5)] == [False, True]
    lines = in_words(
        Net(), [Freeze.model_validate("encoder"), Freeze(parameters=("output",), until=Until(fraction=0.2))]
    )
    assert lines == [
        f"frozen for the whole run: encoder, {sum(each.numel() for each in Net().parameters()) - 16:,} parameters",
        "frozen until 20% of the budget: output, 16 parameters",
    ]


@pytest.mark.parametrize("strategy", ["allreduce", "delay-by-one", "dpsgd", "adpsgd", "parameter-server", "hogwild"])
def test_what_is_never_trained_is_no_part_of_the_weights(strategy: str) -> None:
    """So no mean of three learners can round it; all the rest is trained."""
    model = HalfFrozen().make_model()
    for state in run(job(strategy, frozen=(), workload=HalfFrozen()), 3):
        assert state.weights.shape == (flat(model).numel() - NUM_FROZEN,)
        assert not torch.equal(state.weights, flat(model)[NUM_FROZEN:])


@pytest.mark.parametrize("strategy", ["allreduce", "delay-by-one", "adpsgd"])
def test_gradual_unfreezing_thaws_one_after_another(strategy: str) -> None:
    """Two learners, whose means are exact: the first half of the budget leaves the first layer alone."""
    start = flat(TinyRegression().make_model())
    frozen = [THAWED, Freeze(parameters=("3.bias",), until=Until(fraction=0.25))]
    moved = []
    for steps in (4, 10, 24):
        job_to = job(strategy, 24, frozen) if steps == 24 else _cut(strategy, frozen, steps)
        moved.append([state.weights != start for state in run(job_to, 2)])
    for few in moved[0]:
        assert not few[:NUM_FROZEN].any() and few[NUM_FROZEN:-1].all() and not few[-1]
    for some in moved[1]:
        assert not some[:NUM_FROZEN].any() and some[NUM_FROZEN:].all()
    assert all(each.all() for each in moved[2])


def _cut(strategy: str, frozen: Sequence[Freeze], steps: int) -> Job:
    """The beginning of a run of 24 steps: the same moments of thawing, as epochs of twelve mini-batches."""
    until = [Until(epochs=2 * (each.until.fraction or 0.0)) for each in frozen if each.until is not None]
    later = [each.model_copy(update={"until": when}) for each, when in zip(frozen, until, strict=True)]
    return job(strategy, steps, later)


@pytest.mark.parametrize("strategy", ["allreduce", "delay-by-one"])
@pytest.mark.parametrize("steps", [8, 16])
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(strategy: str, steps: int) -> None:
    """Stopped before and after the thaw, with AdamW's state, which a frozen parameter has none of."""
    thawed = Freeze(parameters=("0",), until=Until(epochs=1))
    whole = run(job(strategy, 24, [thawed]), 2, EQUAL)
    half = run(job(strategy, steps, [thawed]), 2, EQUAL)
    assert all(len(state.optimizer["state"]) == (2 if steps == 8 else 4) for state in half)
    resumed = run(job(strategy, 24, [thawed]), 2, EQUAL, start=half)
    assert all(torch.equal(one.weights, two.weights) for one, two in zip(resumed, whole, strict=True))


def test_what_is_frozen_keeps_its_bits_across_a_resume_of_an_asynchronous_run() -> None:
    """With other numbers of mini-batches for each learner."""
    start = flat(TinyRegression().make_model())
    half = run(job("adpsgd", 10, [FROZEN]), 4)
    for state in run(job("adpsgd", 24, [FROZEN]), 4, start=half):
        assert torch.equal(state.weights[:NUM_FROZEN], start[:NUM_FROZEN])
        assert not (state.weights == start)[NUM_FROZEN:].any()


def test_gradients_of_many_learners_in_one_call_are_left_to_single_ones() -> None:
    """And so the bits are those of one after another."""
    one_by_one = run(job("adpsgd"), 4)
    batched = Cluster(compute=UNEQUAL.compute.model_copy(update={"batched": True}))
    assert BatchedGradients(job("adpsgd"), torch.device("cpu")).problem == "parameters are thawed during the run"
    assert all(
        torch.equal(a.weights, b.weights) for a, b in zip(run(job("adpsgd"), 4, batched), one_by_one, strict=True)
    )


@pytest.mark.wide
def test_a_parameter_stays_frozen_for_a_learner_whose_gradient_is_computed_in_another_process() -> None:
    """The gradient's task carries what is frozen."""
    cluster = Cluster(compute=UNEQUAL.compute.model_copy(update={"processes": 2}))
    for one, two in zip(run(_sent(), 2, cluster), run(_sent(), 2), strict=True):
        assert torch.equal(one.weights, two.weights)
        assert torch.equal(one.weights[:NUM_FROZEN], flat(TinyRegression().make_model())[:NUM_FROZEN])


def _sent() -> Job:
    """A job that can be pickled."""
    chosen = find_strategy("allreduce")
    optimizer = partial(torch.optim.AdamW, lr=0.01)
    return Job(TinyRegression(), chosen, Budget(steps=12), optimizer, options=chosen.options(), freeze=(FROZEN,))
