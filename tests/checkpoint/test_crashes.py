"""A crash or a full disk at any step of saving leaves the old checkpoint or the new one, whole."""

import errno
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from starling.checkpoint.files import remove_partial
from starling.checkpoint.reader import checkpoints_in, latest, load
from starling.checkpoint.writer import CheckpointWriter
from starling.errors import CheckpointError
from starling.workload import Ticket
from tests.checkpoint.steps import Steps
from tests.checkpoint.test_checkpoints import save_all, state, write_model, writer
from tests.mounts import run_with, small_disk

OLD, NEW = Ticket(1, 0, 8), Ticket(2, 0, 16)
ROOT = Path(__file__).resolve().parents[2]


def check_whole(experiment: Path) -> str:
    """Every checkpoint that is there loads, bit by bit; the name of the newest."""
    for folder in checkpoints_in(experiment / "checkpoints"):
        checkpoint = load(folder)
        for rank in range(2):
            expected, found = state(rank, 2, checkpoint.manifest.next_ticket), checkpoint.learner(rank)
            assert torch.equal(found.weights, expected.weights)
            momentum = [each.optimizer["state"][0]["momentum_buffer"] for each in (found, expected)]
            assert torch.equal(*momentum)
    return latest(experiment).name


def left_over(experiment: Path) -> list[str]:
    """What lies beside the checkpoints."""
    return sorted(path.name for path in (experiment / "checkpoints").iterdir() if path.name.startswith("."))


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Experiments whose second save was killed at its first, second, … step; the last one came to its end."""
    folder = tmp_path_factory.mktemp("crashes")
    save_all(folder / "earlier", 2, OLD, keep=1)
    command = [sys.executable, "-m", "tests.checkpoint.saving_process", str(folder)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert run.returncode == 0, run.stderr
    return sorted((path for path in folder.iterdir() if path.name.isdecimal()), key=lambda path: int(path.name))


@pytest.mark.wide
def test_a_crash_at_any_step_leaves_the_old_or_the_new_state_whole(crashed: list[Path]) -> None:
    """Killed at every write, sync, rename and removal: first it is the old one that `latest` names, then the new."""
    names = [check_whole(experiment) for experiment in crashed]
    assert len(names) > 40
    assert names == sorted(names)
    assert set(names) == {"step-00000008", "step-00000016"}
    assert any(left_over(experiment) for experiment in crashed)
    assert left_over(crashed[-1]) == []


@pytest.mark.wide
def test_a_run_after_a_crash_at_any_step_saves_as_if_nothing_had_happened(crashed: list[Path], tmp_path: Path) -> None:
    """What the crash left is removed at the start, and is in nobody's way."""
    for experiment in crashed:
        again = tmp_path / experiment.name
        shutil.copytree(experiment, again)
        remove_partial(again / "checkpoints")
        if latest(again).name == "step-00000008":
            save_all(again, 2, NEW, keep=1)
        else:
            save_all(again, 2, Ticket(3, 0, 24), keep=1)
        assert check_whole(again) in ("step-00000016", "step-00000024")
        assert len(list((again / "checkpoints").iterdir())) == 1


@pytest.mark.wide
def test_ten_runs_killed_in_a_row_do_not_stop_the_eleventh(crashed: list[Path], tmp_path: Path) -> None:
    """What killed saves left, ten times over, is removed at the start and is in nobody's way."""
    experiment = tmp_path / "experiment"
    half_written = [each for each in crashed if left_over(each)]
    shutil.copytree(half_written[0], experiment)
    for number in range(10):
        source = half_written[number * len(half_written) // 10] / "checkpoints"
        for name in left_over(source.parent):
            shutil.rmtree(experiment / "checkpoints" / name, ignore_errors=True)
            shutil.copytree(source / name, experiment / "checkpoints" / f".killed-{number}-{name[1:]}")
    assert len(left_over(experiment)) >= 10
    remove_partial(experiment / "checkpoints")
    save_all(experiment, 2, NEW, keep=1)
    assert check_whole(experiment) == "step-00000016"
    assert left_over(experiment) == []


def test_everything_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that loses its power keeps what was synced, and a name may reach the disk before what it names."""
    synced: dict[int, int] = {}
    published: list[str] = []
    fsync, rename = os.fsync, os.rename

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        found = os.fstat(descriptor)
        synced[found.st_ino] = found.st_mtime_ns

    def checked(source: Path, target: Path) -> None:
        for path in (source, *Path(source).rglob("*")):
            assert synced.get(path.stat().st_ino) == path.stat().st_mtime_ns, f"{path} was not synced as it is"
        published.append(Path(target).name)
        rename(source, target)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(os, "rename", checked)
    folder = save_all(tmp_path, 2, OLD).parent
    assert published == ["step-00000008"]
    assert synced[folder.stat().st_ino] == folder.stat().st_mtime_ns


def no_space() -> None:
    """What the system says."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def no_space_for_tensors() -> None:
    """What safetensors makes of it."""
    raise SafetensorError("I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize("fail", [no_space, no_space_for_tensors])
def test_a_disk_that_is_full_at_any_step_is_one_message_and_leaves_no_stub(fail: object, tmp_path: Path) -> None:
    """What is needed and what is free; the checkpoint before stays as it is, and with room the save succeeds."""
    save_all(tmp_path / "earlier", 1, OLD, keep=1)
    outcomes: Counter[str] = Counter()
    for step in range(1, 1000):
        experiment = tmp_path / str(step)
        shutil.copytree(tmp_path / "earlier", experiment)
        steps = Steps(step, fail, calls=("mkdir", "fsync", "rename"))  # type: ignore[arg-type]
        try:
            with steps.counted():
                save_all(experiment, 1, NEW, keep=1)
        except CheckpointError as error:
            assert str(error).startswith(f"{experiment}/checkpoints/step-00000016: disk full: needs ")
            assert " bytes, " in str(error) and " free; make room, then resume" in str(error)
            assert left_over(experiment) == []
            outcomes[latest(experiment).name] += 1
            load(latest(experiment))
            if latest(experiment).name == "step-00000008":
                save_all(experiment, 1, NEW, keep=1)
        else:
            break
    assert steps.num_done < step
    assert outcomes["step-00000008"] > 20 and set(outcomes) == {"step-00000008", "step-00000016"}


def test_a_learner_without_room_leaves_what_others_have_written(tmp_path: Path) -> None:
    """They may still be writing; its own part goes."""
    together = writer(tmp_path)
    together.save(state(0, 2, OLD))
    with Steps(2, no_space, calls=()).counted(), pytest.raises(CheckpointError, match="disk full: needs"):
        together.save(state(1, 2, OLD))
    partial = tmp_path / "checkpoints" / ".step-00000008.partial"
    assert sorted(path.name for path in partial.iterdir()) == ["learner-0.json", "learner-0.safetensors"]


def test_too_little_room_is_found_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The states and the model are at least what is needed; a file system that does not know its size is tried."""
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=40))
    with pytest.raises(CheckpointError, match=r"step-00000008: disk full: needs 92 bytes, 40 free; make room"):
        writer(tmp_path).save(state(0, 1, OLD))
    assert not (tmp_path / "checkpoints").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(total=0, free=0))
    assert writer(tmp_path).save(state(0, 1, OLD)) is not None


def test_a_disk_that_fails_for_good_is_one_message(tmp_path: Path) -> None:
    """Systems make a disk with faults read-only: what was written cannot be removed then either."""
    together = writer(tmp_path)

    def fails() -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    class Failing(Steps):
        def _step(self) -> None:
            self.num_done += 1
            if self.num_done >= 4:
                fails()

    with (
        Failing(0, fails).counted(),
        pytest.raises(CheckpointError, match=r"step-00000008: a checkpoint cannot be written \(\[Errno 30\]"),
    ):
        together.save(state(0, 1, OLD))


def test_a_quota_that_is_used_up_is_a_full_disk(tmp_path: Path) -> None:
    """Not a fault of the disk."""

    def over_quota() -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with Steps(2, over_quota, calls=()).counted(), pytest.raises(CheckpointError, match="disk full: needs"):
        writer(tmp_path).save(state(0, 1, OLD))


@pytest.mark.wide
def test_a_disk_that_is_really_full_leaves_no_stub(tmp_path: Path) -> None:
    """A file system of 256 KiB, all but filled: in the first file, and in the model that is written last."""
    (tmp_path / "disk").mkdir()
    disk = tmp_path / "disk"
    said = run_with(small_disk(disk, "256k"), f"import {__name__} as me; me.fill_a_disk({str(disk)!r})")
    assert said.count("disk full: needs") == 2, said


def fill_a_disk(disk: str) -> None:
    """Save on a small disk that something else fills more and more, until it goes; the errors are printed."""
    experiment = Path(disk)
    save_all(experiment, 1, OLD, keep=1)
    size, number = 32 * 1024, 20_000  # a state of 160 kB and a model of 80 kB: more than is free
    together = CheckpointWriter(experiment / "checkpoints", lambda name: 1, write_model, {"model": "m"}, keep=1)
    for weights in (number, size // 4):
        if weights != number:  # room for a learner's part, and for half of the model
            free = shutil.disk_usage(disk).free
            (experiment / "filling").write_bytes(bytes(free - 2 * size - size // 2 - 12 * 1024))
        large = state(0, 1, NEW, None)
        large = type(large)(0, 1, large.position, 0.0, torch.ones(weights), {}, {"more": torch.ones(weights)})
        unknown = shutil.disk_usage(disk)._replace(total=0)  # so that nobody sees it coming
        shutil.disk_usage, real = (lambda path, unknown=unknown: unknown), shutil.disk_usage
        try:
            together.save(large)
        except CheckpointError as error:
            sys.stdout.write(f"{error}\n")
        finally:
            shutil.disk_usage = real
        assert left_over(experiment) == []
        assert check_one(experiment) == "step-00000008"


def check_one(experiment: Path) -> str:
    """The checkpoint of one learner loads; its name."""
    newest = load(latest(experiment))
    assert torch.equal(newest.learner(0).weights, state(0, 1, OLD).weights)
    return newest.folder.name
