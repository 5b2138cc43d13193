"""Hostile loops: what each does to its model gives the right result, or an error that names the reason."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.engines.hostile_process import BOUND, LOADED, TROUBLES, Loop
from tests.warm_start import start_learners

WITHIN = 60.0
"""Seconds within which learners end, on a busy machine: three times their own time-out."""
COROUTINES: dict[str, dict[str, Any]] = {
    "allreduce": {"strategy": "allreduce"},
    "delayed": {"strategy": "delayed", "options": {"delay": 2}},
    "delay-by-one": {"strategy": "delay-by-one"},
    "dpsgd": {"strategy": "dpsgd", "options": {"pattern": "pairs"}},
    "quasi-global": {"strategy": "qg-dsgdm"},
    "d2": {"strategy": "d2"},
    "tracking": {"strategy": "gradient-tracking"},
    "sgp": {"strategy": "sgp"},
    "adpsgd": {"strategy": "adpsgd", "options": {"pattern": "pairs"}},
    "hadpsgd": {"strategy": "hadpsgd", "options": {"per_node": 1}},
    "local-sgd": {"strategy": "local-sgd", "options": {"every": 3}},
    "sparta": {"strategy": "sparta", "options": {"share": 0.3}},
    "diloco": {"strategy": "diloco", "options": {"every": 3}},
    "noloco": {"strategy": "noloco", "options": {"every": 3}},
    "parameter-server": {"strategy": "parameter-server"},
    "async-diloco": {"strategy": "async-diloco", "options": {"every": 3}},
    "aeasgd": {"strategy": "aeasgd", "options": {"every": 3}},
    "decoupled-diloco": {"strategy": "decoupled-diloco", "options": {"every": 4, "fragments": 2, "overlap": 1}},
    "hogwild": {"strategy": "hogwild"},
}
"""One choice for each distinct coroutine."""
REFUSING = {
    *("delay-by-one", "diloco", "noloco", "parameter-server", "async-diloco", "aeasgd", "decoupled-diloco", "hogwild"),
}
"""Those that would lose weights that the loop changes itself, or take them for progress."""
REFUSED = r"ProtocolError: learner \d: since its last step something else has changed parameter 0\.weight"


def case(trouble: str, coroutine: str, **more: Any) -> dict[str, Any]:
    found = COROUTINES[coroutine]
    return found | {"trouble": trouble} | more | {"options": found.get("options", {}) | more.get("options", {})}


def run(asked: dict[str, Any], folder: Path, fails: str = "") -> list[dict[str, Tensor]]:
    """What both learners saw; or, if the case `fails`, nothing: one says so, and neither ends well."""
    command = [sys.executable, "-m", "tests.engines.hostile_process", json.dumps({"case": asked}), str(folder)]
    with start_learners(command, 2, folder) as started:
        ends = [started.end(rank, WITHIN) for rank in range(2)]
    said = "\n".join(each for _, each in ends)
    if fails:
        assert all(code not in (0, None) for code, _ in ends), said
        assert re.search(fails, said), said
        return []
    assert [code for code, _ in ends] == [0, 0], said
    found = [load_file(folder / f"case-{rank}.safetensors") for rank in range(2)]
    assert torch.equal(found[0]["final"], found[1]["final"])
    assert all(torch.equal(each["final"], each["closed"]) for each in found)
    return found


def plain(asked: dict[str, Any]) -> Tensor:
    """The last weights of the same loop in one process, with the mean gradient of both learners."""
    torch.set_num_threads(1)
    loop = Loop(0, asked)
    TROUBLES[asked["trouble"]](loop)
    return loop.in_one_process()


def is_trained(found: list[dict[str, Tensor]]) -> bool:
    """Whether no weight is as it was at the start."""
    return not bool((found[0]["final"] == found[0]["start"]).any())


@pytest.mark.parametrize(
    "coroutine", [c if c == "diloco" else pytest.param(c, marks=pytest.mark.wide) for c in COROUTINES]
)
def test_weights_that_all_learners_load_are_the_models_or_refused(coroutine: str, tmp_path: Path) -> None:
    """At rate 0, after five steps and averaging, nothing is left of those before."""
    asked = case("load", coroutine, rate=0.0)
    if coroutine in REFUSING:
        run(asked, tmp_path, REFUSED)
        return
    for each in run(asked, tmp_path):
        torch.testing.assert_close(each["final"], torch.full_like(each["final"], LOADED), rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("coroutine", ["dpsgd", "adpsgd"])
def test_weights_that_one_learner_loads_move_the_mean_by_their_share(coroutine: str, tmp_path: Path) -> None:
    """At rate 0, half of the change, for it is adopted as a change and not as a value."""
    found = run(case("load_on_one", coroutine, rate=0.0), tmp_path)
    expected = (found[0]["start"] + LOADED) / 2.0
    torch.testing.assert_close(found[0]["final"], expected, rtol=0.0, atol=1e-5)


def test_replicas_that_must_be_equal_and_are_not_are_an_error(tmp_path: Path) -> None:
    """Under allreduce only a consensus can tell."""
    run(
        case("load_on_one", "allreduce"),
        tmp_path,
        r"under allreduce all learners have the same weights, but they are 18\.8 from their mean",
    )


@pytest.mark.parametrize(
    "coroutine",
    [
        "adpsgd",
        *(
            pytest.param(name, marks=pytest.mark.wide)
            for name in ("allreduce", "local-sgd", "diloco", "parameter-server")
        ),
    ],
)
def test_a_clamp_after_each_step_holds_or_is_refused(coroutine: str, tmp_path: Path) -> None:
    """Also through `data`, which no version counter sees. What is averaged in the background after a learner's last
    clamp may hold a step that the other has not clamped yet, and half of one that moved the other before."""
    asked = case("clamp", coroutine, rate=0.02, steps=48)
    if coroutine in REFUSING:
        run(asked, tmp_path, REFUSED)
        return
    found = run(asked, tmp_path)
    assert all(float(each["last"].abs().max()) <= BOUND + 1e-6 for each in found)
    by_averaging = 2.0 * max(float(each["largest_step"]) for each in found) if coroutine == "adpsgd" else 0.0
    assert float(found[0]["final"].abs().max()) <= BOUND + by_averaging + 1e-6
    if coroutine == "allreduce":
        torch.testing.assert_close(found[0]["final"], plain(asked), rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("coroutine", ["delay-by-one", "local-sgd"])
def test_a_clamp_in_a_hook_of_the_optimizer_is_part_of_the_step(coroutine: str, tmp_path: Path) -> None:
    """As the refusal recommends; a mean of clamped weights is within the bound."""
    found = run(case("clamp_in_hook", coroutine), tmp_path)
    assert float(found[0]["final"].abs().max()) <= BOUND + 1e-6
    assert not torch.equal(found[0]["final"], found[0]["start"])


@pytest.mark.parametrize(("coroutine", "thaws"), [("diloco", True), ("adpsgd", False), ("hogwild", False)])
def test_what_is_frozen_stays_until_it_is_thawed(coroutine: str, thaws: bool, tmp_path: Path) -> None:
    """In step also until the middle; otherwise the other learner may be there first, so that it is frozen for good."""
    for each in run(case("freeze_and_thaw", coroutine, thaws=thaws), tmp_path):
        frozen = int(each["frozen"])
        assert torch.equal(each["middle" if thaws else "final"][:frozen], each["start"][:frozen])
        assert not bool((each["final"][0 if thaws else frozen :] == each["start"][0 if thaws else frozen :]).any())


@pytest.mark.parametrize("coroutine", ["allreduce", "adpsgd"])
def test_an_optimizer_that_was_not_given_to_join_is_refused_at_its_first_step(coroutine: str, tmp_path: Path) -> None:
    message = r"a step of Adam would change parameters of the joined model.*join the model with a list"
    run(case("foreign_optimizer", coroutine), tmp_path, message)


@pytest.mark.wide
@pytest.mark.parametrize("trouble", ["gan", "muon", "compiled", "activation_checkpoints", "rewind", "ema_swap"])
def test_in_step_the_loop_is_the_plain_loop_with_the_mean_gradient(trouble: str, tmp_path: Path) -> None:
    """Two optimizers in turn or together, and what else loops do."""
    asked = case(trouble, "allreduce")
    found = run(asked, tmp_path)
    torch.testing.assert_close(found[0]["final"], plain(asked), rtol=0.0, atol=1e-6)
    assert is_trained(found)


@pytest.mark.wide
@pytest.mark.parametrize("trouble", ["gan", "muon"])
def test_several_optimizers_train_all_of_the_model(trouble: str, tmp_path: Path) -> None:
    """Under `adpsgd`, where the loop computes on a copy of the weights."""
    assert is_trained(run(case(trouble, "adpsgd"), tmp_path))


@pytest.mark.wide
@pytest.mark.parametrize(("trouble", "coroutine"), [("ema_swap", "diloco"), ("rewind", "adpsgd")])
def test_weights_that_return_are_no_change(trouble: str, coroutine: str, tmp_path: Path) -> None:
    """At rate 0: neither adopted nor refused."""
    for each in run(case(trouble, coroutine, rate=0.0), tmp_path):
        torch.testing.assert_close(each["final"], each["start"], rtol=0.0, atol=1e-6)


@pytest.mark.wide
def test_a_schedule_free_optimizers_eval_before_the_consensus_counts(tmp_path: Path) -> None:
    """In step it is the plain loop's; without averaging in between, the mean of what learners evaluate."""
    asked = case("schedule_free", "allreduce")
    (folder := tmp_path / "allreduce").mkdir()
    torch.testing.assert_close(run(asked, folder)[0]["final"], plain(asked), rtol=0.0, atol=1e-6)
    (folder := tmp_path / "adpsgd").mkdir()
    first, second = run(case("schedule_free", "adpsgd", options={"period": 1e6, "max_lag": 1e9}), folder)
    torch.testing.assert_close(first["final"], (first["last"] + second["last"]) / 2.0, rtol=0.0, atol=1e-6)
    assert not torch.allclose(first["final"], (first["trained"] + second["trained"]) / 2.0, atol=1e-4)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("coroutine", "message"),
    [("parameter-server", "SGDScheduleFree has weights to train and weights to evaluate"), ("diloco", REFUSED)],
)
def test_a_schedule_free_optimizer_that_cannot_work_is_refused(coroutine: str, message: str, tmp_path: Path) -> None:
    run(case("schedule_free", coroutine), tmp_path, message)


@pytest.mark.wide
def test_sparse_gradients_stay_sparse_where_they_are_averaged(tmp_path: Path) -> None:
    """SparseAdam, which takes no others, changes the rows that any learner used, as in the plain loop."""
    asked = case("sparse", "allreduce")
    torch.testing.assert_close(run(asked, tmp_path)[0]["final"], plain(asked), rtol=0.0, atol=1e-6)


@pytest.mark.wide
def test_complex_buffers_are_averaged(tmp_path: Path) -> None:
    """As their real and imaginary parts."""
    for each in run(case("complex_buffer", "adpsgd"), tmp_path):
        assert torch.equal(each["buffer"], torch.tensor([0.5, 2.0]))


@pytest.mark.wide
def test_learners_whose_optimizers_differ_are_rejected(tmp_path: Path) -> None:
    message = r"differ in optimizer: '(SGD|Adam)\(.*\)' and '(SGD|Adam)\(.*\)'"
    run(case("other_optimizer", "adpsgd"), tmp_path, message)


@pytest.mark.wide
@pytest.mark.parametrize("coroutine", ["allreduce", "adpsgd"])
@pytest.mark.parametrize("trouble", ["forked_loaders", "fork_and_exit"])
def test_children_of_a_learner_change_nothing(trouble: str, coroutine: str, tmp_path: Path) -> None:
    """Neither loading processes nor a child that ends as programs do."""
    assert is_trained(run(case(trouble, coroutine), tmp_path))


@pytest.mark.wide
@pytest.mark.parametrize("coroutine", ["allreduce", "adpsgd", "parameter-server"])
def test_one_learner_may_evaluate_alone(coroutine: str, tmp_path: Path) -> None:
    first, _ = found = run(case("evaluate_on_one", coroutine), tmp_path)
    assert is_trained(found)
    assert not torch.equal(first["between"], first["start"])


@pytest.mark.parametrize(
    ("coroutine", "more", "is_finished"),
    [("allreduce", 2, False), ("adpsgd", 2, True), ("diloco", 2, True), ("diloco", 3, False)],
)
def test_unequal_ends_are_finished_or_named(coroutine: str, more: int, is_finished: bool, tmp_path: Path) -> None:
    """Learners that agree every three steps may end within one period of each other; both fail otherwise."""
    asked = case("unequal_ends", coroutine, more=more)
    if is_finished:
        assert is_trained(run(asked, tmp_path))
    else:
        run(asked, tmp_path, r"learner \d .* after \d+ steps, but learner \d")


RAISES = """
import torch, starling

def train(learner):
    for step in range(40):
        model(torch.ones(8, 4)).mean().backward()
        learner.step()
        if step == 20 and learner.rank == 0:
            raise ValueError("my bug")

model = torch.nn.Linear(4, 1)
with starling.join(model, torch.optim.SGD(model.parameters(), lr=0.01), "adpsgd") as learner:
    train(learner)
"""


def test_the_traceback_of_a_loop_s_own_error_has_the_loop_s_own_frames_only(tmp_path: Path) -> None:
    """And not the wait of the background that the error has ended."""
    script = tmp_path / "raises.py"
    script.write_text(RAISES, encoding="utf-8")
    with start_learners([sys.executable, str(script)], 2, tmp_path) as started:
        code, said = started.end(0)
        assert "PeerLost: learner 1 lost learner 0" in started.end(1)[1]
    assert code == 1 and "ValueError: my bug" in said
    frames = [line for line in said.splitlines() if 'File "' in line]
    assert sum("raises.py" in line for line in frames) == 2
    assert not [line for line in frames if "starling/engines" in line]
    assert "During handling of the above exception" not in said
