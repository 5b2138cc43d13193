"""Loops that save checkpoints and resume from them, under every strategy."""

import json
import shutil
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import starling
from starling.checkpoint.reader import checkpoints_in, load
from starling.errors import CheckpointError, ConfigError, ProtocolError
from tests.checkpoint.cut_cases import delivered_and_pending, places_of_each_mini_batch
from tests.contract.cases import CHOICES
from tests.engines.drop_in_process import flat, make_model
from tests.engines.resuming_loop_process import HALF, NUM_STEPS, ONCE_EACH, RATE, SAVED, run
from tests.warm_start import run_learners, start_learners

WORLD = 3
NAMES = [
    name
    for name, choice in CHOICES.items()
    if getattr(choice.options(WORLD), "servers", "beside") == "beside"
    and not name.endswith(("-pairs", "-exponential", "-complete"))
]
"""Every strategy that a loop can have."""
MOVES = {"server-async-diloco", "server-aeasgd", "hogwild"}
"""With as many learners, these begin elsewhere than at the mean: learners first push what they have not pushed, or all
take the shared model as learner 0 saved it."""
IN_STEP = [name for name in NAMES if CHOICES[name].is_synchronous]
ASYNCHRONOUS = [name for name in NAMES if not CHOICES[name].is_synchronous]
IN_ROUNDS = [name for name in ASYNCHRONOUS if name.startswith(("adpsgd", "a2cid2"))]
"""Those whose learners make their own steps and average their weights in the background."""
Runs = Callable[[str, int], dict[str, list[dict[str, Tensor]]]]


def command(phase: str, names: list[str], folder: Path, saved_in: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "tests.engines.resuming_loop_process"),
        *(phase, json.dumps(names), str(folder), str(saved_in)),
    ]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resumed")


@pytest.fixture(scope="module")
def runs(base: Path) -> Runs:
    """What came out of a phase of all strategies with so many learners, by rank. `rest` and `still` resume what `WORLD`
    learners have saved in `first`."""

    @cache
    def run_phase(phase: str, world: int) -> dict[str, list[dict[str, Tensor]]]:
        folder = base / f"{phase}-{world}"
        folder.mkdir()
        saved = base / f"saved-{phase}-{world}"
        if phase in ("rest", "still"):
            run_phase("first", WORLD)
            shutil.copytree(base / f"saved-first-{WORLD}", saved)
        run_learners(command(phase, NAMES, folder, saved), world, folder)
        return {
            name: [load_file(folder / f"{name}-{phase}-{rank}.safetensors") for rank in range(world)] for name in NAMES
        }

    return run_phase


def saved_model(base: Path, name: str) -> Tensor:
    """The mean of the learners' weights in the checkpoint after half of the steps."""
    (path,) = checkpoints_in(base / f"saved-first-{WORLD}" / name)
    assert path.name == f"step-{HALF:08d}"
    model = make_model(0)
    model.load_state_dict(load_file(load(path).model_folder / "model.safetensors"), strict=False)
    return flat(model)


@pytest.mark.parametrize("name", IN_STEP)
def test_learners_in_step_end_with_the_bits_of_a_run_without_interruption(name: str, runs: Runs) -> None:
    """Weights, those of each learner and their mean, buffers, and the state of the scheduler."""
    straight, resumed = runs("straight", WORLD)[name], runs("rest", WORLD)[name]
    for one, other in zip(straight, resumed, strict=True):
        assert int(other["began after"]) == HALF
        assert int(one["steps"][0]) == int(other["steps"][0]) == 2 * HALF
        assert int(other["steps"][1]) == HALF
        for what in ("own", "final", "level", "rate"):
            assert torch.equal(one[what], other[what]), what


@pytest.mark.parametrize("world", [WORLD, pytest.param(2, marks=pytest.mark.wide)])
@pytest.mark.parametrize("name", NAMES)
def test_a_run_resumes_from_the_mean_that_was_saved(name: str, world: int, runs: Runs, base: Path) -> None:
    """With as many learners or fewer, however they average; and goes on from there, as many steps as are left."""
    expected = saved_model(base, name)
    for each in runs("still", world)[name] if world != WORLD or name not in MOVES else ():
        torch.testing.assert_close(each["start"], expected, rtol=0.0, atol=1e-6)
    resumed = runs("rest", world)[name]
    for each in resumed:
        assert int(each["began after"]) == HALF
        assert each["steps"].tolist() == [2 * HALF, HALF]
        assert float(each["rate"]) == pytest.approx(0.05 * 0.95 ** (2 * HALF))
        assert each["final"].isfinite().all()
        assert torch.equal(each["final"], resumed[0]["final"])
        assert not torch.equal(each["final"], expected)


@pytest.mark.wide
@pytest.mark.parametrize("name", NAMES)
def test_one_learner_resumes_what_several_have_saved(name: str, runs: Runs, base: Path, tmp_path: Path) -> None:
    runs("first", WORLD)
    shutil.copytree(base / f"saved-first-{WORLD}" / name, tmp_path / name)
    torch.testing.assert_close(run(name, "still", tmp_path)["start"], saved_model(base, name), rtol=0.0, atol=1e-6)
    seen = run(name, "rest", tmp_path)
    assert int(seen["began after"]) == HALF
    assert seen["steps"].tolist() == [2 * HALF, HALF]
    assert seen["final"].isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_one_learner_ends_with_the_bits_of_a_run_without_interruption(name: str, tmp_path: Path) -> None:
    straight = run(name, "straight", tmp_path / "straight")
    run(name, "first", tmp_path / "saved")
    resumed = run(name, "rest", tmp_path / "saved")
    assert int(resumed["began after"]) == HALF
    assert torch.equal(straight["final"], resumed["final"])


def test_a_checkpoint_contains_each_step_before_it_once_and_no_later_one(tmp_path: Path) -> None:
    """Although learners average in the background, and one is ahead when it saves."""
    run_learners(command("counted", IN_ROUNDS, tmp_path, tmp_path), 3, tmp_path)
    for name in IN_ROUNDS:
        paths = checkpoints_in(tmp_path / name)
        assert [path.name for path in paths] == ["step-00000035", "step-00000040"]
        for number, path in zip((35, 40), paths, strict=True):
            weights = load(path).consensus()
            moved = -weights / (RATE * number * 5 / 3)  # the learners made 1, 3 and 1 steps for each number
            tolerance = 2e-2 if "int8" in name or "bfloat16" in name else 1e-5
            torch.testing.assert_close(moved, torch.ones_like(moved), rtol=0.0, atol=tolerance, msg=name)


@pytest.mark.parametrize("attempt", range(3))
def test_a_checkpoint_of_servers_contains_each_step_before_it_once_and_no_later_one(
    attempt: int, tmp_path: Path
) -> None:
    """In the servers' model, or with the learner that pushes it when it resumes."""
    run_learners(command("once-each", list(ONCE_EACH), tmp_path, tmp_path), 3, tmp_path)
    for name in ONCE_EACH:
        paths = checkpoints_in(tmp_path / name)
        assert [path.name for path in paths] == [f"step-{number:08d}" for number in SAVED]
        for number, path in zip(SAVED, paths, strict=True):
            states = [load(path).learner(rank) for rank in range(3)]
            found = (delivered_and_pending if name == "async-diloco" else places_of_each_mini_batch)(states)
            assert torch.equal(found.reshape(3, NUM_STEPS), (torch.arange(NUM_STEPS) < number).float().expand(3, -1))


def make_loop() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 1)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def test_the_newest_two_checkpoints_are_kept_and_a_number_is_saved_once(tmp_path: Path) -> None:
    model, optimizer = make_loop()
    with starling.join(model, optimizer, "allreduce", checkpoints=tmp_path) as learner:
        for number in (1, 2, 3):
            learner.save(number)
        before = load(tmp_path / "step-00000003").manifest.digest
        model(torch.ones(1, 3)).sum().backward()
        learner.step()
        learner.save(3)
        learner.save(1)
    assert [path.name for path in checkpoints_in(tmp_path)] == ["step-00000002", "step-00000003"]
    assert load(tmp_path / "step-00000003").manifest.digest == before


def test_a_resumed_sampler_gives_out_the_rest_of_the_epoch(tmp_path: Path) -> None:
    seen: list[int] = []
    for last in (10, 100):
        model, optimizer = make_loop()
        sampler = starling.SharedSampler(24, claim_size=4)
        with starling.join(model, optimizer, "allreduce", checkpoints=tmp_path, stateful=[sampler]) as learner:
            for sample in sampler:
                seen.append(sample)
                sampler.done(1)
                model(torch.ones(1, 3)).sum().backward()
                learner.step()
                if len(seen) == last:
                    learner.save()
                    break
    assert sorted(seen) == list(range(24))


def test_checkpoints_that_not_all_learners_have_saved_are_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once while a learner saves, and when the run begins again; older ones, which crashes left, are not named."""
    partial = [tmp_path / f".step-{number:08d}.partial" for number in (3, 5, 6, 7, 8)]
    model, optimizer = make_loop()
    with caplog.at_level("WARNING", logger="starling"):
        with starling.join(model, optimizer, checkpoints=tmp_path) as learner:
            learner.save(4)
            for each in partial:  # as if this learner were two that saved under different numbers
                each.mkdir()
                (each / "learner-0.json").touch()
            learner.save(9)
            learner.save(10)
        assert caplog.text.count("so nothing can resume from there yet; if learners make unequal numbers of steps") == 1
        caplog.clear()
        (tmp_path / ".step-00000011.partial").mkdir()
        (tmp_path / ".step-00000011.partial" / "learner-1.json").touch()
        starling.join(model, optimizer, checkpoints=tmp_path).close()
    assert "removed step-00000011, which not all learners have saved; if" in caplog.text
    assert not list(tmp_path.glob(".*"))


def test_what_cannot_be_saved_or_resumed_is_an_error_that_says_why(tmp_path: Path) -> None:
    model, optimizer = make_loop()
    with pytest.raises(ConfigError, match="give a folder as `checkpoints`"):
        starling.join(model, optimizer, stateful=[optimizer])
    with pytest.raises(ConfigError, match="cannot be recorded"):
        starling.join(model, optimizer, record=tmp_path / "record", checkpoints=tmp_path)
    with starling.join(model, optimizer) as learner, pytest.raises(ProtocolError, match=r"save\(\) needs a folder"):
        learner.save()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with starling.join(model, optimizer, checkpoints=tmp_path, stateful=[scheduler]) as learner:
        with learner.consensus(), pytest.raises(ProtocolError, match=r"save\(\) was called within consensus"):
            learner.save()
        assert learner.newest_save is None
        learner.save(7)
        assert learner.newest_save == 7
    with starling.join(model, optimizer, checkpoints=tmp_path, stateful=[scheduler]) as learner:
        assert learner.newest_save == 7
    with pytest.raises(ConfigError, match="has the states of StepLR, but the loop gives nothing"):
        starling.join(model, optimizer, checkpoints=tmp_path)
    other = nn.Linear(4, 1)
    with pytest.raises(CheckpointError, match="holds 4 trained weights and 0 other tensors, and the model has 5 and 0"):
        starling.join(other, torch.optim.SGD(other.parameters()), checkpoints=tmp_path, stateful=[scheduler])
    (tmp_path / "step-00000007" / "learner-0.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"learner-0\.json"):
        starling.join(model, optimizer, checkpoints=tmp_path, stateful=[scheduler])


def test_learners_that_see_different_checkpoints_do_not_begin(tmp_path: Path) -> None:
    model, optimizer = make_loop()
    with starling.join(model, optimizer, checkpoints=tmp_path / "0") as learner:
        learner.save(5)
    code = (
        "import os, sys, torch, starling; model = torch.nn.Linear(3, 1);"
        "optimizer = torch.optim.Adam(model.parameters());"
        "starling.join(model, optimizer, checkpoints=os.path.join(sys.argv[1], os.environ['RANK']))"
    )
    with start_learners([sys.executable, "-c", code, str(tmp_path)], 2, tmp_path) as started:
        for rank in range(2):
            ended, said = started.end(rank)
            assert ended == 1
            assert "learners resume from different checkpoints, -1, 5" in said
