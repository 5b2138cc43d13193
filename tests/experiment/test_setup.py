"""A run is made ready beside its folder, and takes the folder when nothing is wrong."""

from pathlib import Path
from typing import Any

import pytest

from starling.errors import ConfigError, DataError
from starling.experiment.recipe import Recipe, check_recipe
from starling.experiment.setup import make_ready
from starling.workload import Ticket
from tests.experiment.test_folder import save

Tree = dict[str, Any]


def trained(tree: Tree) -> Recipe:
    """A recipe that was made ready, with a checkpoint in its folder."""
    recipe = check_recipe(tree, "r.yaml")
    make_ready(recipe, lambda line: None)
    save(recipe, Ticket(1, 0, 8))
    return recipe


def contents(folder: Path) -> list[str]:
    """All that lies in a folder, by relative path."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    "change", [{"learners": 25}, {"tokens": {"alphabet": "XYZ"}}], ids=["too many learners", "a small alphabet"]
)
def test_a_run_that_cannot_start_leaves_an_earlier_one_as_it_is(tree: Tree, change: Tree, overwrite: bool) -> None:
    """A slip on the command line costs nobody a trained model, and leaves nothing half-made beside it."""
    recipe = trained(tree)
    before = contents(recipe.exp)
    with pytest.raises(DataError):
        make_ready(check_recipe({**tree, **change, "overwrite": overwrite}, "r.yaml"), lambda line: None)
    assert contents(recipe.exp) == before


def test_a_run_that_cannot_start_leaves_no_folder(tree: Tree) -> None:
    """There is no experiment before its data is known to be good."""
    recipe = check_recipe({**tree, "learners": 25}, "r.yaml")
    with pytest.raises(DataError, match="at most 24 learners"):
        make_ready(recipe, lambda line: None)
    assert contents(recipe.exp) == []


def test_a_run_that_can_start_takes_the_place_of_an_earlier_one(tree: Tree) -> None:
    """With what was made ready and nothing of the making; the earlier run is moved aside."""
    recipe = trained(tree)
    folder = make_ready(recipe, lambda line: None)
    assert sorted(path.name for path in folder.path.iterdir()) == [
        "checkpoints",
        "config.yaml",
        "env.txt",
        "initial",
        "seen",
    ]
    assert sorted(path.name for path in recipe.exp.iterdir()) == ["songs", "songs.1"]


def test_a_resumed_run_keeps_its_checkpoints_and_is_made_ready_anew(tree: Tree) -> None:
    """What CTC cannot align now is listed, whatever was listed before."""
    recipe = trained(tree)
    stale = recipe.folder / "too_short.tsv"
    stale.write_text("id\tframes\tneeded\nsong-1\t1\t2\n")
    checkpoint = recipe.folder / "checkpoints" / "step-00000008"
    folder = make_ready(recipe.model_copy(update={"resume": checkpoint}), lambda line: None)
    assert checkpoint.is_dir()
    assert (folder.initial / "config.json").is_file()
    assert not stale.exists()


def test_a_folder_that_cannot_be_written_is_found_before_any_data_is_prepared(tree: Tree, tmp_path: Path) -> None:
    """Preparing a large corpus takes hours."""
    (tmp_path / "file").write_text("")
    tree["data"]["folder"] = str(tmp_path / "unprepared")
    with pytest.raises(ConfigError, match=r"file/songs: cannot be written"):
        make_ready(check_recipe({**tree, "exp": str(tmp_path / "file")}, "r.yaml"), lambda line: None)
    assert not (tmp_path / "unprepared").exists()


def test_a_resume_that_would_mix_two_runs_is_found_before_any_data_is_prepared(tree: Tree, tmp_path: Path) -> None:
    """As above."""
    recipe = trained(tree)
    save(recipe, Ticket(2, 0, 16))
    tree["data"]["folder"] = str(tmp_path / "unprepared")
    earlier = check_recipe(tree, "r.yaml").model_copy(
        update={"resume": recipe.folder / "checkpoints" / "step-00000008"}
    )
    with pytest.raises(ConfigError, match="later than"):
        make_ready(earlier, lambda line: None)
    assert not (tmp_path / "unprepared").exists()


def test_training_never_replaces_data_prepared_with_other_settings(tree: Tree, tmp_path: Path) -> None:
    """A slip on the command line costs neither the prepared sets nor the earlier run."""
    tree["data"]["folder"] = str(tmp_path / "data")
    recipe = trained(tree)
    before = contents(tmp_path / "data")
    tree["data"]["sampling_rate"] = 16000
    with pytest.raises(ConfigError, match=r"train, test prepared with data\.sampling_rate=8000 \(now 16000\)"):
        make_ready(check_recipe(tree, "r.yaml"), lambda line: None)
    assert contents(tmp_path / "data") == before
    assert contents(recipe.exp)[0].startswith("songs")
