"""An experiment's folder is claimed once, and an earlier run in it is never lost by accident."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from starling.checkpoint.reader import load
from starling.checkpoint.state import LearnerState
from starling.checkpoint.writer import CheckpointWriter
from starling.errors import CheckpointError, ConfigError, Stopped
from starling.experiment.claim import check_claim, check_writable, claim_folder, describe_environment, resolve_resume
from starling.experiment.folder import ExperimentFolder
from starling.experiment.launching import resumable
from starling.speech.recipe import Recipe, check_recipe, fingerprints, load_recipe
from starling.speech.task import SPEECH
from starling.workload import Position, Ticket
from tests.mounts import run_with

Tree = dict[str, Any]


@pytest.fixture
def tree(tree: Tree) -> Tree:
    """A recipe with some budget left at any checkpoint of these tests."""
    return tree | {"budget": {"epochs": 100}}


def save(recipe: Recipe, position: Ticket, world: int = 2, weight: float = 0.0) -> None:
    """Write a checkpoint in the experiment of a recipe."""
    arrived: list[str] = []

    def arrive(name: str) -> int:
        arrived.append(name)
        return len(arrived)

    writer = CheckpointWriter(
        recipe.folder / "checkpoints",
        arrive,
        lambda folder, weights, buffers: folder.mkdir(),
        fingerprints(recipe),
        sync_group_size=recipe.sync_group_size,
    )
    for rank in range(world):
        weights, strategy = torch.full((3,), weight), recipe.strategy.described
        writer.save(LearnerState(rank, world, Position(position), 0.0, weights, {}, {}, of_strategy=strategy))


def test_the_resolved_recipe_is_in_the_folder(tree: Tree) -> None:
    """It has every default written out; loading it gives the same recipe."""
    recipe = check_recipe(tree, "r.yaml")
    folder = claim_folder(recipe, print)
    assert load_recipe(folder.config) == recipe
    assert yaml.safe_load(folder.config.read_text())["features"]["frame_shift"] == 0.01


def test_an_earlier_run_is_moved_aside_and_named(tree: Tree) -> None:
    """Training under the same name again loses nothing, and says where the earlier run is."""
    recipe = check_recipe(tree, "r.yaml")
    said: list[str] = []
    claim_folder(recipe, said.append)
    claim_folder(recipe, said.append)  # nothing was trained yet: there is nothing to keep
    assert said == []
    for number in (1, 2):
        save(recipe, Ticket(number, 0, 8 * number))
        claim_folder(recipe, said.append)
        aside = recipe.folder.with_name(f"{recipe.name}.{number}")
        assert (aside / "checkpoints" / f"step-{8 * number:08d}").is_dir()
        assert said[-1] == f"{recipe.folder} held an earlier run, which is now in {aside}"
    assert list((recipe.folder / "checkpoints").iterdir()) == []


def test_overwriting_removes_only_our_own_files(tree: Tree) -> None:
    """Notes that a user left in the folder stay."""
    recipe = check_recipe(tree, "r.yaml")
    claim_folder(recipe, print)
    save(recipe, Ticket(1, 0, 8))
    (recipe.folder / "notes.txt").write_text("mine")
    claim_folder(check_recipe({**tree, "overwrite": True}, "r.yaml"), print)
    assert list((recipe.folder / "checkpoints").iterdir()) == []
    assert (recipe.folder / "notes.txt").read_text() == "mine"


def test_resuming_finds_the_newest_checkpoint(tree: Tree) -> None:
    """An experiment's folder stands for its newest checkpoint; the recipe then names that one."""
    recipe = check_recipe(tree, "r.yaml")
    claim_folder(recipe, print)
    save(recipe, Ticket(1, 0, 8))
    save(recipe, Ticket(2, 0, 16))
    resumed = resolve_resume(SPEECH, check_recipe({**tree, "resume": str(recipe.folder)}, "r.yaml"))
    assert resumed.resume == recipe.folder / "checkpoints" / "step-00000016"
    claim_folder(resumed, print)
    assert resumed.resume.is_dir()


def test_a_resume_with_another_strategy_or_number_of_learners_reports_the_consequences(tree: Tree) -> None:
    """One line lists what has changed; there is none if each learner continues from its own state. Another says where
    the run resumes."""
    recipe = check_recipe({**tree, "learners": 2, "strategy": "diloco"}, "r.yaml")
    claim_folder(recipe, print)
    save(recipe, Ticket(1, 0, 8))
    given = {**tree, "learners": 2, "strategy": "diloco", "resume": str(recipe.folder)}
    for changes, expected in (
        ({}, ""),
        ({"strategy": "adpsgd"}, "resume: diloco saved it, and this run trains with adpsgd; all learners begin with"),
        ({"learners": 3}, "resume: 2 learners saved it, and this run has 3; all learners begin with the mean"),
        ({"strategy": {"name": "diloco", "every": 7}}, "saved it with other options (every=100, now 7)"),
    ):
        said: list[str] = []
        claim_folder(resolve_resume(SPEECH, check_recipe(given | changes, "r.yaml")), said.append)
        *changed, place = said
        assert len(changed) == bool(expected) and all(expected in line for line in changed)
        assert place == f"resume: from {recipe.folder}/checkpoints/step-00000008, in epoch 2, after 8 mini-batches"


def test_resuming_from_an_earlier_checkpoint_must_not_mix_two_runs(tree: Tree) -> None:
    """Later checkpoints of a different past would be taken for this run's."""
    recipe = check_recipe(tree, "r.yaml")
    claim_folder(recipe, print)
    save(recipe, Ticket(1, 0, 8))
    save(recipe, Ticket(2, 0, 16))
    earlier = recipe.folder / "checkpoints" / "step-00000008"
    with pytest.raises(ConfigError, match=r"later than .*step-00000016"):
        claim_folder(resolve_resume(SPEECH, check_recipe({**tree, "resume": str(earlier)}, "r.yaml")), print)
    elsewhere = resolve_resume(SPEECH, check_recipe({**tree, "resume": str(earlier), "name": "other"}, "r.yaml"))
    assert claim_folder(elsewhere, print).path.name == "other"


def test_a_run_resumed_from_another_experiment_is_not_mixed_with_one_of_its_name(tree: Tree) -> None:
    """The earlier run is moved aside with its record of what was seen; the record of the other experiment is taken
    over."""
    first, second = (check_recipe({**tree, "name": name}, "r.yaml") for name in ("first", "second"))
    for recipe, seen in ((first, "theirs"), (second, "mine")):
        folder = claim_folder(recipe, print)
        (folder.seen / "from-00000000" / "learner-0.tsv").write_text(seen)
        save(recipe, Ticket(1, 0, 8))
    resumed = resolve_resume(SPEECH, check_recipe({**tree, "name": "second", "resume": str(first.folder)}, "r.yaml"))
    folder = claim_folder(resumed, print)
    assert (folder.seen / "from-00000000" / "learner-0.tsv").read_text() == "theirs"
    assert (second.exp / "second.1" / "seen" / "from-00000000" / "learner-0.tsv").read_text() == "mine"
    assert not list(folder.checkpoints.glob("step-*"))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            {"model": {"preset": "small"}},
            "another model than this run asks for: model.preset=tiny \\(now small\\)",
        ),
        (
            {"seed": 5, "batches": {"max_duration": 9}},
            "another batches, seed than this run asks for: batches.max_duration=5.0 \\(now 9.0\\), seed=1 \\(now 5\\);",
        ),
        ({"resume": "nowhere"}, "nowhere: no such folder"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(tree: Tree, change: Tree, problem: str) -> None:
    """The error lists the sections that differ, before any learner starts."""
    recipe = check_recipe(tree, "r.yaml")
    claim_folder(recipe, print)
    save(recipe, Ticket(1, 3, 11))
    with pytest.raises(CheckpointError, match=problem):
        resolve_resume(SPEECH, check_recipe({**tree, "resume": str(recipe.folder), **change}, "r.yaml"))


@pytest.mark.parametrize("change", [{"learners": 3}, {"strategy": "adpsgd"}, {"learners": 5, "strategy": "adpsgd"}])
def test_learners_and_the_strategy_may_change_in_mid_epoch(tree: Tree, change: Tree) -> None:
    """The contents of a mini-batch depend on neither."""
    recipe = check_recipe(tree, "r.yaml")
    claim_folder(recipe, print)
    save(recipe, Ticket(1, 3, 11))
    resumed = resolve_resume(SPEECH, check_recipe({**tree, "resume": str(recipe.folder), **change}, "r.yaml"))
    assert load(resumed.resume).manifest.next_ticket.index == 3


def test_the_budget_and_the_learning_rate_may_change_in_a_resume(tree: Tree) -> None:
    """They belong to the rest of the run."""
    recipe = check_recipe(tree, "r.yaml")
    claim_folder(recipe, print)
    save(recipe, Ticket(1, 3, 11))
    change = {"budget": {"epochs": 7}, "optimizer": {"lr": 0.5}, "resume": str(recipe.folder)}
    assert resolve_resume(SPEECH, check_recipe({**tree, **change}, "r.yaml")).budget.epochs == 7


def test_a_folder_that_cannot_be_made_is_an_error_at_the_start(tree: Tree, tmp_path: Path) -> None:
    """The error does not wait for the first checkpoint."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        claim_folder(check_recipe({**tree, "exp": str(tmp_path / "file")}, "r.yaml"), print)


def test_checkpoints_that_cannot_be_written_are_an_error_at_the_start(tree: Tree) -> None:
    """Here, a file is in the place of their folder."""
    recipe = check_recipe(tree, "r.yaml")
    recipe.folder.mkdir(parents=True)
    (recipe.folder / "checkpoints").write_text("")
    with pytest.raises(ConfigError, match="songs: cannot be written"):
        claim_folder(recipe, print)


def test_a_folder_is_tested_by_writing_into_it(tmp_path: Path) -> None:
    """Permission bits do not bind root, but nothing can be created in `/proc`; a usable folder stays empty."""
    check_writable(tmp_path / "checkpoints")
    assert list((tmp_path / "checkpoints").iterdir()) == []
    with pytest.raises(OSError, match="/proc/checkpoints"):
        check_writable(Path("/proc/checkpoints"))


@pytest.mark.wide
def test_a_resume_on_a_disk_that_is_read_only_is_an_error_at_the_start(tree: Tree) -> None:
    """The error comes before anything is prepared: the checkpoints can be read, but none can be added."""
    recipe = check_recipe(tree, "r.yaml")
    folder = claim_folder(recipe, print)
    save(recipe, Ticket(1, 0, 8))
    here = folder.checkpoints
    read_only = f"mount --bind {here} {here} && mount -o remount,ro,bind {here}"
    said = run_with(read_only, f"import {__name__} as me; me.go_on({str(folder.config)!r})")
    assert f"{here}: cannot be written ([Errno 30] Read-only file system" in said


def go_on(config: str) -> None:
    """Resume from the only checkpoint of a recipe; the error is printed."""
    recipe = load_recipe(Path(config))
    with pytest.raises(ConfigError) as caught:
        check_claim(recipe.model_copy(update={"resume": recipe.folder / "checkpoints" / "step-00000008"}))
    sys.stdout.write(f"{caught.value}\n")


def test_only_a_later_number_is_a_later_checkpoint(tree: Tree) -> None:
    """As text, 100000000 sorts before 99999992."""
    recipe = check_recipe(tree, "r.yaml")
    claim_folder(recipe, print)
    save(recipe, Ticket(1, 0, 99_999_992))
    save(recipe, Ticket(2, 0, 100_000_000))
    first, second = (recipe.folder / "checkpoints" / f"step-{step}" for step in ("99999992", "100000000"))
    check_claim(recipe.model_copy(update={"resume": second}))
    with pytest.raises(ConfigError, match=r"later than .*step-99999992, such as step-100000000"):
        check_claim(recipe.model_copy(update={"resume": first}))


def test_resuming_from_weights_that_are_not_finite_is_an_error(tree: Tree) -> None:
    """However many such checkpoints came last, the newest finite one still exists, and it is named."""
    recipe = check_recipe(tree, "r.yaml")
    claim_folder(recipe, print)
    save(recipe, Ticket(1, 0, 8))
    for step in (16, 24, 32):
        save(recipe, Ticket(1, step, step), weight=float("nan"))
    good, *_, last = sorted((recipe.folder / "checkpoints").iterdir())
    with pytest.raises(CheckpointError) as caught:
        resolve_resume(SPEECH, check_recipe({**tree, "resume": str(recipe.folder)}, "r.yaml"))
    message = f"{last}: some of its numbers are not finite; {good} is intact and finite: to continue from it"
    assert message in str(caught.value)
    resolve_resume(SPEECH, check_recipe({**tree, "resume": str(good)}, "r.yaml"))


def test_an_earlier_run_is_kept_whatever_its_checkpoint_is_called(tree: Tree) -> None:
    """A user put the best one aside, and the others are gone."""
    recipe = check_recipe(tree, "r.yaml")
    claim_folder(recipe, print)
    save(recipe, Ticket(1, 0, 8))
    (recipe.folder / "checkpoints" / "step-00000008").rename(recipe.folder / "checkpoints" / "best")
    claim_folder(recipe, print)
    assert (recipe.folder.with_name(f"{recipe.name}.1") / "checkpoints" / "best").is_dir()


def test_ten_runs_killed_in_a_row_do_not_stop_the_eleventh(tree: Tree) -> None:
    """Each had started a checkpoint, and removed another; the folder is still claimed, and clean."""
    recipe = check_recipe(tree, "r.yaml")
    claim_folder(recipe, print)
    save(recipe, Ticket(1, 0, 8))
    resumed = resolve_resume(SPEECH, check_recipe({**tree, "resume": str(recipe.folder)}, "r.yaml"))
    for number in range(10):
        folder = claim_folder(resumed, print)
        for name in (f".step-{16 + number:08d}.partial", ".step-00000007.partial", ".writable.partial"):
            (folder.checkpoints / name / "model").mkdir(parents=True)
            (folder.checkpoints / name / "learner-0.safetensors").write_bytes(b"half of it")
    folder = claim_folder(resumed, print)
    assert [path.name for path in folder.checkpoints.iterdir()] == ["step-00000008"]


def test_the_environment_is_described_without_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has versions and the machine, but no value of a variable."""
    monkeypatch.setenv("STARLING_SECRET", "hunter2")
    text = describe_environment()
    assert "torch 2." in text
    assert f"cores {os.cpu_count()}\n" in text
    assert "threads" not in text  # learners choose theirs later: see engine.threads
    assert "hunter2" not in text


@pytest.mark.parametrize("has_saved", [True, False])
def test_stopping_a_run_before_its_first_checkpoint_says_that_there_is_none(has_saved: bool, tmp_path: Path) -> None:
    """It has the signal's exit code, and no word about resuming."""
    error = resumable(Stopped("stopped by SIGTERM", 15, has_saved), ExperimentFolder(tmp_path / "exp"), "a command")
    assert str(error) == "stopped by SIGTERM; there is no checkpoint"
    assert error.exit_code == 143
    assert not getattr(error, "__notes__", [])


def test_a_checkpoint_of_other_data_names_the_key_that_differs(tree: Tree) -> None:
    """The message has both values."""
    recipe = check_recipe(tree, "r.yaml")
    claim_folder(recipe, print)
    save(recipe, Ticket(1, 0, 8))
    tree["data"]["text"] = "lower"
    with pytest.raises(CheckpointError, match=r"another data than .*: data\.text=upper \(now lower\);"):
        resolve_resume(SPEECH, check_recipe({**tree, "name": "other", "resume": str(recipe.folder)}, "r.yaml"))


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        ({"epochs": 1}, "it has reached 1 epochs, and budget.epochs is 1; raise budget.epochs, or score it with"),
        ({"epochs": 9, "steps": 7}, "it has reached 8 steps, and budget.steps is 7; raise budget.steps"),
        ({"minutes": 0}, "it has reached 0 minutes, and budget.minutes is 0; raise budget.minutes"),
    ],
)
def test_a_resume_without_budget_says_what_was_reached_and_what_to_raise(tree: Tree, budget: Tree, said: str) -> None:
    """It does not end successfully without a step; nothing changes."""
    recipe = check_recipe({**tree, "budget": {"epochs": 2}}, "r.yaml")
    claim_folder(recipe, print)
    save(recipe, Ticket(1, 0, 8))
    before = sorted(recipe.folder.rglob("*"))
    with pytest.raises(ConfigError) as caught:
        resolve_resume(SPEECH, check_recipe({**tree, "resume": str(recipe.folder), "budget": budget}, "r.yaml"))
    assert said in str(caught.value)
    assert sorted(recipe.folder.rglob("*")) == before
    resolve_resume(SPEECH, check_recipe({**tree, "resume": str(recipe.folder), "budget": {"epochs": 2}}, "r.yaml"))
