"""The drop-in: anybody's PyTorch loop as one learner among several."""

import json
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import starling
from starling.errors import ConfigError, ProtocolError
from tests.contract.oracle import SYNCHRONOUS, Vector
from tests.contract.problems import TinyRegression
from tests.engines.drop_in_process import STEPS, flat, take_gradient
from tests.warm_start import run_learners, start_learners

ALONE = [
    ("allreduce", {}),
    ("delay-by-one", {}),
    ("dpsgd", {}),
    ("adpsgd", {}),
    ("adpsgd", {"optimizer_state": "averaged"}),
    ("hadpsgd", {"per_node": 1}),
    ("parameter-server", {}),
    ("parameter-server", {"update": "summed", "sum": 1}),
    ("parameter-server", {"update": "hybrid"}),
    ("hogwild", {}),
]
SERVED: dict[str, dict[str, Any]] = {
    "server-hybrid": {"strategy": "parameter-server", "options": {"update": "hybrid", "shards": 2}},
    "server": {"strategy": "parameter-server", "options": {"shards": 2}},
    "server-summed": {
        "strategy": "parameter-server",
        "options": {"update": "summed", "sum": 5, "overlap": True, "scale_by_staleness": True},
    },
    "server-synchronous": {"strategy": "parameter-server", "options": {"update": "synchronous", "shards": 2}},
    "server-bounded": {
        "strategy": "parameter-server",
        "options": {"staleness_bound": 1, "shards": 2},
        "steps": {"0": 4, "1": 40},
    },
    "hogwild": {"strategy": "hogwild"},
    "hogwild-uneven": {"strategy": "hogwild", "steps": {"0": 0, "1": 30}, "asks": 1},
}
CASES: dict[str, dict[str, Any]] = {
    "allreduce": {"strategy": "allreduce"},
    "delay-by-one": {"strategy": "delay-by-one"},
    "dpsgd-random": {"strategy": "dpsgd", "options": {"pattern": "random"}},
    "dpsgd-pairs": {"strategy": "dpsgd", "options": {"pattern": "pairs"}},
    "adpsgd": {"strategy": "adpsgd"},
    "averaged": {"strategy": "adpsgd", "options": {"optimizer_state": "averaged", "pattern": "pairs"}},
    "still": {"strategy": "adpsgd", "lr": 0.0},
    "first-has-none": {"strategy": "adpsgd", "steps": {"0": 0}},
    "last-has-many": {"strategy": "adpsgd", "steps": {"1": 60}},
    "nobody-has-any": {"strategy": "adpsgd", "steps": {"0": 0, "1": 0, "2": 0}},
    "others-have-closed": {"strategy": "adpsgd", "steps": {"0": 2, "1": 40}, "asks": 1},
    "node": {"strategy": "hadpsgd", "options": {"per_node": 1}},
    **SERVED,
}
Runner = Callable[[int], dict[str, list[dict[str, Tensor]]]]
every_world = pytest.mark.parametrize("world", [2, 3])


def command(cases: dict[str, Any], folder: Path) -> list[str]:
    return [sys.executable, "-m", "tests.engines.drop_in_process", json.dumps(cases), str(folder)]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """What came out of all cases, by rank; the same processes join for one after the other."""

    @cache
    def run_all(world: int) -> dict[str, list[dict[str, Tensor]]]:
        folder = tmp_path_factory.mktemp(f"joined-{world}")
        run_learners(command(CASES, folder), world, folder)
        return {name: [load_file(folder / f"{name}-{rank}.safetensors") for rank in range(world)] for name in CASES}

    return run_all


@pytest.mark.parametrize(("strategy", "options"), ALONE)
def test_one_learner_is_the_plain_loop_to_the_bit(strategy: str, options: dict[str, Any]) -> None:
    """Momentum, weight decay, parameter groups, a scheduler, clipping and a parameter without gradient included."""

    def train(is_joined: bool) -> Tensor:
        model = TinyRegression().make_model()
        if strategy not in ("parameter-server", "hogwild"):  # whose gradients are whole vectors: 0 where there is none
            model[0].unused = nn.Linear(2, 2)
            nn.init.ones_(model[0].unused.weight)
            nn.init.ones_(model[0].unused.bias)
        groups = [{"params": model[0].parameters(), "lr": 0.05}, {"params": model[3].parameters()}]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.01)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        learner = starling.join(model, optimizer, strategy, **options) if is_joined else None
        for step in range(20):
            take_gradient(model, step)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            (optimizer if learner is None else learner).step()
            scheduler.step()
        if learner is not None:
            learner.close()
            assert learner.stats().steps == 20
        return flat(model)

    assert torch.equal(train(True), train(False))


def test_gradients_that_are_late_are_applied_when_the_loop_ends() -> None:
    """`delayed` holds the last ones back; closing lets none be lost."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    with starling.join(model, torch.optim.SGD(model.parameters(), lr=1.0), "delayed", delay=3) as learner:
        for _ in range(5):
            model.zero_grad()
            model.weight.sum().backward()
            learner.step()
        assert flat(model).item() == -2.0
    assert flat(model).item() == -5.0


@every_world
@pytest.mark.parametrize("name", ["allreduce", "delay-by-one", "dpsgd-random", "dpsgd-pairs", "server-hybrid"])
def test_learners_in_step_follow_their_equation(name: str, world: int, joined: Runner) -> None:
    """The oracle is the matrix form in NumPy, as for the other engines."""
    model = TinyRegression().make_model().double()
    parameters = list(model.parameters())

    def gradient(weights: Vector, number: int) -> Vector:
        single = TinyRegression().make_model()
        nn.utils.vector_to_parameters(torch.from_numpy(weights).float(), single.parameters())
        take_gradient(single, number)
        return torch.cat([p.grad.reshape(-1) for p in single.parameters() if p.grad is not None]).double().numpy()

    expected = SYNCHRONOUS[name](flat(model).numpy(), gradient, 0.1, world, STEPS)
    assert parameters
    measured = torch.stack([each["weights"] for each in joined(world)[name]], dim=1).double().numpy()
    np.testing.assert_allclose(measured, expected, rtol=0.0, atol=5e-6)


@every_world
def test_all_start_from_learner_0(world: int, joined: Runner) -> None:
    """Weights and buffers, whole numbers included; a shared model may have gone on before the last has joined."""
    start = flat(TinyRegression().make_model())
    for name, outcomes in joined(world).items():
        assert all(each["count"] == 7 for each in outcomes)
        assert name in SERVED or all(torch.equal(each["start"], start) for each in outcomes)


@every_world
@pytest.mark.parametrize("name", CASES)
def test_consensus_is_one_model_and_leaves_no_trace(name: str, world: int, joined: Runner) -> None:
    """Whoever asks, whoever has closed before: the mean of weights and buffers, and then the model is as it was."""
    outcomes = [each for each in joined(world)[name] if "consensus" in each]
    assert len(outcomes) == (1 if "asks" in CASES[name] else world)
    assert all(bool(each["restored"]) and bool(torch.isfinite(each["consensus"]).all()) for each in outcomes)
    assert all(0.0 <= float(each["level"]) <= world - 1 for each in outcomes)


@every_world
def test_a_learning_rate_of_zero_conserves_the_mean(world: int, joined: Runner) -> None:
    """Averaging in the background and consensus never move the mean."""
    outcomes = joined(world)["still"]
    start = outcomes[0]["start"]
    torch.testing.assert_close(torch.stack([each["weights"] for each in outcomes]).mean(dim=0), start)
    for each in outcomes:
        torch.testing.assert_close(each["consensus"], start)


@every_world
def test_statistics_count_what_happened(world: int, joined: Runner) -> None:
    """Every step has a staleness, everybody goes through equally many rounds, and what is sent is counted."""
    for name, outcomes in joined(world).items():
        for rank, each in enumerate(outcomes):
            steps, _, staleness, sent = each["stats"].tolist()
            assert steps == CASES[name].get("steps", {}).get(str(rank), STEPS)
            assert steps == staleness or name in SERVED
            assert sent > 0 or "hogwild" in name
            assert (each["seconds"] >= 0.0).all()
        assert len({int(each["stats"][1]) for each in outcomes}) == 1, name
    assert int(joined(world)["last-has-many"][0]["stats"][1]) > 0


@every_world
@pytest.mark.parametrize("name", SERVED)
def test_loops_that_share_a_model_end_with_it(name: str, world: int, joined: Runner) -> None:
    """Whatever their lengths: the last weights are the same on all, and every gradient has met every shard once."""
    outcomes = joined(world)[name]
    assert all(torch.equal(each["weights"], outcomes[0]["weights"]) for each in outcomes)
    assert not torch.equal(outcomes[0]["weights"], outcomes[0]["start"])
    steps, _, staleness, _ = torch.stack([each["stats"] for each in outcomes]).sum(dim=0).tolist()
    assert staleness == steps * SERVED[name].get("options", {}).get("shards", 1)
    if name == "server-hybrid" or (name == "hogwild-uneven" and world == 2):
        # nobody makes a step after the last asks: what servers keep, or all share, is what all end with
        for each in [each for each in outcomes if "consensus" in each]:
            torch.testing.assert_close(each["consensus"], each["weights"])


@pytest.mark.parametrize("strategy", ["allreduce", "delay-by-one", "dpsgd"])
def test_unequal_steps_in_step_are_a_named_error(strategy: str, tmp_path: Path) -> None:
    """Not a hang: who has closed, after how many steps, and what to do."""
    message = r"learner 0 has closed after 3 steps, and learner 1 is in step \d+: under .* equal numbers of steps; "
    unequal = command({"unequal": {"strategy": strategy, "steps": {"0": 3}}}, tmp_path)
    with start_learners(unequal, 2, tmp_path) as learners:
        ends = [learners.end(rank) for rank in range(2)]
    assert all(code > 0 for code, _ in ends), ends
    assert re.search(f"ProtocolError: {message}", ends[0][1] + ends[1][1]), ends


@pytest.mark.parametrize(("fails", "code"), [("raises", 1), ("killed", -9)])
@pytest.mark.parametrize("strategy", ["adpsgd", "allreduce", "parameter-server"])
def test_survivors_name_the_learner_that_failed(strategy: str, fails: str, code: int, tmp_path: Path) -> None:
    """Without a launcher that ends them, and soon, whatever the time-out."""
    failing = command({"fails": {"strategy": strategy, "fails": fails, "steps": {"0": 4000}}}, Path())
    with start_learners(failing, 3, tmp_path) as learners:
        ends = [learners.end(rank) for rank in range(3)]
    assert [each for each, _ in ends] == [1, code, 1]
    for rank in (0, 2):
        assert f"PeerLost: learner {rank} lost learner 1" in ends[rank][1], ends[rank]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"strategy": "adpsg"}, "strategy: 'adpsg' is unknown; did you mean 'adpsgd'"),
        ({"patern": "ring"}, "adpsgd: 'patern' is no option of it; did you mean 'pattern'"),
        ({"period": 0.0, "wire": "int8"}, "(?s)adpsgd: wire: .*adpsgd: period: |adpsgd: period: .*adpsgd: wire: "),
        ({"timeout_seconds": 0.0}, "timeout_seconds: must be positive, got 0.0"),
    ],
)
def test_wrong_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    """Before anybody is met, and all at once."""
    model = TinyRegression().make_model()
    with pytest.raises(ConfigError, match=message):
        starling.join(model, torch.optim.SGD(model.parameters(), lr=0.1), **change)


def test_models_and_optimizers_that_do_not_fit_are_refused() -> None:
    """Mixed dtypes, and an optimizer of something else."""
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(ConfigError, match=r"must share one dtype, found torch.float32, torch.float64"):
        starling.join(mixed, torch.optim.SGD(mixed.parameters(), lr=0.1))
    model, other = nn.Linear(2, 2), nn.Linear(3, 3)
    with pytest.raises(ConfigError, match=r"2 of its 2 parameters are not the model's"):
        starling.join(model, torch.optim.SGD(other.parameters(), lr=0.1))


def test_steps_inside_consensus_or_after_closing_are_refused() -> None:
    """The weights are not the learner's own there, and nobody is left here."""
    model = nn.Linear(2, 2)
    learner = starling.join(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with learner.consensus(), pytest.raises(ProtocolError, match=r"step\(\) inside of consensus\(\)"):
        learner.step()
    learner.close()
    with pytest.raises(ProtocolError, match=r"learner 0 has closed: step\(\) must come before that"):
        learner.step()
