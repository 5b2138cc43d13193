"""Which checkpoints stay: the newest, and always one that is whole and finite."""

import json
from pathlib import Path

import pytest
import torch

from starling.checkpoint.files import checkpoint_name
from starling.checkpoint.reader import checkpoints_in, is_finite, latest, load
from starling.errors import CheckpointError
from starling.workload import Position, Ticket
from tests.checkpoint.test_checkpoints import manifest_of, save_all, state, writer

NAN = [float("nan"), 1.0, 2.0]


def save(experiment: Path, step: int, weights: list[float] | None = None, keep: int = 1) -> Path:
    """A checkpoint of one learner."""
    saved = writer(experiment, keep).save(state(0, 1, Ticket(1, 0, step), weights))
    assert saved is not None
    return saved.folder


def names(experiment: Path) -> list[str]:
    """The checkpoints, oldest first."""
    return [path.name for path in checkpoints_in(experiment / "checkpoints")]


def damage(folder: Path) -> None:
    """Flip a byte that safetensors does not notice."""
    path = folder / "learner-0.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_the_newest_finite_checkpoint_stays_when_the_weights_are_not_finite_any_more(tmp_path: Path) -> None:
    """However many come after it, until one is finite again."""
    save(tmp_path, 8)
    save(tmp_path, 16)
    for step in (24, 32, 40):
        save(tmp_path, step, NAN)
        assert names(tmp_path) == ["step-00000016", f"step-{step:08d}"]
    save(tmp_path, 48)
    assert names(tmp_path) == ["step-00000048"]


def test_an_optimizer_that_is_not_finite_counts_too(tmp_path: Path) -> None:
    """Its weights may be finite for one step more."""
    save(tmp_path, 8)
    broken = state(0, 1, Ticket(1, 0, 16))
    broken.optimizer["state"][0]["momentum_buffer"][1] = float("inf")
    writer(tmp_path, keep=1).save(broken)
    assert names(tmp_path) == ["step-00000008", "step-00000016"]


def test_a_damaged_checkpoint_is_not_one_to_go_back_to(tmp_path: Path) -> None:
    """The newest finite one that is whole stays, although a damaged one is newer."""
    save(tmp_path, 8, keep=2)
    damage(save(tmp_path, 16, keep=2))
    save(tmp_path, 24, NAN, keep=2)
    assert names(tmp_path) == ["step-00000008", "step-00000016", "step-00000024"]


def test_where_nothing_older_is_whole_there_is_nothing_to_spare(tmp_path: Path) -> None:
    """A damaged checkpoint does not count, also when it is the only older one."""
    damage(save(tmp_path, 8))
    save(tmp_path, 16, NAN)
    assert names(tmp_path) == ["step-00000016"]


def test_a_checkpoint_of_an_older_version_is_not_one_to_go_back_to(tmp_path: Path) -> None:
    """It cannot be resumed from, so it does not keep a finite one from being spared."""
    save(tmp_path, 8, keep=3)
    folder = save(tmp_path, 16, keep=3)
    manifest = manifest_of(folder)
    (folder / "manifest.json").write_text(json.dumps({**manifest, "format": 5}))
    assert not is_finite(folder)
    save(tmp_path, 24, NAN, keep=1)
    assert names(tmp_path) == ["step-00000008", "step-00000024"]


def test_one_learner_that_is_not_finite_is_enough(tmp_path: Path) -> None:
    """All of them go on from a checkpoint."""
    save_all(tmp_path, 2, Ticket(1, 0, 8), keep=1)
    together = writer(tmp_path, keep=1)
    together.save(state(0, 2, Ticket(1, 0, 16), NAN))
    together.save(state(1, 2, Ticket(1, 0, 16)))
    assert names(tmp_path) == ["step-00000008", "step-00000016"]


def test_checkpoints_are_ordered_by_number(tmp_path: Path) -> None:
    """Beyond 10^8 steps names grow, and would sort wrongly as text; keeping and resuming follow the number."""
    steps = (99_999_992, 100_000_000, 100_000_008, 1_000_000_000)
    for step in steps:
        save(tmp_path, step, keep=3)
    assert names(tmp_path) == ["step-100000000", "step-100000008", "step-1000000000"]
    assert latest(tmp_path).name == "step-1000000000"


def test_names_stay_as_they_were() -> None:
    """Eight digits at least, and what is unfinished."""
    assert checkpoint_name(Position(Ticket(0, 8, 8))) == "step-00000008"
    assert checkpoint_name(Position(Ticket(0, 9, 9), (Ticket(0, 3, 3),))) == "step-00000008+1"


def test_a_folder_of_another_name_is_neither_removed_nor_the_newest(tmp_path: Path) -> None:
    """Somebody put the best one aside."""
    folder = save(tmp_path, 8)
    folder.rename(folder.with_name("best"))
    for step in (16, 24):
        save(tmp_path, step)
    assert names(tmp_path) == ["step-00000024"]
    assert load(folder.with_name("best")).manifest.position.num_done == 8


def test_a_damaged_checkpoint_names_the_older_one_that_is_whole(tmp_path: Path) -> None:
    """Nobody goes on from it without being asked: the run would do again what was done."""
    folders = [save(tmp_path, step, keep=4) for step in (8, 16, 24, 32)]
    for folder in folders[2:]:
        damage(folder)
    with pytest.raises(CheckpointError) as caught:
        load(latest(tmp_path))
    assert f"{folders[3]}/learner-0.safetensors is damaged" in str(caught.value)
    assert f"{folders[1]} is intact: to continue from it, move {folders[3]} away first" in str(caught.value)
    damage(folders[0])
    damage(folders[1])
    with pytest.raises(CheckpointError, match=r"none of the 3 older checkpoints in .* is intact"):
        load(latest(tmp_path))


def test_the_finite_state_survives_to_the_bit(tmp_path: Path) -> None:
    """What retention spares is what was saved."""
    save(tmp_path, 8)
    save(tmp_path, 16, NAN)
    first = checkpoints_in(tmp_path / "checkpoints")[0]
    assert torch.equal(load(first).learner(0).weights, state(0, 1, Ticket(1, 0, 8)).weights)
