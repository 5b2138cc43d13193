"""Taking an experiment's folder for a run: checked first, then resumed, moved aside or overwritten."""

import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path

from starling.checkpoint.files import PARTIAL, remove_partial
from starling.checkpoint.manifest import MANIFEST, Manifest, age, checkpoint_name, read_manifest
from starling.checkpoint.reader import checkpoints_in, latest, load
from starling.checkpoint.retention import is_finite, newest_good
from starling.configuration import differing
from starling.errors import CheckpointError, ConfigError, StarlingError
from starling.files import sync
from starling.runs.experiment.folder import ExperimentFolder
from starling.runs.experiment.seen import begin_segment
from starling.runs.recipe.recipe import Recipe, dump_recipe, fingerprints, fixed_settings, load_resolved
from starling.runs.recipe.run import RunConfig
from starling.speech.data import setting_differences
from starling.workload import Position

_OWN_FOLDERS = (
    *("initial", "frames", "log", "tensorboard", "checkpoints", "best", "validation", "decode", "seen"),
    "joins",
)
_OWN_FILES = ("config.yaml", "env.txt", "too_short.tsv", "status.json")
_PACKAGES = ("starling-asr", "torch", "numpy", "lhotse", "kaldialign", "sentencepiece", "safetensors")


def resolve_resume(recipe: Recipe) -> Recipe:
    """The recipe with `resume` naming one checkpoint, checked to fit; see `checkpoint_to_resume`."""
    if recipe.resume is None:
        return recipe
    folder = checkpoint_to_resume(
        recipe, fingerprints(recipe), lambda folder, sections: _changed_keys(folder, recipe, sections)
    )
    return recipe.model_copy(update={"resume": folder})


def checkpoint_to_resume(
    run: RunConfig,
    fingerprints: Mapping[str, str],
    changed: Callable[[Path, Sequence[str]], str] = lambda folder, sections: "",
) -> Path:
    """The checkpoint that `run.resume` names, checked to fit.

    `fingerprints` are those of what this run trains; `changed` says in words what differs in some sections.
    Raises CheckpointError for a checkpoint that is missing, damaged, not finite, or of another model or data, and
    ConfigError if it has spent the budget.
    """
    if run.resume is None:
        raise ConfigError("resume: name an experiment or a checkpoint")
    folder = latest(run.resume)
    checkpoint = load(folder)
    sections = [name for name, digest in checkpoint.manifest.fingerprints.items() if fingerprints.get(name) != digest]
    if sections:
        config = ExperimentFolder(folder.parent.parent).config
        raise CheckpointError(
            f"{folder}: it was trained with another {', '.join(sorted(sections))} than this run asks for"
            f"{changed(folder, sorted(sections))}; resume with what {config} holds, or train again "
            "without resume"
        )
    if not is_finite(folder):
        good = newest_good(folder.parent)
        advice = "none beside it is" if good is None else f"{good} is: to continue from it, move later ones away first"
        raise CheckpointError(f"{folder}: not every number in it is finite; {advice}, and lower the learning rate")
    _check_budget(run, folder, checkpoint.manifest)
    checkpoint.start(0, run.learners)
    return folder


def earlier_recipe(checkpoint: Path) -> Recipe | None:
    """The recipe that a checkpoint was trained with; None if it is not there, or cannot be read any more."""
    try:
        return load_resolved(ExperimentFolder(checkpoint.parent.parent).config)
    except StarlingError:
        return None


def _changed_keys(checkpoint: Path, recipe: Recipe, sections: Sequence[str]) -> str:
    """`: KEY=OLD (now NEW), …` of what has changed in some sections since a checkpoint; empty where that is unknown."""
    earlier = earlier_recipe(checkpoint)
    if earlier is None:
        return ""
    try:
        before, now = fixed_settings(earlier), fixed_settings(recipe)
    except StarlingError:
        return ""
    changes: list[str] = []
    for section in sections:
        if section == "data" and recipe.mixture is None and earlier.mixture is None:
            changes += setting_differences(recipe.data.train, before[section], now[section])
        else:
            pairs = differing(before.get(section), now.get(section), section)
            changes += [f"{key}={old} (now {new})" for key, old, new in pairs]
    return f": {', '.join(changes)}" if changes else ""


def _check_budget(run: RunConfig, folder: Path, manifest: Manifest) -> None:
    """Raises ConfigError when nothing of the budget is left behind a checkpoint."""
    position, budget = manifest.position, run.budget
    reached = {"minutes": manifest.minutes}
    if not position.outstanding:
        reached |= {"epochs": position.next_ticket.epoch, "steps": position.num_done}
    for key, value in reached.items():
        limit = getattr(budget, key)
        if limit is not None and value >= limit:
            raise ConfigError(
                f"{folder}: nothing is left to train: it has reached {value:g} {key}, and budget.{key} is {limit:g}; "
                f"raise budget.{key}, or score it with `starling evaluate {folder.parent.parent}`"
            )


def check_claim(run: RunConfig) -> None:
    """Raises ConfigError when resuming as the recipe says would mix two runs in the experiment's folder, or when no
    checkpoint can be written there."""
    if run.resume is None or _is_elsewhere(run):
        return
    own = age(checkpoint_name(read_manifest(run.resume).position))
    found = checkpoints_in(run.folder / "checkpoints")
    later = [path for path in found if own is not None and (age(path.name) or own) > own]
    if later:
        raise ConfigError(
            f"{run.folder} holds checkpoints later than {run.resume}, such as {later[-1].name}; "
            "resume from the last one, or give another name"
        )
    try:
        check_writable(run.folder / "checkpoints")
    except OSError as error:
        raise unwritable(run.folder / "checkpoints", error) from error


def check_writable(folder: Path) -> None:
    """Make a folder and a file in it, and wait until they are on the disk. Raises OSError where that cannot be done."""
    folder.mkdir(parents=True, exist_ok=True)
    sync(folder.parent)
    probe = folder / f".writable{PARTIAL}"
    probe.mkdir(exist_ok=True)
    (probe / "file").write_text("a checkpoint will be written here\n", encoding="utf-8")
    shutil.rmtree(probe)


def claim_folder(run: RunConfig, say: Callable[[str], None]) -> ExperimentFolder:
    """Make the experiment's folder and write the recipe into it.

    An earlier run there is continued if the recipe says `resume`, removed if it says `overwrite`, and otherwise moved
    aside, to `<name>.1`, `<name>.2` and so on. A folder that cannot be written is a ConfigError.
    """
    folder = ExperimentFolder(run.folder)
    check_claim(run)
    existing = [path for path in folder.checkpoints.glob("[!.]*") if (path / MANIFEST).is_file()]
    try:
        is_new = run.resume is None or _is_elsewhere(run)
        if existing and is_new and not run.overwrite:
            say(f"{folder.path} held an earlier run, which is now in {_move_aside(folder.path)}")
        if is_new:
            _clear(folder.path)
        folder.path.mkdir(parents=True, exist_ok=True)
        remove_partial(folder.checkpoints)
        shutil.rmtree(folder.validation, ignore_errors=True)
        check_writable(folder.checkpoints)
        begin_segment(folder.seen, *_continued(run))
        folder.config.write_text(dump_recipe(run), encoding="utf-8")
        folder.environment.write_text(describe_environment(), encoding="utf-8")
    except OSError as error:
        raise unwritable(folder.path, error) from error
    return folder


def _is_elsewhere(run: RunConfig) -> bool:
    """Whether the run continues from a checkpoint of another experiment."""
    return run.resume is not None and run.resume.resolve().parent.parent != run.folder.resolve()


def _continued(run: RunConfig) -> tuple[Position, Path | None]:
    """Where a run begins, and the record of what was seen before."""
    if run.resume is None:
        return Position(), None
    return read_manifest(run.resume).position, ExperimentFolder(run.resume.parent.parent).seen


def unwritable(path: Path, error: OSError) -> ConfigError:
    """What to say when an experiment's folder cannot be written."""
    return ConfigError(f"{path}: cannot be written ({error}); set exp to another folder")


def describe_environment() -> str:
    """Versions, commit and machine; no value of an environment variable."""
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


def _move_aside(path: Path) -> Path:
    """Rename a folder to the first free of `<name>.1`, `<name>.2`, …"""
    aside = next(aside for number in count(1) if not (aside := path.with_name(f"{path.name}.{number}")).exists())
    return path.rename(aside)


def _clear(path: Path) -> None:
    """Remove what an earlier run wrote, and nothing else."""
    for name in _OWN_FOLDERS:
        if (path / name).is_dir():
            shutil.rmtree(path / name)
    for name in _OWN_FILES:
        (path / name).unlink(missing_ok=True)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    """The commit of the source, if it is a git checkout."""
    source = Path(__file__).resolve().parent
    try:
        result = subprocess.run(
            ["git", "-C", str(source), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True
        )
        changed = subprocess.run(
            ["git", "-C", str(source), "status", "--porcelain", "--untracked-files=no"],
            capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return "unknown: not a git checkout"
    return result.stdout.strip() + (" with changes" if changed.stdout.strip() else "")
