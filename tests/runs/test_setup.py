"""A run is prepared beside its folder, and takes the folder if nothing is wrong."""

import re
from pathlib import Path
from typing import Any

import pytest

from starling.errors import ConfigError, DataError
from starling.experiment.claim import resolve_resume, set_up_and_claim
from starling.experiment.folder import ExperimentFolder
from starling.experiment.launching import crowding_warning
from starling.speech.recipe import Recipe, check_recipe
from starling.speech.task import SPEECH
from starling.speech.training.set_up import load_workload
from starling.workload import Ticket
from tests.runs.test_folder import save

Tree = dict[str, Any]


def trained(tree: Tree) -> Recipe:
    """A prepared recipe, with a checkpoint in its folder."""
    recipe = check_recipe(tree, "r.yaml")
    set_up_and_claim(SPEECH, recipe, lambda line: None)
    save(recipe, Ticket(1, 0, 8))
    return recipe


def contents(folder: Path) -> list[str]:
    """All contents of a folder, by relative path."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    "change", [{"learners": 25}, {"tokens": {"alphabet": "XYZ"}}], ids=["too many learners", "a small alphabet"]
)
def test_a_run_that_cannot_start_leaves_an_earlier_one_as_it_is(tree: Tree, change: Tree, overwrite: bool) -> None:
    """A mistake on the command line costs no trained model, and leaves nothing half-made beside it."""
    recipe = trained(tree)
    before = contents(recipe.exp)
    with pytest.raises(DataError):
        set_up_and_claim(SPEECH, check_recipe({**tree, **change, "overwrite": overwrite}, "r.yaml"), lambda line: None)
    assert contents(recipe.exp) == before


def test_a_run_that_cannot_start_leaves_no_folder(tree: Tree) -> None:
    """An experiment exists only once its data is known to be good."""
    recipe = check_recipe({**tree, "learners": 25}, "r.yaml")
    with pytest.raises(DataError, match="at most 24 learners"):
        set_up_and_claim(SPEECH, recipe, lambda line: None)
    assert contents(recipe.exp) == []


def test_a_run_that_can_start_takes_the_place_of_an_earlier_one(tree: Tree) -> None:
    """The folder has what was prepared and no temporary files; the earlier run is moved aside."""
    recipe = trained(tree)
    folder = set_up_and_claim(SPEECH, recipe, lambda line: None)
    assert sorted(path.name for path in folder.path.iterdir()) == [
        "checkpoints",
        "config.yaml",
        "env.txt",
        "initial",
        "seen",
    ]
    assert sorted(path.name for path in recipe.exp.iterdir()) == ["songs", "songs.1"]


def test_a_resumed_run_keeps_its_checkpoints_and_is_prepared_again(tree: Tree) -> None:
    """Utterances that CTC cannot align now are listed, whatever was listed before."""
    recipe = trained(tree)
    stale = recipe.folder / "too_short.tsv"
    stale.write_text("id\tframes\tneeded\nsong-1\t1\t2\n")
    checkpoint = recipe.folder / "checkpoints" / "step-00000008"
    folder = set_up_and_claim(SPEECH, recipe.model_copy(update={"resume": checkpoint}), lambda line: None)
    assert checkpoint.is_dir()
    assert (folder.initial / "config.json").is_file()
    assert not stale.exists()


def test_a_folder_that_cannot_be_written_is_found_before_any_data_is_prepared(tree: Tree, tmp_path: Path) -> None:
    """Preparing a large corpus takes hours."""
    (tmp_path / "file").write_text("")
    tree["data"]["folder"] = str(tmp_path / "unprepared")
    with pytest.raises(ConfigError, match=r"file/songs: cannot be written"):
        set_up_and_claim(SPEECH, check_recipe({**tree, "exp": str(tmp_path / "file")}, "r.yaml"), lambda line: None)
    assert not (tmp_path / "unprepared").exists()


def test_a_resume_that_would_mix_two_runs_is_found_before_any_data_is_prepared(tree: Tree, tmp_path: Path) -> None:
    """Preparing a large corpus takes hours."""
    recipe = trained(tree)
    save(recipe, Ticket(2, 0, 16))
    tree["data"]["folder"] = str(tmp_path / "unprepared")
    earlier = check_recipe(tree, "r.yaml").model_copy(
        update={"resume": recipe.folder / "checkpoints" / "step-00000008"}
    )
    with pytest.raises(ConfigError, match="later than"):
        set_up_and_claim(SPEECH, earlier, lambda line: None)
    assert not (tmp_path / "unprepared").exists()


def test_training_never_replaces_data_prepared_with_other_settings(tree: Tree, tmp_path: Path) -> None:
    """A mistake on the command line costs neither the prepared sets nor the earlier run."""
    tree["data"]["folder"] = str(tmp_path / "data")
    recipe = trained(tree)
    before, trained_before = contents(tmp_path / "data"), contents(recipe.exp)
    tree["data"]["sampling_rate"] = 16000
    with pytest.raises(ConfigError, match=r"train, test prepared with data\.sampling_rate=8000 \(now 16000\)"):
        set_up_and_claim(SPEECH, check_recipe(tree, "r.yaml"), lambda line: None)
    assert contents(tmp_path / "data") == before
    assert contents(recipe.exp) == trained_before


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            {},
            "warning: the schedule was made for a budget of epochs=2 and is stretched over this one: the learning rate "
            "changes from 0.00541 to 0.00963 now; to keep the earlier schedule, and its final value afterwards, resume "
            "with optimizer.schedule.budget.epochs=2",
        ),
        ({"schedule": {"warmup": 0.05, "budget": {"epochs": 2}}}, None),
    ],
    ids=["stretched", "kept"],
)
def test_a_resume_with_a_larger_budget_says_what_becomes_of_the_learning_rate(
    tree: Tree, override: Tree, said: str | None
) -> None:
    """The message says how to keep the earlier schedule, after which nothing is reported."""
    tree["budget"] = {"epochs": 2}
    recipe = check_recipe(tree, "r.yaml")
    set_up_and_claim(SPEECH, recipe, lambda line: None)
    num_batches = load_workload(recipe, ExperimentFolder(recipe.folder)).num_batches(0)
    save(recipe, Ticket(1, 0, num_batches))
    longer = {"optimizer": {"lr": 0.01, **override}, "budget": {"epochs": 6}, "resume": str(recipe.folder)}
    lines: list[str] = []
    set_up_and_claim(SPEECH, resolve_resume(SPEECH, check_recipe(tree | longer, "r.yaml")), lines.append)
    assert [line for line in lines if "schedule" in line] == ([said] if said else [])


def test_learners_that_outnumber_the_mini_batches_cause_a_warning(tree: Tree) -> None:
    """This holds even for a strategy that never waits."""
    lines: list[str] = []
    set_up_and_claim(SPEECH, check_recipe({**tree, "learners": 24, "strategy": "adpsgd"}, "r.yaml"), lines.append)
    (line,) = (line for line in lines if line.startswith("warning"))
    assert re.match(r"warning: an epoch has \d+ mini-batches for 24 learners, so some have none", line)


@pytest.mark.parametrize(("learners", "is_said"), [(64, True), (8, False), (2, False)])
def test_learners_that_far_outnumber_the_cores_cause_a_warning(learners: int, is_said: bool) -> None:
    """Here there are two cores."""
    line = crowding_warning(learners, 2)
    assert (line is not None) == is_said
    assert line is None or line.startswith("warning: 64 learners share 2 cores")
