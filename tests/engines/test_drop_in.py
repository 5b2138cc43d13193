"""The drop-in: anybody's PyTorch loop as one learner among several."""

import json
import math
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
from starling.engines.loop.replica import LoopReplica
from starling.engines.loop.run import LoopRun
from starling.errors import ConfigError, NonFiniteError, ProtocolError
from starling.strategies import STRATEGIES, NoOptions
from tests.contract.cases import PERIODIC
from tests.contract.oracle import SYNCHRONOUS, Vector, allreduce_of_encoded
from tests.contract.problems import TinyRegression
from tests.engines.drop_in_process import MIDDLE, STEPS, flat, make_model, make_troubled, take_gradient, troubled_loss
from tests.warm_start import run_learners, start_learners

ALONE = [
    ("allreduce", {}),
    ("delay-by-one", {}),
    ("delayed", {"delay": 0}),
    ("dpsgd", {}),
    ("adpsgd", {}),
    ("adpsgd", {"optimizer_state": "averaged"}),
    ("adpsgd", {"staleness": {"delay_compensation": 2.0, "mean_square": 0.95}, "scale_by_staleness": True}),
    ("hadpsgd", {"per_node": 1}),
    ("parameter-server", {}),
    ("parameter-server", {"update": "summed", "sum": 1}),
    ("parameter-server", {"update": "hybrid"}),
    ("async-diloco", {}),
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
    "async-diloco": {"strategy": "async-diloco", "options": {"every": 3, "shards": 2}, "steps": {"0": 4, "1": 40}},
    "decoupled": {"strategy": "decoupled-diloco", "options": {"every": 4, "fragments": 2, "overlap": 1}},
    "aeasgd": {"strategy": "aeasgd", "options": {"every": 2}},
    "aeasgd-uneven": {"strategy": "aeasgd", "options": {"every": 2}, "steps": {"0": 2, "1": 30}},
    "hogwild": {"strategy": "hogwild"},
    "hogwild-uneven": {"strategy": "hogwild", "steps": {"0": 0, "1": 30}, "asks": 1},
}
CASES: dict[str, dict[str, Any]] = {
    "allreduce": {"strategy": "allreduce"},
    "allreduce-int4": {"strategy": "allreduce", "options": {"compression": "int4"}},
    "streaming-diloco-int4": {"strategy": "streaming-diloco", "options": PERIODIC["streaming-diloco-int4"]},
    "delay-by-one": {"strategy": "delay-by-one"},
    "dpsgd-random": {"strategy": "dpsgd", "options": {"pattern": "random"}},
    "dpsgd-pairs": {"strategy": "dpsgd", "options": {"pattern": "pairs"}},
    "dpsgd-quasi-global": {"strategy": "qg-dsgdm", "options": {"beta": 0.8, "mu": 0.2}},
    "dpsgd-tracking": {"strategy": "gradient-tracking", "options": {"pattern": "pairs"}},
    "sgp-overlap": {"strategy": "sgp", "options": {"overlap": True}},
    "diloco": {"strategy": "diloco", "options": {"every": 5}},
    "noloco": {"strategy": "noloco", "options": {"every": 3}},
    "adpsgd": {"strategy": "adpsgd"},
    "averaged": {"strategy": "adpsgd", "options": {"optimizer_state": "averaged", "pattern": "pairs"}},
    "corrected": {"strategy": "adpsgd", "options": {"staleness": "gap-aware", "scale_by_staleness": True}},
    "still": {"strategy": "adpsgd", "lr": 0.0},
    "first-has-none": {"strategy": "adpsgd", "steps": {"0": 0}},
    "last-has-many": {"strategy": "adpsgd", "steps": {"1": 60}},
    "nobody-has-any": {"strategy": "adpsgd", "steps": {"0": 0, "1": 0, "2": 0}},
    "others-have-closed": {"strategy": "adpsgd", "steps": {"0": 2, "1": 40}, "asks": 1},
    "node": {"strategy": "hadpsgd", "options": {"per_node": 1}},
    **SERVED,
}
TROUBLED: dict[str, dict[str, Any]] = {
    "allreduce": {"strategy": "allreduce"},
    "allreduce-frozen-before": {"strategy": "allreduce", "frozen": "before"},
    "allreduce-frozen-after": {"strategy": "allreduce", "frozen": "after"},
    "allreduce-not-finite": {"strategy": "allreduce", "not_finite": 1},
    "allreduce-scaler": {"strategy": "allreduce", "not_finite": 1, "scaler": True},
    "allreduce-final": {"strategy": "allreduce", "final": True, "slow": 1},
    "delayed-final": {"strategy": "delayed", "options": {"delay": 2}, "final": True},
    "dpsgd-not-finite": {"strategy": "dpsgd", "not_finite": 1},
    "dpsgd-moves": {"strategy": "dpsgd", "moves": True},
    "dpsgd": {"strategy": "dpsgd"},
    "adpsgd-frozen": {"strategy": "adpsgd", "frozen": "before"},
    "adpsgd-not-finite": {"strategy": "adpsgd", "not_finite": 1},
    "adpsgd-scaler": {"strategy": "adpsgd", "not_finite": 1, "scaler": True},
    "adpsgd-final": {"strategy": "adpsgd", "final": True, "slow": 1},
    "one-asks-final": {"strategy": "adpsgd", "final": True, "slow": 0, "asks": 1},
    "server-final": {"strategy": "parameter-server", "final": True, "slow": 1},
}
Runner = Callable[[int], dict[str, list[dict[str, Tensor]]]]
every_world = pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.wide)])


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


@pytest.fixture(scope="module")
def troubled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Tensor]]]:
    """What came out of all troubled cases with two learners, by rank."""
    folder = tmp_path_factory.mktemp("troubled")
    run_learners(command({name: case | {"troubled": True} for name, case in TROUBLED.items()}, folder), 2, folder)
    return {name: [load_file(folder / f"{name}-{rank}.safetensors") for rank in range(2)] for name in TROUBLED}


@pytest.mark.parametrize(("strategy", "options"), ALONE)
def test_one_learner_is_the_plain_loop_to_the_bit(strategy: str, options: dict[str, Any]) -> None:
    """Momentum, weight decay, parameter groups, a scheduler, clipping and a layer that is often dropped included."""

    def train(is_joined: bool) -> Tensor:
        model = TinyRegression().make_model()
        if strategy not in ("parameter-server", "hogwild"):  # whose gradients are whole vectors: 0 where there is none
            model[0].dropped = nn.Linear(2, 2)
            nn.init.ones_(model[0].dropped.weight)
            nn.init.ones_(model[0].dropped.bias)
        groups = [{"params": model[0].parameters(), "lr": 0.05}, {"params": model[3].parameters()}]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.01)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        learner = starling.join(model, optimizer, strategy, **options) if is_joined else None
        for step in range(20):
            take_gradient(model, step)
            if step % 4 == 3 and hasattr(model[0], "dropped"):
                model[0].dropped(torch.ones(1, 2)).sum().backward()
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


ORACLES = SYNCHRONOUS | {"allreduce-int4": allreduce_of_encoded("int4")}


@every_world
@pytest.mark.parametrize(
    "name",
    [
        *("allreduce", "allreduce-int4", "delay-by-one", "dpsgd-random", "dpsgd-pairs", "server-hybrid"),
        *("streaming-diloco-int4", "noloco", "dpsgd-quasi-global", "dpsgd-tracking", "sgp-overlap"),
    ],
)
def test_learners_in_step_follow_their_equation(name: str, world: int, joined: Runner) -> None:
    """The oracle is the matrix form in NumPy, as for the other engines. In int4, no gradient here lies so near to the
    middle between two numbers that processors round it differently; in int8, some do."""
    model = TinyRegression().make_model().double()
    parameters = list(model.parameters())

    def gradient(weights: Vector, number: int) -> Vector:
        single = TinyRegression().make_model()
        nn.utils.vector_to_parameters(torch.from_numpy(weights).float(), single.parameters())
        take_gradient(single, number)
        return torch.cat([p.grad.reshape(-1) for p in single.parameters() if p.grad is not None]).double().numpy()

    oracle = ORACLES[name]
    expected = oracle(flat(model).numpy(), gradient, 0.1, world, STEPS)
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


def test_a_consensus_waits_for_the_shards_of_a_learner_that_begins_late(tmp_path: Path) -> None:
    """Learner 0 holds the model, and is still starting its strategy when learner 1 requests the mean."""
    case = {"strategy": "aeasgd", "late": 0, "asks": 1, "steps": {"0": 0, "1": 0}}
    run_learners(command({"late": case}, tmp_path), 2, tmp_path)
    seen = load_file(tmp_path / "late-1.safetensors")
    torch.testing.assert_close(seen["consensus"], seen["start"])


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
@pytest.mark.parametrize(
    ("name", "rounds"),
    [("allreduce", STEPS), ("allreduce-int4", STEPS), ("delay-by-one", STEPS), ("dpsgd-random", STEPS), ("diloco", 3)],
)
def test_rounds_of_learners_in_step_are_counted(name: str, rounds: int, world: int, joined: Runner) -> None:
    """One for each mean; `diloco` agrees after 5 and 10 of 12 steps, and at the end."""
    assert [int(each["stats"][1]) for each in joined(world)[name]] == [rounds] * world


@every_world
@pytest.mark.parametrize("name", SERVED)
def test_loops_that_share_a_model_end_with_it(name: str, world: int, joined: Runner) -> None:
    """Whatever their lengths: the last weights are the same on all, and every gradient has met every shard once; where
    learners step themselves, each step and each push has a staleness."""
    outcomes = joined(world)[name]
    assert all(torch.equal(each["weights"], outcomes[0]["weights"]) for each in outcomes)
    # not its weights at the start, which others may have changed before it has seen them
    assert not torch.equal(outcomes[0]["weights"], flat(make_model(0)))
    steps, _, staleness, _ = torch.stack([each["stats"] for each in outcomes]).sum(dim=0).tolist()
    options = SERVED[name].get("options", {})
    if "every" in options:
        assert staleness > steps
    else:
        assert staleness == steps * options.get("shards", 1)
    if name == "server-hybrid" or (name == "hogwild-uneven" and world == 2):
        # nobody makes a step after the last asks: what servers keep, or all share, is what all end with
        for each in [each for each in outcomes if "consensus" in each]:
            torch.testing.assert_close(each["consensus"], each["weights"])


def mean_loop(case: dict[str, Any]) -> Tensor:
    """The oracle of `allreduce` in trouble: a plain loop with the mean of the gradients, None where nobody has one."""
    model = make_troubled()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    for step in range(STEPS):
        model[0].requires_grad_("frozen" not in case or step >= MIDDLE)
        gradients = []
        for rank in range(2):
            model.zero_grad()
            troubled_loss(model, step * 2 + rank).backward()
            gradients.append([parameter.grad for parameter in model.parameters()])
        for parameter, *parts in zip(model.parameters(), *gradients, strict=True):
            there = [part for part in parts if part is not None]
            parameter.grad = torch.stack(there).sum(dim=0) / 2 if there else None
        if "not_finite" not in case or step != MIDDLE:
            optimizer.step()
    return flat(model, every=True)


@pytest.mark.wide
@pytest.mark.parametrize("name", [name for name in TROUBLED if name.startswith("allreduce")])
def test_a_parameter_without_gradient_and_a_bad_gradient_do_what_they_do_in_one_loop(
    name: str, troubled: dict[str, list[dict[str, Tensor]]]
) -> None:
    """With AdamW, whose decay and momentum would move what has a gradient of zero."""
    for each in troubled[name]:
        torch.testing.assert_close(each["weights"], mean_loop(TROUBLED[name]), rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in TROUBLED if "server" not in name])
def test_a_parameter_that_no_learner_uses_stays_as_it_was(
    name: str, troubled: dict[str, list[dict[str, Tensor]]]
) -> None:
    """To the bit; those of a layer that learners use now and then, or that is unfrozen later, are trained."""
    start = flat(make_troubled(), every=True)
    for each in troubled[name]:
        assert torch.equal(each["weights"][-2:], start[-2:])
        assert not torch.equal(each["weights"][-4:-2], start[-4:-2])
        if TROUBLED[name]["strategy"] == "allreduce":  # elsewhere another learner may have unfrozen it before
            assert torch.equal(each["middle"][:24], start[:24]) == ("frozen" in TROUBLED[name])
        assert bool((each["weights"][:24] != start[:24]).all())


@pytest.mark.parametrize("name", [name for name in TROUBLED if "not_finite" in TROUBLED[name]])
def test_a_gradient_that_is_not_finite_changes_nothing_and_disturbs_no_round(
    name: str, troubled: dict[str, list[dict[str, Tensor]]]
) -> None:
    """Only those skip a step who would have stepped with it."""
    outcomes = troubled[name]
    assert all(bool(each["weights"].isfinite().all()) and int(each["steps"]) == STEPS for each in outcomes)
    assert [int(each["skipped"]) for each in outcomes] == [int("allreduce" in name), 1]
    assert int(outcomes[0]["rounds"]) == int(outcomes[1]["rounds"])


def test_a_parameter_that_is_given_other_memory_is_trained_on(troubled: dict[str, list[dict[str, Tensor]]]) -> None:
    """The same values in other memory give the same bits as if nothing had happened."""
    for moved, unmoved in zip(troubled["dpsgd-moves"], troubled["dpsgd"], strict=True):
        assert torch.equal(moved["weights"], unmoved["weights"])


@pytest.mark.parametrize("name", [name for name in TROUBLED if "final" in TROUBLED[name]])
def test_the_final_consensus_is_one_finished_model(name: str, troubled: dict[str, list[dict[str, Tensor]]]) -> None:
    """Whatever the learners' speeds: the same bits on all that ask for it, and none is changed by closing."""
    asking = [each for each in troubled[name] if "final" in each]
    assert len(asking) == (1 if "asks" in TROUBLED[name] else 2)
    for each in asking:
        assert torch.equal(each["final"], asking[0]["final"])
        assert torch.equal(each["final"], each["weights"])


@pytest.mark.parametrize("strategy", ["allreduce", "delay-by-one", "dpsgd"])
def test_unequal_steps_in_step_are_a_named_error(strategy: str, tmp_path: Path) -> None:
    """Not a hang: who has closed, after how many steps, and what to do."""
    message = r"learner 0 has closed after 3 steps, but learner 1 is in step \d+: under .* equal numbers of steps; "
    unequal = command({"unequal": {"strategy": strategy, "steps": {"0": 3}}}, tmp_path)
    with start_learners(unequal, 2, tmp_path) as learners:
        ends = [learners.end(rank) for rank in range(2)]
    assert all(code > 0 for code, _ in ends), ends
    assert re.search(f"ProtocolError: {message}", ends[0][1] + ends[1][1]), ends


@pytest.mark.parametrize(("ends", "code"), [("finished", 0), ("unfinished", 1)])
def test_loops_that_never_close_end_well_if_they_have_finished_and_say_so_if_not(
    ends: str, code: int, tmp_path: Path
) -> None:
    """And the exit handlers of the user's own run in either case, also those registered before joining."""
    program = "import atexit, runpy, sys; from pathlib import Path; import os; "
    program += "atexit.register((Path(sys.argv[1]) / f'earlier-{os.environ[\"RANK\"]}').touch); "
    program += "runpy.run_module('tests.engines.forgetful_process', run_name='__main__')"
    with start_learners([sys.executable, "-c", program, str(tmp_path), ends], 2, tmp_path) as learners:
        found = [learners.end(rank) for rank in range(2)]
    assert [each for each, _ in found] == [code, code], found
    says = [f"learner {rank} ended without close(), after 3 steps" in said for rank, (_, said) in enumerate(found)]
    assert any(says) == (ends == "unfinished"), found  # the first to end is the error of the other
    for rank in range(2):
        assert (tmp_path / f"earlier-{rank}").exists() and (tmp_path / f"later-{rank}").exists()


@pytest.mark.wide
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


@pytest.mark.parametrize("strategy", ["adpsgd", "allreduce", "parameter-server"])
def test_processes_join_again_after_a_failure_that_the_user_has_caught(strategy: str, tmp_path: Path) -> None:
    """Both the learner that failed, and those that lost it: no group of the failed run is left on either."""
    failing = {"strategy": strategy, "fails": "raises", "steps": {"0": 4000, "2": 4000}, "is_caught": True}
    again = {"strategy": strategy, "steps": {"0": 5, "1": 5, "2": 5}}
    with start_learners(command({"fails": failing, "again": again}, tmp_path), 3, tmp_path) as learners:
        ends = [learners.end(rank) for rank in range(3)]
    assert [code for code, _ in ends] == [0, 0, 0], ends
    failed = [load_file(tmp_path / f"fails-{rank}.safetensors")["is_own_error"].item() for rank in range(3)]
    assert failed == [False, True, False]
    after = [load_file(tmp_path / f"again-{rank}.safetensors") for rank in range(3)]
    assert all(torch.equal(each["start"], after[0]["start"]) for each in after)
    assert all(not torch.equal(each["weights"], each["start"]) for each in after)


def test_who_waits_in_close_hears_that_a_learner_died_while_it_evaluated(tmp_path: Path) -> None:
    """All have made their last steps; however long an evaluation takes, only a death ends the wait."""
    failing = command({"fails": {"strategy": "adpsgd", "fails": "evaluating"}}, Path())
    with start_learners(failing, 3, tmp_path) as learners:
        ends = [learners.end(rank) for rank in range(3)]
    assert [each for each, _ in ends] == [1, -9, 1]
    for rank in (0, 2):
        assert f"PeerLost: learner {rank} lost learner 1" in ends[rank][1], ends[rank]
        assert ends[rank][1].count("with on_loss='continue', the others continue alone") == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"strategy": "adpsg"}, "strategy: 'adpsg' is unknown; did you mean 'adpsgd'"),
        ({"patern": "ring"}, "adpsgd: a problem\n  patern: unknown key; did you mean pattern"),
        (
            {"period": 0.0, "piece_megabytes": 0.0},
            "(?s)adpsgd: 2 problems\n(?=.*  period: )(?=.*  piece_megabytes: )",
        ),
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
    with pytest.raises(ConfigError, match=r"2 of its 2 parameters do not belong to the model"):
        starling.join(model, torch.optim.SGD(other.parameters(), lr=0.1))


def test_steps_inside_consensus_or_after_closing_are_refused() -> None:
    """The weights are not the learner's own there, and nobody is left here."""
    model = nn.Linear(2, 2)
    learner = starling.join(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with learner.consensus(), pytest.raises(ProtocolError, match=r"step\(\) was called within consensus\(\)"):
        learner.step()
    learner.close()
    with pytest.raises(ProtocolError, match=r"learner 0 has closed: step\(\) must be called before that"):
        learner.step()


class Alone:
    """A model and an optimizer of one learner, joined or not."""

    def __init__(self, strategy: str | None, **options: Any) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(12, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.learner = starling.join(self.model, self.optimizer, strategy, **options) if strategy else None

    def backward(self, number: int, factor: float = 1.0) -> Tensor:
        self.optimizer.zero_grad()
        pictures = torch.randn(4, 2, 3, 3, generator=torch.Generator().manual_seed(number))
        return self.model(pictures).square().mean() * factor


@pytest.mark.parametrize("strategy", ["adpsgd", "allreduce"])
@pytest.mark.parametrize("unscales", [True, False])
def test_fp16_with_a_scaler_is_the_plain_loop_to_the_bit(strategy: str, unscales: bool) -> None:
    """Steps that the scaler skips included, and its scale."""

    def train(alone: Alone) -> tuple[Tensor, float]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        for number in range(10):
            loss = alone.backward(number, math.inf if number in (2, 3) else 1.0)
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            if unscales:
                scaler.unscale_(alone.optimizer)
                nn.utils.clip_grad_norm_(alone.model.parameters(), 0.1)
            if alone.learner is None:
                scaler.step(alone.optimizer)
            else:
                alone.learner.step(scaler)
            scaler.update()
        if alone.learner is not None:
            alone.learner.close()
            assert alone.learner.stats().steps_skipped == 2
        return flat(alone.model), float(scaler.get_scale())

    joined, plain = train(Alone(strategy)), train(Alone(None))
    assert torch.equal(joined[0], plain[0])
    assert joined[1] == plain[1]


@pytest.mark.parametrize("strategy", ["adpsgd", "allreduce", "hogwild"])
def test_many_gradients_in_a_row_that_are_not_finite_end_the_loop(strategy: str) -> None:
    """So many as `join` was told; single ones do not."""
    alone = Alone(strategy, most_not_finite=3)
    assert alone.learner is not None
    for number, factor in enumerate([1.0, math.nan, math.nan, 1.0, math.nan, math.inf]):
        alone.backward(number, factor).backward()  # type: ignore[no-untyped-call]
        alone.learner.step()
    alone.backward(9, math.nan).backward()  # type: ignore[no-untyped-call]
    with pytest.raises(NonFiniteError, match=r"learner 0: the gradient of step 7 is not finite, nor were the 2 before"):
        alone.learner.step()
    assert bool(flat(alone.model).isfinite().all())


@pytest.mark.parametrize("scaled", [False, True])
def test_a_step_of_the_optimizer_itself_is_refused_until_the_learner_has_closed(scaled: bool) -> None:
    """It would train this learner's model alone, or not at all."""
    alone = Alone("allreduce")
    assert alone.learner is not None
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    scaler.scale(alone.backward(0)).backward()  # type: ignore[no-untyped-call]
    with pytest.raises(ProtocolError, match=r"learner 0: optimizer.step\(\) was called on an optimizer given to"):
        scaler.step(alone.optimizer)
    alone.learner.step()
    alone.learner.close()
    before = flat(alone.model).clone()
    alone.optimizer.step()
    assert not torch.equal(flat(alone.model), before)


def test_a_loop_that_never_steps_is_warned() -> None:
    """Once, and only if it has computed gradients: a loop without mini-batches is no mistake."""
    alone = Alone("adpsgd")
    assert alone.learner is not None
    with alone.learner.consensus():
        pass
    alone.backward(0).backward()  # type: ignore[no-untyped-call]
    with (
        pytest.warns(RuntimeWarning, match=r"learner 0 has computed gradients but made no step"),
        alone.learner.consensus(),
    ):
        pass
    alone.learner.close()


def test_optimizers_with_a_closure_are_refused_by_name() -> None:
    """When joining, and when a closure comes to `step`."""
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"optimizer: LBFGS needs a closure"):
        starling.join(model, torch.optim.LBFGS(model.parameters()))
    learner = starling.join(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ProtocolError, match=r"learner 0: step\(\) accepts only a GradScaler, got function"):
        learner.step(lambda: 0.0)  # type: ignore[arg-type]
    learner.close()


@pytest.mark.parametrize("strategy", ["adpsgd", "allreduce"])
@pytest.mark.parametrize("how", ["channels_last", "data", "cpu"])
def test_a_model_given_other_memory_is_trained_on_with_what_it_holds(strategy: str, how: str) -> None:
    """As the plain loop does; and the consensus is that model."""

    def train(alone: Alone) -> Tensor:
        for number in range(6):
            if number == 3 and how == "channels_last":
                alone.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            if number == 3 and how == "data":
                alone.model[0].weight.data = 2.0 * alone.model[0].weight.data
            if number == 3 and how == "cpu":
                alone.model.double().float()
            alone.backward(number).backward()  # type: ignore[no-untyped-call]
            (alone.learner or alone.optimizer).step()
        if alone.learner is None:
            return flat(alone.model)
        with alone.learner.consensus(final=True):
            finished = flat(alone.model).clone()
        alone.learner.close()  # the model ends with what learners have agreed on
        assert torch.equal(flat(alone.model), finished)
        return finished

    torch.testing.assert_close(train(Alone(strategy)), train(Alone(None)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda alone: alone.model.half(),
            r"learner 0: parameter 0.weight is torch.float16 .*was torch.float32 \[3, 2, 2, 2\] on cpu",
        ),
        (
            lambda alone: alone.model.append(nn.Linear(2, 2)),
            r"parameter 3.weight, 3.bias is trained but was unknown",
        ),
        (lambda alone: alone.model.__setitem__(2, nn.Linear(12, 2)), r"parameter 2.weight, 2.bias is trained but was"),
        (
            lambda alone: alone.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(7))]}),
            r"parameter of shape \[7\] in the optimizer is trained but was unknown",
        ),
    ],
)
@pytest.mark.parametrize("asks", ["step", "consensus"])
def test_parameters_that_other_learners_do_not_know_are_named_at_the_next_step(
    change: Callable[[Alone], object], message: str, asks: str
) -> None:
    """Changed dtypes, new layers, replaced layers, and what was added to the optimizer."""
    alone = Alone("adpsgd")
    assert alone.learner is not None
    alone.backward(0).backward()  # type: ignore[no-untyped-call]
    change(alone)
    with pytest.raises(ProtocolError, match=message):
        if asks == "step":
            alone.learner.step()
        else:
            with alone.learner.consensus():
                pass


def test_an_unknown_frozen_parameter_is_named_when_it_is_unfrozen() -> None:
    """One that was neither trainable nor in the optimizer when the model joined."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    learner = starling.join(model, torch.optim.SGD(model[1].parameters(), lr=0.1))
    model(torch.ones(1, 2)).sum().backward()
    learner.step()
    model[0].requires_grad_(True)
    with pytest.raises(
        ProtocolError, match=r"parameter 0.weight, 0.bias is trained but was unknown when the model join"
    ):
        learner.step()


@pytest.mark.parametrize("moment", ["between steps", "before the update", "after the update", "a whole step"])
def test_what_is_read_while_a_step_is_under_way_is_not_compared_by_its_number(moment: str) -> None:
    """Otherwise, two learners with different weights may say that they have made as many steps."""
    model = nn.Linear(1, 1)
    replica = LoopReplica(model, torch.optim.SGD(model.parameters(), lr=1.0), is_shared=True)
    run = LoopRun(STRATEGIES["allreduce"], NoOptions(), replica, 0, 1)
    run.num_steps = 7

    def read() -> str:
        if moment == "before the update":
            run.gradient = "given"
        if moment == "a whole step":
            run.num_steps += 1
        return moment

    if moment == "after the update":  # the step began before, and ends after
        run.gradient = "used"
    found, num_steps = run.with_steps(read)
    assert found == moment
    assert (num_steps == 7) if moment == "between steps" else math.isnan(num_steps)
