"""Claims an experiment's folder for a run: checks it, and resumes, moves aside or removes an earlier run."""

import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path

from starling.checkpoint.files import (
    MANIFEST,
    PARTIAL,
    Manifest,
    checkpoint_name,
    read_manifest,
    remove_partial,
    sort_key,
)
from starling.checkpoint.reader import Checkpoint, checkpoints_in, latest, load, newest_good
from starling.errors import CheckpointError, ConfigError
from starling.experiment.folder import ExperimentFolder
from starling.experiment.record import begin_record
from starling.experiment.task import RunT, Task
from starling.files import sync, writing
from starling.recipe.run import RunConfig, dump_recipe
from starling.reporting.progress import Bars, Say
from starling.workload import Position

_OF_SET_UP = ("initial", "frames", "too_short.tsv")
"""Files that a task may write to the experiment's folder when it sets up a run."""
_PACKAGES = ("starling-asr", "torch", "numpy", "lhotse", "kaldialign", "sentencepiece", "safetensors")


def set_up_and_claim(task: Task[RunT], run: RunT, say: Say, bars: Bars | None = None) -> ExperimentFolder:
    """Let the task set up a run, and then claim the experiment's folder.

    Until the set-up has succeeded, its files are in `.<name>.partial` next to the experiment's folder. If it fails,
    they are removed and the experiment's folder is unchanged.

    Raises:
        ConfigError: `check_claim`, `claim_folder` or the task raises it.
        StarlingError: The task raises it.
    """
    check_claim(run)
    stage = ExperimentFolder(run.exp / f".{run.name}{PARTIAL}")
    with writing(run.folder):
        shutil.rmtree(stage.path, ignore_errors=True)  # a run that was killed during set-up may have left it
        stage.path.mkdir(parents=True)
    try:
        task.set_up(run, stage, say, bars)
        folder = claim_folder(run, say)
        for name in _OF_SET_UP:  # of an earlier run that is resumed here, nothing of it is left
            staged, final = stage.path / name, folder.path / name
            if final.is_dir():
                shutil.rmtree(final)
            final.unlink(missing_ok=True)
            if staged.exists():
                staged.rename(final)
    finally:
        shutil.rmtree(stage.path, ignore_errors=True)
    return folder


def resolve_resume(task: Task[RunT], run: RunT) -> RunT:
    """The run, with `resume` replaced by the checkpoint that it names, after checking that the run can resume from it.

    Raises CheckpointError if the checkpoint is missing, damaged, not finite, or of another model or data, and
    ConfigError if the budget is already spent.
    """
    if run.resume is None:
        return run
    folder = latest(run.resume)
    checkpoint, fingerprints = load(folder), task.fingerprints(run)
    sections = sorted(
        name for name, digest in checkpoint.manifest.fingerprints.items() if fingerprints.get(name) != digest
    )
    if sections:
        config = ExperimentFolder(folder.parent.parent).config
        raise CheckpointError(
            f"{folder}: it was trained with another {', '.join(sections)} than this run asks for"
            f"{task.changes(run, folder, sections)}; resume with the settings in {config}, or train again without "
            "resume"
        )
    if not checkpoint.manifest.is_finite:
        good = newest_good(folder.parent)
        advice = f"no older checkpoint in {folder.parent} is both intact and finite"
        if good is not None:
            advice = f"{good} is intact and finite: to continue from it, move later checkpoints away first"
        raise CheckpointError(f"{folder}: some of its numbers are not finite; {advice}, and lower the learning rate")
    _check_budget(run, folder, checkpoint.manifest)
    checkpoint.start(0, run.learners, run.strategy.described)
    return run.model_copy(update={"resume": folder})


def _check_budget(run: RunConfig, folder: Path, manifest: Manifest) -> None:
    """Raise ConfigError if a checkpoint has spent the budget."""
    position, budget = manifest.position, run.budget
    reached = {"minutes": manifest.minutes}
    if not position.outstanding:
        reached |= {"epochs": position.next_ticket.epoch, "steps": position.num_done}
    for key, value in reached.items():
        limit = getattr(budget, key)
        if limit is not None and value >= limit:
            raise ConfigError(
                f"{folder}: the budget is spent: it has reached {value:g} {key}, and budget.{key} is {limit:g}; "
                f"raise budget.{key}, or score it with `starling evaluate {folder.parent.parent}`"
            )


def check_claim(run: RunConfig) -> None:
    """For a run that resumes in its own folder, raise ConfigError if the folder has later checkpoints or cannot be
    written."""
    if run.resume is None or _is_new(run):
        return
    own, found = checkpoint_name(read_manifest(run.resume).position), checkpoints_in(run.folder / "checkpoints")
    later = [path for path in found if sort_key(path.name) > sort_key(own)]
    if later:
        raise ConfigError(
            f"{run.folder} has checkpoints later than {run.resume}, such as {later[-1].name}; "
            "resume from the last one, or choose another name"
        )
    with writing(run.folder / "checkpoints"):
        check_writable(run.folder / "checkpoints")


def check_writable(folder: Path) -> None:
    """Create a folder, and create and remove a file in it. Raises OSError if that fails."""
    folder.mkdir(parents=True, exist_ok=True)
    sync(folder.parent)
    probe = folder / f".writable{PARTIAL}"
    probe.mkdir(exist_ok=True)
    (probe / "file").write_text("a checkpoint will be written here\n", encoding="utf-8")
    shutil.rmtree(probe)


def claim_folder(run: RunConfig, say: Callable[[str], None]) -> ExperimentFolder:
    """Create the experiment's folder, start a record of what learners see, and write the recipe.

    If the run resumes from a checkpoint of this folder, the folder is kept. Otherwise an earlier run with a checkpoint
    is moved to `<name>.1`, `<name>.2` and so on, unless the run has `overwrite`; an earlier run without one is removed.
    Raises ConfigError in the cases of `check_claim`, or if the folder cannot be written.
    """
    folder = ExperimentFolder(run.folder)
    check_claim(run)
    position, earlier, is_new = Position(), None, _is_new(run)
    if run.resume is not None:
        saved = Checkpoint(run.resume, read_manifest(run.resume))  # it has been verified
        position, earlier = saved.manifest.position, ExperimentFolder(run.resume.parent.parent)
        if changed := saved.what_changed(run.learners, run.strategy.described, run.island):
            say(
                f"resume: {changed}; all learners begin with the mean of its models, without what the strategy keeps "
                "between steps"
            )
        place = f"in epoch {position.next_ticket.epoch + 1}, after {position.num_done} mini-batches"
        say(f"resume: from {run.resume}, {place}")
    with writing(folder.path):
        is_worth_keeping = any((path / MANIFEST).is_file() for path in folder.checkpoints.glob("[!.]*"))
        if is_worth_keeping and is_new and not run.overwrite:
            names = (folder.path.with_name(f"{run.name}.{number}") for number in count(1))
            aside = folder.path.rename(next(name for name in names if not name.exists()))
            say(f"{folder.path} held an earlier run, which is now in {aside}")
        if is_new:
            folder.clear()
        folder.path.mkdir(parents=True, exist_ok=True)
        remove_partial(folder.checkpoints)
        shutil.rmtree(folder.validation, ignore_errors=True)
        check_writable(folder.checkpoints)
        begin_record(folder.seen, position, earlier)
        folder.config.write_text(dump_recipe(run), encoding="utf-8")
        folder.environment.write_text(describe_environment(), encoding="utf-8")
    return folder


def _is_new(run: RunConfig) -> bool:
    """Whether the run does not resume from a checkpoint of its own folder."""
    return run.resume is None or run.resume.resolve().parent.parent != run.folder.resolve()


def describe_environment() -> str:
    """Versions, commit and machine, as text. It contains no environment variables, which may be secret."""
    import torch

    lines = [f"{name} {_version(name)}" for name in _PACKAGES]
    lines += [
        f"commit {_commit()}",
        f"python {platform.python_version()}",
        f"platform {platform.platform()}",
        f"cores {os.cpu_count()}",
        f"cuda {torch.version.cuda or 'none'}, {torch.cuda.device_count()} devices",
    ]
    return "\n".join(lines) + "\n"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    """The commit of the source if it is a git checkout."""
    source = Path(__file__).resolve().parent
    describe = ["describe", "--always", "--abbrev=40", "--exclude=*", "--dirty= with changes"]
    try:
        result = subprocess.run(
            ["git", "-C", str(source), *describe], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown: an installed package"
    return result.stdout.strip()
