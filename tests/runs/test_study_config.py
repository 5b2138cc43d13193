"""The recipe of a study is checked as a whole, and becomes a grid of runs."""

import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from starling.cli import app
from starling.errors import ConfigError
from starling.runs.study.arms import ARMS
from starling.runs.study.config import Cell, check_study, load_study, result_digest
from starling.strategies.delayed import DelayOptions
from starling.strategies.server import ServerOptions

Tree = dict[str, Any]
RECIPE = Path(__file__).parents[2] / "recipes" / "staleness.yaml"
STUDY: Tree = {
    "models": {"lstm": {"name": "lstm", "preset": "tiny"}, "blstm": {"name": "blstm", "preset": "tiny"}},
    "optimizers": {"adam": {"name": "adam", "lr": {"lstm": 0.01, "blstm": 0.02}}, "sgd": {"name": "sgd", "lr": 0.5}},
    "warmups": [0.0, 0.25],
    "workers": [2, 4],
    "seeds": [1, 2, 3],
}


@pytest.fixture
def studied(tree: Tree) -> Tree:
    """A study of songs, as a tree."""
    return {**tree, "study": copy.deepcopy(STUDY)}


def setting(cell: Cell) -> tuple[str, str, float]:
    """What its arm is compared under."""
    return cell.model, cell.optimizer, cell.warmup


def test_the_recipe_that_comes_with_starling_asks_the_whole_question() -> None:
    """Every arm for two models, two optimizers, two warm-ups and two numbers of workers."""
    study = load_study(RECIPE)
    found = study.grid.cells()
    assert {(setting(cell), cell.arm, cell.workers) for cell in found} == {
        (setting(cell), cell.arm, cell.workers)
        for cell in study.grid.model_copy(update={"fewer_seeds": {}, "seeds": (1,)}).cells()
    }
    assert study.grid.workers == (4, 16)
    assert len({setting(cell) for cell in found}) == 2 * 2 * 2
    assert set(study.grid.arms) == set(ARMS)
    assert {model.name for model in study.grid.models.values()} == {"blstm", "transformer"}
    assert study.base.budget.epochs is None


def test_the_grid_has_every_cell_once(studied: Tree) -> None:
    """The arm that does not depend on the workers is there once for all their numbers."""
    found = check_study(studied, "s.yaml").grid.cells()
    assert len(found) == len({cell.name for cell in found}) == 2 * 2 * 2 * (1 + 4 * 2) * 3
    assert sum(cell.arm == "one" for cell in found) == 2 * 2 * 2 * 3
    assert {cell.workers for cell in found if cell.arm == "one"} == {None}


def test_some_cells_may_have_fewer_seeds(studied: Tree) -> None:
    """The first ones; where two limits meet, the lower one holds."""
    studied["study"]["fewer_seeds"] = {4: 1, "sgd": 2}
    found = check_study(studied, "s.yaml").grid.cells()
    for adam, workers, seeds in ((True, 2, {1, 2, 3}), (True, 4, {1}), (False, 2, {1, 2}), (False, 4, {1})):
        chosen = [cell for cell in found if (cell.optimizer == "adam", cell.workers) == (adam, workers)]
        assert {cell.seed for cell in chosen} == seeds


def test_cells_that_load_the_same_mini_batches_stand_together(studied: Tree) -> None:
    """Seed after seed, and inside a seed the arm that plans batches for N at once apart from the others."""
    found = check_study(studied, "s.yaml").grid.cells()
    places = [(cell.seed, cell.workers if cell.arm == "batch" else 1) for cell in found]
    assert len(list(dict.fromkeys(places))) == sum(a != b for a, b in pairwise(places)) + 1 == 9


def test_each_arm_is_what_it_says(studied: Tree) -> None:
    """One learner or N, at the same budget, with the cell's own model, optimizer, warm-up and seed."""
    study = check_study(studied, "s.yaml")
    recipes = {cell: study.recipe_of(cell) for cell in study.grid.cells()}
    for cell, recipe in recipes.items():
        options = recipe.strategy.options
        assert recipe.learners == (1 if cell.arm in ("one", "delay") else cell.workers)
        assert recipe.budget == study.base.budget
        assert recipe.seed == cell.seed
        assert recipe.optimizer.schedule.warmup == cell.warmup
        assert recipe.model.name == cell.model
        rate = {"lstm": 0.01, "blstm": 0.02}[cell.model] if cell.optimizer == "adam" else 0.5
        assert (recipe.optimizer.name, recipe.optimizer.lr) == (cell.optimizer, rate)
        if cell.arm == "delay":
            assert cell.workers is not None
            assert options == DelayOptions(delay=cell.workers - 1)
        if cell.arm == "one":
            assert options == DelayOptions(delay=0)
        if cell.arm == "batch":
            assert options == ServerOptions(update="hybrid", combine="sum")
        if cell.arm == "asynchronous":
            assert options == ServerOptions(update="asynchronous")
        if cell.arm == "summed":
            assert options == ServerOptions(update="summed", sum=cell.workers)


def test_a_digest_changes_with_what_a_result_depends_on(studied: Tree) -> None:
    """The learning rate does; the study's name and place and the number of processes don't."""
    study = check_study(studied, "s.yaml")
    (cell, *_) = study.grid.cells()
    before = result_digest(study.recipe_of(cell))
    elsewhere = {**studied, "name": "other", "exp": "elsewhere", "study": STUDY | {"jobs": 7}}
    assert result_digest(check_study(elsewhere, "s.yaml").recipe_of(cell)) == before
    studied["study"]["optimizers"][cell.optimizer]["lr"] = 0.125
    assert result_digest(check_study(studied, "s.yaml").recipe_of(cell)) != before


def test_all_problems_of_a_study_are_listed_at_once(studied: Tree) -> None:
    """Those of the grid and those of the recipe under it: one message, a line each."""
    studied["learnrs"] = 3
    studied["budget"] = {"epochs": "three"}
    studied["study"] = {
        "models": {"a b": {"name": "lstm"}, "deep": {"name": "blstn"}},
        "optimizers": {"adam": {"name": "adam"}},
        "worker": [2],
        "warmups": [1.0],
        "seeds": [],
        "arms": ["one", "delayed", "one"],
        "jobs": 0,
    }
    with pytest.raises(ConfigError) as caught:
        check_study(studied, "s.yaml")
    first, *lines = str(caught.value).splitlines()
    assert first == f"study s.yaml: {len(lines)} problems"
    for start in (
        "  study.models.a b",
        "  study.models.deep.name: 'blstn' is unknown; did you mean 'blstm'?",
        "  study.optimizers.adam.lr: missing",
        "  study.worker: unknown key; did you mean study.workers?",
        "  study.warmups.0: ",
        "  study.seeds: ",
        "  study.arms: 'delayed' unknown; did you mean 'delay'?",
        "  study.jobs: ",
        "  learnrs: unknown key; did you mean learners?",
        "  budget.epochs: ",
    ):
        assert sum(line.startswith(start) for line in lines) == 1, (start, lines)


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        (None, r"study: missing; a study's recipe must say what to vary"),
        (STUDY | {"seeds": [1, 1]}, r"study\.seeds: 1 given twice"),
        (
            STUDY | {"optimizers": {"a": {"name": "adam", "lr": {"lstm": 1}}}},
            r"optimizers\.a\.lr must give one .* blstm",
        ),
        (STUDY | {"optimizers": {"a": {"name": "adm", "lr": 1}}}, r"study\.optimizers\.a: .*'adm' is not in torch"),
        (STUDY | {"optimizers": {"a": {"name": "adam", "lr": -1}}}, r"study\.optimizers\.a: optimizer\.lr: "),
        (
            STUDY | {"fewer_seeds": {"adan": 1, 16: 1}},
            r"fewer_seeds: nothing is called adan; it may name a number of workers, lstm, ",
        ),
        ([], r"study: .*mapping|dictionary"),
    ],
)
def test_a_study_that_cannot_be_run_is_refused_before_anything_starts(tree: Tree, section: Any, problem: str) -> None:
    """With the key that is wrong."""
    with pytest.raises(ConfigError, match=problem):
        check_study({**tree, "study": section} if section is not None else tree, "s.yaml")


def test_a_recipe_without_a_test_set_cannot_be_studied(studied: Tree) -> None:
    """There would be no word error rate."""
    studied["data"]["test"] = []
    with pytest.raises(ConfigError, match=r"data\.test: a study needs a test set"):
        check_study(studied, "s.yaml")


def test_the_help_of_the_study_has_an_example() -> None:
    """That begins as one would type it."""
    result = CliRunner().invoke(app, ["study", "staleness", "--help"])
    assert result.exit_code == 0
    assert "starling study staleness" in " ".join(result.stdout.split("Example:")[1].split())


def test_a_bad_study_is_one_message_on_the_command_line(
    studied: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a traceback; and a key=value may come first, for the recipe that comes with Starling is the default."""
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text(yaml.safe_dump(studied), encoding="utf-8")
    result = CliRunner().invoke(app, ["study", "staleness", "s.yaml", "study.seeds=[]", "study.jobs=0"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: study s.yaml: 2 problems\n")
    result = CliRunner().invoke(app, ["study", "staleness", "study.seeds=[]"])
    assert result.stderr.startswith("error: study staleness: a problem\n")
