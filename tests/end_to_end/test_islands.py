"""A recipe with islands, through the command line: training, scores, checkpoints, another island size, a simulation."""

import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from starling.checkpoint.reader import latest, load
from tests.end_to_end.test_train import starling, written

ISLANDS = ("learners=4", "island.sharded=2", "strategy=adpsgd", "data.valid=test")


@pytest.mark.wide
def test_a_recipe_trains_in_islands_and_resumes_without(tree: dict[str, Any], tmp_path: Path) -> None:
    recipe = written(tree, tmp_path)
    run = starling(tmp_path, "train", recipe, *ISLANDS, "budget.epochs=2")
    assert run.returncode == 0, run.stderr
    assert "%WER" in run.stdout
    first = load(latest(tmp_path / "exp" / "songs"))
    assert first.manifest.learners == 4
    parts = [first.learner(rank).weights for rank in range(4)]
    model = load_file(first.model_folder / "model.safetensors")
    assert len(first.consensus()) == sum(each.numel() for each in model.values())  # it has no buffers
    assert len(parts[0]) < 0.52 * len(first.consensus())
    assert starling(tmp_path, "audit", "exp/songs").returncode == 0

    resumed = starling(tmp_path, "train", recipe, *ISLANDS, "island.sharded=1", "budget.epochs=3", "resume=exp/songs")
    assert resumed.returncode == 0, resumed.stderr
    last = load(latest(tmp_path / "exp" / "songs"))
    assert last.manifest.next_ticket.step > first.manifest.next_ticket.step
    assert len(last.learner(0).weights) == len(first.consensus())


@pytest.mark.soak
def test_a_recipe_trains_in_tensor_islands_and_resumes_sharded(tree: dict[str, Any], tmp_path: Path) -> None:
    recipe = written(tree, tmp_path)
    keys = ("learners=4", "island.tensor=2", "strategy=adpsgd", "data.valid=test")
    run = starling(tmp_path, "train", recipe, *keys, "budget.epochs=2")
    assert run.returncode == 0, run.stderr
    assert "%WER" in run.stdout
    first = load(latest(tmp_path / "exp" / "songs"))
    model = load_file(first.model_folder / "model.safetensors")
    assert len(first.consensus()) == sum(each.numel() for each in model.values())
    assert len(first.learner(0).weights) < 0.52 * len(first.consensus())
    assert starling(tmp_path, "audit", "exp/songs").returncode == 0

    resumed = starling(tmp_path, "train", recipe, *ISLANDS, "budget.epochs=3", "resume=exp/songs")
    assert resumed.returncode == 0, resumed.stderr
    last = load(latest(tmp_path / "exp" / "songs"))
    assert last.manifest.next_ticket.step > first.manifest.next_ticket.step
    assert starling(tmp_path, "audit", "exp/songs").returncode == 0
    simulated = starling(tmp_path, "simulate", recipe, *keys, "budget.epochs=1")
    assert simulated.returncode == 0, simulated.stderr
    assert starling(tmp_path, "audit", "exp/songs-virtual").returncode == 0


@pytest.mark.wide
def test_a_recipe_is_simulated_in_islands(tree: dict[str, Any], tmp_path: Path) -> None:
    """With the same keys; every utterance is seen once in each epoch, by the learner that computed it."""
    recipe = written(tree, tmp_path)
    run = starling(tmp_path, "simulate", recipe, *ISLANDS, "budget.epochs=2")
    assert run.returncode == 0, run.stderr
    assert "event hash" in run.stdout
    assert starling(tmp_path, "audit", "exp/songs-virtual").returncode == 0


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["learners=3", "island.sharded=2"], "3 learners cannot be divided into islands of 2; choose a multiple of 2"),
        (["learners=2", "island.sharded=2", "strategy=hogwild"], "hogwild keeps its model outside the learners"),
        (["learners=4", "island.sharded=2", "strategy=parameter-server"], "parameter-server keeps its model outside"),
        (["learners=4", "island.sharded=2", "strategy=auto"], "name one, or leave out island"),
        (["learners=4", "island.pipeline=2"], "island.pipeline: .*unknown"),
        (["learners=4", "island.tensor=2", "island.sharded=2"], "sharded and tensor cannot be combined"),
        (["learners=3", "island.tensor=2"], "island.tensor: 3 learners cannot be divided into islands of 2"),
        (["learners=4", "island.sharded=0"], "island.sharded"),
        (["learners=4", "island.sharded=2", "strategy={name: hadpsgd, per_node: 4}"], "2 learners cannot be divided"),
        (["learners=8", "island.sharded=2", "strategy={name: dpsgd, pattern: nearest}"], "nearest"),
    ],
)
def test_what_an_island_cannot_do_is_refused(
    keys: list[str], message: str, tree: dict[str, Any], tmp_path: Path
) -> None:
    run = starling(tmp_path, "train", written(tree, tmp_path), *keys, "budget.epochs=1")
    assert run.returncode == 2
    assert re.search(message, run.stderr), run.stderr


@pytest.mark.parametrize("kind", ["tensor", pytest.param("sharded", marks=pytest.mark.soak)])
def test_a_plan_of_islands_tells_the_memory_of_a_rank(kind: str, tree: dict[str, Any], tmp_path: Path) -> None:
    keys = ("learners=4", f"island.{kind}=2", "strategy=adpsgd")
    options = ("--preset", "v100-2019", "--strategies", "adpsgd,hogwild")
    run = starling(tmp_path, "plan", written(tree, tmp_path), *keys, *options)
    assert run.returncode == 0, run.stderr
    assert re.search(r"^adpsgd with 4 learners: ", run.stdout)
    assert re.search(r"hogwild .*left out: .*keeps its model outside the learners", run.stdout)
    found = re.search(r"a rank of an island of 2 is predicted to hold .*: weights .* activations", run.stdout)
    assert found, run.stdout


@pytest.mark.soak
def test_a_profile_tells_the_memory_of_a_rank(tree: dict[str, Any], tmp_path: Path) -> None:
    run = starling(tmp_path, "profile", written(tree, tmp_path), "learners=4", "island.sharded=2", "strategy=adpsgd")
    assert run.returncode == 0, run.stderr
    assert "predicted memory of a rank of an island of 2: " in run.stdout
