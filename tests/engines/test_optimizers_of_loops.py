"""The optimizers of joined loops: lists of them, what is averaged of them, and their learning rates."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import starling
from starling.engines.loop.replica import LoopReplica, describe
from starling.errors import ConfigError, ProtocolError
from tests.contract.problems import TinyRegression
from tests.engines.drop_in_process import flat, take_gradient


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_a_list_that_cannot_be_joined_is_refused_by_name() -> None:
    model = nn.Linear(2, 2)
    first = torch.optim.SGD(model.parameters(), lr=0.1)
    for given, message in (
        ([], "got an empty list"),
        ([first, 3], "got SGD, int"),
        ([first, torch.optim.Adam([model.bias])], r"is in optimizer 0 \(SGD\) and in optimizer 1 \(Adam\)"),
    ):
        with pytest.raises(ConfigError, match=message):
            starling.join(model, given)  # type: ignore[arg-type]
    pair = [torch.optim.SGD([model.weight], lr=0.1), torch.optim.SGD([model.bias], lr=0.1)]
    with pytest.raises(ConfigError, match="several optimizers have no common state to average"):
        starling.join(model, pair, "adpsgd", optimizer_state="averaged")


def test_only_an_optimizer_that_joined_can_step() -> None:
    model = nn.Linear(2, 2)
    pair = [torch.optim.SGD([model.weight], lr=0.1), torch.optim.SGD([model.bias], lr=0.1)]
    other = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    with (
        starling.join(model, pair) as learner,
        pytest.raises(ProtocolError, match=r"SGD that was not given to starling"),
    ):
        learner.step(optimizer=other)


def test_optimizers_of_other_parameters_step_and_those_of_the_models_do_again_after_closing() -> None:
    """Only what would change the joined weights is refused."""
    model, elsewhere = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    second, harmless = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, elsewhere))
    with starling.join(model, optimizer) as learner:
        elsewhere(torch.ones(1, 2)).sum().backward()
        harmless.step()
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(ProtocolError, match="a step of SGD would change parameters of the joined model"):
            second.step()
        learner.step()
    second.step()


@pytest.mark.parametrize("scaled", [False, True])
def test_an_attached_list_steps_with_the_optimizer_that_is_called(scaled: bool) -> None:
    """As the plain loop does, to the bit: the other one's gradients are kept for its own step."""

    def train(is_attached: bool) -> Tensor:
        model = TinyRegression().make_model()
        parameters = list(model.parameters())
        pair = [torch.optim.SGD(parameters[:2], lr=0.1, momentum=0.9), torch.optim.AdamW(parameters[2:], lr=0.01)]
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, enabled=scaled)
        learner = starling.attach(pair, model, "allreduce", scaler=scaler) if is_attached else None
        for step in range(6):
            take_gradient(model, step)
            for parameter in parameters:
                parameter.grad = scaler.scale(torch.ones(())) * parameter.grad if scaled else parameter.grad
            for optimizer in pair if step % 3 else pair[:1]:
                scaler.step(optimizer) if scaled else optimizer.step()
            scaler.update()
        if learner is not None:
            learner.close()
        return flat(model)

    assert torch.equal(train(True), train(False))


def test_what_a_loop_loads_into_its_optimizer_is_averaged_from_then_on() -> None:
    """`load_state_dict` makes new tensors, which would leave averaging without a word."""
    model = TinyRegression().make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    replica = LoopReplica(model, optimizer, is_shared=False)
    size = len(replica.weights)
    replica.pieces(size, optimizer_state=True)
    loaded = optimizer.state_dict()
    loaded["state"] = {
        number: {"momentum_buffer": torch.full_like(each, 3.0)} for number, each in enumerate(model.parameters())
    }
    optimizer.load_state_dict(loaded)
    replica.take_from_loop("learner 0")
    momenta = slice(size, 2 * size)
    assert torch.equal(replica.snapshot(momenta), torch.full((size,), 3.0))
    replica.replace(torch.full((size,), 5.0), momenta)
    for parameter in model.parameters():
        assert bool((optimizer.state[parameter]["momentum_buffer"] == 5.0).all())


def test_complex_parameters_are_refused_by_name() -> None:
    model = nn.Module()
    model.register_parameter("phases", nn.Parameter(torch.zeros(2, dtype=torch.complex64)))
    with pytest.raises(ConfigError, match=r"parameter phases is torch\.complex64.*view_as_complex"):
        starling.join(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_description_has_the_class_and_the_options_but_not_what_schedulers_change() -> None:
    """Otherwise a joiner would be refused by learners whose rate has decayed."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW([{"params": [model.weight], "weight_decay": 0.0}, {"params": [model.bias]}], lr=0.1)
    before = describe(optimizer)
    assert before.startswith("AdamW(amsgrad=False, betas=(0.9, 0.999)") and before.endswith(
        "groups 0: weight_decay=0.0"
    )
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=10)
    assert describe(optimizer) == before
    assert describe(torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.8, 0.9))) != before


def trained(strategy: str, options: dict[str, Any], rates: tuple[float, float], steps: int = 9) -> list[Tensor]:
    """The two layers of a model, each a parameter group with its own rate, and independent of the other."""
    model = nn.ModuleList([nn.Linear(3, 1, bias=False) for _ in rates])
    with torch.no_grad():
        for number, layer in enumerate(model):
            layer.weight.copy_(torch.tensor([[1.0, -2.0, 0.5]]) + number)
    groups = [{"params": layer.parameters(), "lr": rate} for layer, rate in zip(model, rates, strict=True)]
    with starling.join(model, torch.optim.SGD(groups), strategy, **options) as learner:
        for step in range(steps):
            model.zero_grad()
            points = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
            sum(layer(points).square().mean() for layer in model).backward()
            learner.step()
        with learner.consensus(final=True):
            return [layer.weight.detach().clone() for layer in model]


@pytest.mark.parametrize(
    ("strategy", "options"),
    [("slowmo", {"every": 3}), ("qg-dsgdm", {"beta": 0.5})],
)
@pytest.mark.parametrize("rates", [(0.05, 0.1), (0.0, 0.1), (0.1, 0.0)])
def test_each_parameter_group_has_its_own_rate(
    strategy: str, options: dict[str, Any], rates: tuple[float, float]
) -> None:
    """Where a method divides by the rate, groups of one model do what they would do alone; at rate 0 they stay."""
    together = trained(strategy, options, rates)
    for number, rate in enumerate(rates):
        alone = trained(strategy, options, (rate, rate))[number]
        torch.testing.assert_close(together[number], alone, rtol=1e-6, atol=1e-7)
        assert torch.equal(alone, torch.tensor([[1.0, -2.0, 0.5]]) + number) == (rate == 0.0)
