"""Training may begin with another experiment's weights."""

from pathlib import Path
from typing import Any

import pytest
import torch

from starling.errors import CheckpointError, ConfigError
from starling.runs.recipe.recipe import Recipe, check_recipe
from starling.runs.setup import load_workload, set_up_and_claim
from starling.speech.recogniser import Recogniser

Tree = dict[str, Any]


def ready(tree: Tree, **changes: Any) -> tuple[Recipe, dict[str, torch.Tensor], list[str]]:
    """A recipe made ready: itself, the weights that training begins with, and what was said."""
    recipe = check_recipe({**tree, **changes}, "r.yaml")
    said: list[str] = []
    folder = set_up_and_claim(recipe, said.append)
    return recipe, load_workload(recipe, folder).make_model().state_dict(), said


def test_training_begins_with_the_other_weights(tree: Tree) -> None:
    """All of them where the tokens are the same, whatever the seed says."""
    first, weights, _ = ready(tree, name="first")
    _, fresh, _ = ready(tree, name="fresh", seed=2)
    _, warm, said = ready(tree, name="warm", seed=2, warm_start=str(first.folder / "initial"))
    assert all(torch.equal(warm[name], weights[name]) for name in weights)
    assert not all(torch.equal(fresh[name], weights[name]) for name in weights)
    assert any("numbers" in line and line.startswith("warm start from") for line in said)


def test_other_tokens_get_an_output_layer_of_their_own(tree: Tree) -> None:
    """Everything below it is taken over."""
    first, weights, _ = ready(tree, name="first")
    alphabet = " ABCDEFGHIJKLMNOPQRSTUVWXYZ'ÄÖÜ"
    _, warm, said = ready(
        tree, name="warm", tokens={"alphabet": alphabet}, warm_start=str(first.folder / "initial"), seed=2
    )
    differing = {name for name in weights if weights[name].shape != warm[name].shape}
    assert differing <= {"output.weight", "output.bias"}
    assert all(torch.equal(warm[name], weights[name]) for name in weights if not name.startswith("output."))
    assert any("the output layer is new" in line for line in said)


def test_a_model_of_other_sizes_is_refused_with_what_differs(tree: Tree) -> None:
    """Before any process starts; nothing is left behind."""
    first, _, _ = ready(tree, name="first")
    with pytest.raises(
        ConfigError, match=r"warm_start: .* only the output layer may differ, .*\[.*\] here, \[.*\] there"
    ):
        ready(tree, name="wide", model={"preset": "small"}, warm_start=str(first.folder / "initial"))
    assert not (first.exp / "wide").exists()


def test_an_experiment_without_a_model_is_refused(tree: Tree, tmp_path: Path) -> None:
    """Its name is said."""
    with pytest.raises(CheckpointError, match="nothing-here"):
        ready(tree, warm_start=str(tmp_path / "nothing-here"))


def test_a_recogniser_of_other_tokens_counts_by_what_they_stand_for(tree: Tree) -> None:
    """As many tokens with other meanings are other tokens."""
    _, _, said = ready(tree, name="first", tokens={"alphabet": " ADEFIMOR"})
    assert said
    first = Recogniser.load(Path(tree["exp"]) / "first" / "initial")
    assert first.tokenizer.vocab_size == 10
    _, warm, said = ready(
        tree,
        name="warm",
        tokens={"alphabet": " RADEFIMO"},
        warm_start=str(Path(tree["exp"]) / "first" / "initial"),
        seed=2,
    )
    assert any("the output layer is new" in line for line in said)
    assert not torch.equal(warm["output.weight"], first.model.state_dict()["output.weight"])
