"""The recipe of a comparison is checked as a whole, and becomes a grid of runs."""

import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from starling.cli import app
from starling.comparing.compare import load_comparison
from starling.comparing.grid import Cell, Row
from starling.errors import ConfigError
from starling.speech.comparison import SpeechComparison, check_comparison
from starling.strategies.delayed import DelayOptions
from starling.strategies.parts.rules import Asynchronous, Hybrid, Summed

Tree = dict[str, Any]
COMPARED: Tree = {
    "arms": {
        "one": {"strategy": {"name": "delayed", "delay": 0}, "learners": 1},
        "batch": {"strategy": {"name": "parameter-server", "update": "hybrid"}, "batches": {"max_duration": 3}},
        "adpsgd": {"strategy": "adpsgd", "rates": [0.1, "2x"], "seeds": [2]},
    },
    "settings": {"lstm": {"model": {"name": "lstm"}}, "fast": {"optimizer": {"lr": 0.04}}},
    "learners": [2, 4],
    "rates": ["0.5x", "1x"],
}


@pytest.fixture
def compared(tree: Tree) -> Tree:
    """A comparison on songs, as a tree."""
    tree["data"]["valid"] = "test"
    return {**tree, "compare": copy.deepcopy(COMPARED)}


def cells(subject: SpeechComparison) -> list[Cell]:
    """Every cell of the grid."""
    section = subject.section
    return [
        Cell(setting=row.setting, arm=row.arm, learners=row.learners, rate=rate, seed=seed)
        for row in section.rows
        for rate in section.rates_of(row, subject.own_rate(row))
        for seed in section.seeds_of(row, True)
    ]


@pytest.mark.parametrize(
    ("name", "models", "optimizers", "warmups", "num_rows", "num_cells"),
    [
        ("staleness", ("blstm-hybrid", "transformer"), ("adam",), (0.1,), 2 * 5, 2 * 5 * 3),  # three rates, one seed
        # five arms have three seeds
        ("staleness_ctc", ("blstm", "transformer"), ("adam", "sgd"), (0.0, 0.1), 8 * 9, 8 * 9 + 8 * 5 * 2),
    ],
)
def test_the_staleness_recipes_ask_the_whole_question(
    name: str,
    models: tuple[str, ...],
    optimizers: tuple[str, ...],
    warmups: tuple[float, ...],
    num_rows: int,
    num_cells: int,
) -> None:
    """Every arm for all models, optimizers, warm-ups and numbers of workers, at the same budget."""
    study = load_comparison(Path(name))
    recipes = {row: study.recipe(row) for row in study.section.rows}
    assert {(each.model.name, each.optimizer.name, each.optimizer.schedule.warmup) for each in recipes.values()} == {
        (model, optimizer, warmup) for model in models for optimizer in optimizers for warmup in warmups
    }
    assert len(recipes) == num_rows
    assert len({cell.name for cell in cells(study)}) == num_cells
    assert study.base.budget.epochs is None
    for row, recipe in recipes.items():
        arm, workers = row.arm.removesuffix("-16"), 16 if row.arm.endswith("-16") else 4
        assert recipe.learners == (1 if arm in ("one", "delay") else workers)
        assert recipe.budget == study.base.budget
        assert (
            recipe.strategy.options
            == {
                "one": DelayOptions(delay=0),
                "batch": Hybrid(combine="sum"),
                "delay": DelayOptions(delay=workers - 1),
                "asynchronous": Asynchronous(),
                "summed": Summed(sum=workers),
            }[arm]
        )
        assert study.section.baseline_of(row) == Row(row.setting, "one", 1)


def test_the_study_of_divided_data_compares_each_strategy_with_itself() -> None:
    """Six learners with one speaker each, against six with parts alike; nothing else differs."""
    study = load_comparison(Path("non_iid"))
    for row in study.section.rows:
        recipe, base = study.recipe(row), study.section.baseline_of(row)
        assert recipe.learners == 6
        assert (base.setting, base.arm) == (row.setting, "mixed")
        assert study.recipe(base).model_copy(update={"partition": recipe.partition}) == recipe
        assert (recipe.partition == "speaker") == (row.arm == "speakers")
    strategies = {study.recipe(row).strategy.name for row in study.section.rows}
    assert strategies == {"allreduce", "delay-by-one", "dpsgd", "adpsgd", "parameter-server"}


def test_the_grid_has_every_cell_once_and_each_is_what_it_says(compared: Tree) -> None:
    """An arm's own keys override the setting's, and these override the recipe's; rates may be multiples of the
    arm's."""
    subject = check_comparison(compared, "c.yaml")
    found = cells(subject)
    assert len(found) == len({cell.name for cell in found}) == 2 * (1 * 2 * 3 + 2 * 2 * 3 + 2 * 2 * 1)
    for cell in found:
        recipe, own = subject.recipe(cell), 0.04 if cell.setting == "fast" else 0.01
        assert (recipe.learners, recipe.seed, recipe.optimizer.lr) == (cell.learners, cell.seed, cell.rate)
        assert cell.rate in ((0.1, 2 * own) if cell.arm == "adpsgd" else (0.5 * own, own))
        assert recipe.strategy.name == subject.section.arms[cell.arm].strategy.name  # type: ignore[union-attr]
        assert recipe.batches.max_duration == (3 if cell.arm == "batch" else 5)
        assert recipe.model.name == ("lstm" if cell.setting == "lstm" else subject.base.model.name)
        assert recipe.budget == subject.base.budget


def test_an_arm_is_compared_only_in_its_own_settings(compared: Tree) -> None:
    """This holds if the arm names settings; other arms are in all of them."""
    compared["compare"]["arms"]["adpsgd"]["settings"] = "fast"
    subject = check_comparison(compared, "c.yaml")
    found = [(row.setting, row.arm) for row in subject.section.rows if row.learners != 4]
    assert found == [("lstm", "one"), ("lstm", "batch"), ("fast", "one"), ("fast", "batch"), ("fast", "adpsgd")]


def test_a_lone_learner_is_added_if_there_is_no_baseline(compared: Tree) -> None:
    """It is not added if an arm is one, or if another baseline is named."""

    def baseline(section: Tree) -> tuple[list[str], Row]:
        found = check_comparison({**compared, "compare": section}, "c.yaml").section
        return list(found.all_arms), found.baseline_of(Row("", "adpsgd", 4))

    arms: Tree = {"adpsgd": {"strategy": "adpsgd"}, "allreduce": {}}
    assert baseline({"arms": arms}) == (["one", "adpsgd", "allreduce"], Row("", "one", 1))
    assert baseline({"arms": arms, "baseline": "allreduce"}) == (["adpsgd", "allreduce"], Row("", "allreduce", 4))
    alone = {**arms, "lone": {"learners": 1}}
    assert baseline({"arms": alone}) == (["adpsgd", "allreduce", "lone"], Row("", "lone", 1))


def test_stragglers_may_name_any_learner_of_a_row_and_the_added_baseline_has_those_that_exist(compared: Tree) -> None:
    """The recipe's own number of learners has no meaning in a comparison."""
    slow = {0: 2.0, 3: 4.0}
    section = {"arms": {"adpsgd": {"strategy": "adpsgd"}}, "learners": 4}
    tree = {**compared, "learners": 2, "stragglers": {"slow": slow}, "compare": section}
    subject = check_comparison(tree, "c.yaml")
    found = {row.arm: subject.recipe(row).stragglers.slow for row in subject.section.rows}
    assert found == {"one": {0: 2.0}, "adpsgd": slow}
    with pytest.raises(ConfigError, match=r"arms\.adpsgd: stragglers\.slow\.3: there is no learner 3 among 2"):
        check_comparison({**tree, "compare": {**section, "learners": 2}}, "c.yaml")


def test_options_of_the_command_override_the_recipe(compared: Tree, tmp_path: Path) -> None:
    """`--strategies` names arms of the recipe, or strategies."""
    recipe = tmp_path / "c.yaml"
    recipe.write_text(yaml.safe_dump(compared), encoding="utf-8")
    subject = load_comparison(recipe, ["compare.jobs=3"], ["batch", "delay-by-one"], seeds=[5], learners=None)
    section = subject.section
    assert (list(section.arms), section.seeds, section.learners, section.jobs) == (
        ["batch", "delay-by-one"],
        (5,),
        (2, 4),
        3,
    )
    assert subject.recipe(Row("fast", "batch", 2)).batches.max_duration == 3
    assert subject.recipe(Row("fast", "delay-by-one", 2)).strategy.name == "delay-by-one"


def test_cells_that_load_the_same_mini_batches_have_one_key(compared: Tree) -> None:
    """The strategy and the rate do not matter; an arm with its own batches has another key, and so does another
    seed."""
    subject = check_comparison(compared, "c.yaml")
    keys = {(cell.seed, cell.arm == "batch"): set[str]() for cell in cells(subject)}
    for cell in cells(subject):
        keys[cell.seed, cell.arm == "batch"].add(subject.batches_key(cell))
    assert all(len(each) == 1 for each in keys.values()) and len(set.union(*keys.values())) == 6


def test_a_digest_changes_with_what_a_result_depends_on(compared: Tree) -> None:
    """The budget does, and the engine; the name, the place, the target and the number of processes don't."""
    (cell, *_) = cells(check_comparison(compared, "c.yaml"))

    def digest(section: Tree, **changes: Any) -> str:
        return check_comparison({**compared, **changes, "compare": COMPARED | section}, "c.yaml").digest(cell)

    before = digest({})
    assert digest({"jobs": 7, "target": 1.0, "seeds": [1, 9]}, name="other", exp="elsewhere") == before
    assert digest({}, budget={"epochs": 2}) != before
    assert digest({"engine": "processes"}) != before


def test_all_problems_of_a_comparison_are_listed_at_once(compared: Tree) -> None:
    """One message lists the problems of the section and of the recipe under it, a line each."""
    compared["learnrs"] = 3
    compared["budget"] = {"epochs": "three"}
    compared["compare"] = {
        "arms": {"a b": {}, "adpsgd": {"rates": ["2y"]}},
        "setings": {},
        "learners": [0],
        "seeds": [],
        "engine": "virtul",
        "jobs": 0,
    }
    with pytest.raises(ConfigError) as caught:
        check_comparison(compared, "c.yaml")
    first, *lines = str(caught.value).splitlines()
    assert first == f"comparison c.yaml: {len(lines)} problems"
    for start in (
        "  compare.arms.a b",
        "  compare.arms.adpsgd.rates.0: '2y' is neither a learning rate such as 3e-3 nor a multiple",
        "  compare.setings: unknown key; did you mean compare.settings?",
        "  compare.learners.0: ",
        "  compare.seeds: ",
        "  compare.engine: ",
        "  compare.jobs: ",
        "  learnrs: unknown key; did you mean learners?",
        "  budget.epochs: ",
    ):
        assert sum(line.startswith(start) for line in lines) == 1, (start, lines)


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        (None, r"compare: missing; say which `arms` to compare"),
        ([], r"compare: .*mapping|dictionary"),
        ({"seeds": [1, 1]}, r"compare\.seeds: 1 given twice"),
        ({"arms": {"adpsdg": {"strategy": "adpsdg"}}}, r"compare\.arms\.adpsdg: .*did you mean 'adpsgd'\?"),
        (
            {"arms": {"a": {"strategy": {"name": "adpsgd", "perod": 2}}}},
            r"arms\.a: strategy\.perod: unknown key; did y",
        ),
        (
            {"arms": {"a": {"strategy": {"name": "hadpsgd", "per_node": 3}, "learners": 4}}},
            r"arms\.a: strategy\.per_node: 4 learners cannot be divided into super-learners of 3",
        ),
        ({"arms": {"a": {"optimizer": {"name": "adm"}}}}, r"compare\.arms\.a: optimizer: name: 'adm' is not in torch"),
        ({"arms": {"a": {"lerners": 3}}}, r"compare\.arms\.a: lerners: unknown key; did you mean learners\?"),
        ({"arms": {"a": {"settings": ["slow"]}}}, r"arms\.a\.settings: 'slow' is none of lstm, fast"),
        (
            {"arms": {"a": {"learners": 1, "settings": ["fast"]}}},
            r"arms\.a\.settings: others are compared with it in every setting; leave them out",
        ),
        ({"settings": {"fast": {"learners": 16}}}, r"settings\.fast\.learners: has no effect, .*compare\.learners"),
        ({"baseline": "batsh"}, r"compare: baseline: 'batsh' is no arm; did you mean 'batch'\?"),
        ({"engine": "processes", "jobs": 2}, r"jobs: real learners need the machine to themselves"),
    ],
)
def test_a_comparison_that_cannot_be_run_is_refused_before_anything_starts(
    compared: Tree, section: Any, problem: str
) -> None:
    """The message has the wrong key, and the nearest name."""
    if isinstance(section, dict):
        section = COMPARED | section
    tree = {key: value for key, value in compared.items() if key != "compare"}
    with pytest.raises(ConfigError, match=problem):
        check_comparison(tree if section is None else {**tree, "compare": section}, "c.yaml")


def test_sets_that_a_comparison_needs_are_required(compared: Tree) -> None:
    """Rates need a validation set, and a word error rate needs it or a test set."""
    compared["data"] |= {"valid": None}
    with pytest.raises(ConfigError, match=r"data\.valid: rates are chosen on a validation set"):
        check_comparison(compared, "c.yaml")
    compared["compare"] = {"arms": {"adpsgd": {}}}
    check_comparison(compared, "c.yaml")
    compared["data"] |= {"test": []}
    with pytest.raises(ConfigError, match=r"data\.test: a comparison needs a test set or a validation set"):
        check_comparison(compared, "c.yaml")


def test_cells_in_the_order_of_their_seeds_keep_equal_mini_batches_together(compared: Tree) -> None:
    """A process then loads each mini-batch once."""
    from starling.comparing.compare import _Cells

    subject = check_comparison(compared, "c.yaml")
    ordered = _Cells(subject, print, lambda *what: None)._ordered(cells(subject))  # type: ignore[arg-type]
    assert sorted(cell.name for cell in ordered) == sorted(cell.name for cell in cells(subject))
    for what in (lambda cell: cell.seed, subject.batches_key):
        values = [what(cell) for cell in ordered]
        assert len(dict.fromkeys(values)) == 1 + sum(a != b for a, b in pairwise(values))


def test_a_bad_comparison_is_one_message_on_the_command_line(
    compared: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no traceback; a key=value may come first, because the study's own recipe is the default."""
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(yaml.safe_dump(compared), encoding="utf-8")
    for command in (["compare"], ["study", "staleness"]):
        result = CliRunner().invoke(app, [*command, "c.yaml", "compare.seeds=[]", "compare.jobs=0"])
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.startswith("error: comparison c.yaml: 2 problems\n")
    result = CliRunner().invoke(app, ["study", "staleness", "compare.seeds=[]"])
    assert result.stderr.startswith("error: comparison staleness: a problem\n")
    options = ["--strategies", "adpsgd,alreduce", "--learners", "2,x", "--rates", "fast", "--jobs", "0"]
    result = CliRunner().invoke(app, ["compare", "c.yaml", *options])
    for problem in ("compare.learners.1: ", "compare.rates.0: 'fast' is neither", "compare.jobs: "):
        assert problem in result.stderr
    result = CliRunner().invoke(app, ["compare", "c.yaml", "--strategies", "adpsgd,alreduce"])
    assert "compare.arms.alreduce: strategy: 'alreduce' is unknown; did you mean 'allreduce'?" in result.stderr
