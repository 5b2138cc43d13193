"""A recipe is checked as a whole, and says everything that is wrong with it at once."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from starling.errors import ConfigError
from starling.experiment.recipe import (
    check_recipe,
    dump_recipe,
    fingerprints,
    load_recipe,
    recipe_digest,
)

Tree = dict[str, Any]
RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_the_recipes_that_come_with_starling_are_complete(path: Path) -> None:
    """Each loads, and what is written into the experiment's folder loads as the same recipe."""
    recipe = load_recipe(path)
    assert check_recipe(yaml.safe_load(dump_recipe(recipe)), "dumped") == recipe


def test_there_are_recipes() -> None:
    """The parametrisation above finds them."""
    assert {"demo.yaml", "fsdd.yaml", "speechocean.yaml"} <= {path.name for path in RECIPES}


def test_an_unknown_kind_of_corpus_is_answered_with_the_known_ones(tree: Tree) -> None:
    """By its key, without the words of the library that checks."""
    tree["data"]["corpus"]["kind"] = "kaldii"
    with pytest.raises(ConfigError) as caught:
        check_recipe(tree, "r.yaml")
    assert "data.corpus.kind: 'kaldii' is unknown; did you mean kaldi? known are tsv, kaldi, " in str(caught.value)
    del tree["data"]["corpus"]["kind"]
    with pytest.raises(ConfigError, match=r"data\.corpus\.kind: missing; a recipe must say it"):
        check_recipe(tree, "r.yaml")


def test_a_section_without_content_is_named(tree: Tree) -> None:
    """`budget:` with nothing behind it is YAML's null."""
    tree["budget"] = None
    with pytest.raises(ConfigError, match=r"budget: must be a mapping of keys to values, got None"):
        check_recipe(tree, "r.yaml")


def test_all_problems_are_listed_at_once(tree: Tree) -> None:
    """Unknown keys, wrong types, impossible values, an unknown strategy and optimizer: one message, a line each."""
    tree["learnrs"] = 3
    tree["seed"] = -1
    tree["budget"] = {"epochs": "three"}
    tree["data"]["corpus"]["pth"] = "x"
    tree["model"]["lr"] = 0.1
    tree["optimizer"]["name"] = "adamm"
    tree["strategy"] = "allreduc"
    tree["cluster"] = {"compute": {"distribution": "uniform", "spread": 2}}
    del tree["name"]
    with pytest.raises(ConfigError) as caught:
        check_recipe(tree, "r.yaml")
    first, *lines = str(caught.value).splitlines()
    assert first == "recipe r.yaml: 9 problems"
    starts = {
        "  learnrs: unknown key; did you mean learners?",
        "  seed: input should be greater than or equal to 0, got -1",
        "  budget.epochs: input should be a valid integer",
        "  data.corpus.pth: unknown key; did you mean data.corpus.path?",
        "  model.lr: unknown key; did you mean optimizer.lr?",
        "  optimizer: name: 'adamm' is not in torch.optim; did you mean adam",
        "  strategy: 'allreduc' is unknown; did you mean 'allreduce'?",
        "  cluster.compute: a uniform spread of 2.0 would give negative times",
        "  name: missing",
    }
    assert all(any(line.startswith(start) for line in lines) for start in starts), lines
    assert len(lines) == len(starts)


def test_a_wrong_option_of_a_strategy_is_a_problem_of_that_key(tree: Tree) -> None:
    """Options are checked by the strategy's own model."""
    tree["strategy"] = {"name": "allreduce", "patern": "ring"}
    with pytest.raises(ConfigError, match=r"strategy\.patern: unknown key"):
        check_recipe(tree, "r.yaml")


@pytest.mark.parametrize(
    ("optimizer", "problem"),
    [
        ({"name": "sgd", "options": {"momentun": 0.9}}, "SGD has no 'momentun'; did you mean momentum"),
        ({"name": "SGD", "options": {"momentum": -1}}, "SGD cannot train .*Invalid momentum"),
        ({"name": "lbfgs"}, "LBFGS cannot train"),
        ({"name": "muon"}, "Muon cannot train"),
        ({"name": "sparseadam"}, "SparseAdam cannot train"),
        ({"lr": "fast"}, r"optimizer\.lr: input should be a valid number"),
        ({"lr": float("nan")}, r"optimizer\.lr"),
        ({"schedule": {"warm_up": 0.1}}, r"optimizer\.schedule\.warm_up: unknown key; did you mean optimizer\.sch"),
    ],
)
def test_an_optimizer_that_cannot_train_is_refused_before_anything_starts(
    tree: Tree, optimizer: Tree, problem: str
) -> None:
    """It is tried on a matrix and a vector."""
    tree["optimizer"] = optimizer
    with pytest.raises(ConfigError, match=problem):
        check_recipe(tree, "r.yaml")


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", "", "a" * 200])
def test_a_name_cannot_lead_out_of_the_folder_of_experiments(tree: Tree, name: str) -> None:
    """It becomes a folder's name."""
    tree["name"] = name
    with pytest.raises(ConfigError, match="name"):
        check_recipe(tree, "r.yaml")


def test_optimizers_are_known_in_any_case(tree: Tree) -> None:
    """`AdamW`, `adamw` and `ADAMW` are one."""
    for name in ("AdamW", "adamw", "ADAMW"):
        tree["optimizer"] = {"name": name}
        assert check_recipe(tree, "r.yaml").optimizer.name == name


def test_the_fingerprint_of_a_section_changes_with_what_a_resume_needs(tree: Tree) -> None:
    """The model's size does; the budget, the learning rate and the place of the data don't."""
    before = fingerprints(check_recipe(tree, "r.yaml"))
    other = copy.deepcopy(tree)
    other["budget"] = {"steps": 3}
    other["optimizer"]["lr"] = 0.5
    other["learners"] = 7
    assert fingerprints(check_recipe(other, "r.yaml")) == before
    other["model"]["preset"] = "small"
    other["data"]["sampling_rate"] = 16000
    after = fingerprints(check_recipe(other, "r.yaml"))
    assert {section for section in before if before[section] != after[section]} == {"model", "data"}


def test_learners_of_different_recipes_have_different_digests(tree: Tree) -> None:
    """Any key that changes a result changes the digest."""
    before = recipe_digest(check_recipe(tree, "r.yaml"))
    assert before == recipe_digest(check_recipe(copy.deepcopy(tree), "elsewhere.yaml"))
    tree["optimizer"]["lr"] = 0.02
    assert before != recipe_digest(check_recipe(tree, "r.yaml"))
