"""Prepares the sets of a corpus: checks, filters and resamples utterances, and writes them as Shar shards."""

import fcntl
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starling.errors import ConfigError, DataError
from starling.speech.data import DataConfig, set_digest, set_settings, setting_differences, source_of
from starling.speech.preparing.executors import Executor
from starling.speech.preparing.making import SETTINGS, OnProgress, make_set
from starling.speech.recipe import Recipe
from starling.speech.remote import fetch_sets
from starling.speech.set_summary import SetSummary, read_summary
from starling.speech.shards import REMOTE
from starling.speech.store import SpeechSet
from starling.speech.usable import NO_SPEAKER

_MAX_SHOWN = 5  # changed settings
_MAX_NAMED = 3  # dropped utterances


@dataclass(frozen=True)
class Summary:
    """All prepared sets of a recipe, and the names of those that this call wrote."""

    folder: Path
    sets: tuple[SetSummary, ...]
    written: tuple[str, ...]
    without_speakers: tuple[str, ...] = ()
    """The written sets in which no utterance has a speaker."""


def prepare(
    config: DataConfig,
    progress: OnProgress | None = None,
    executor: Executor | None = None,
    overwrite: bool = False,
) -> Summary:
    """Prepare the sets that the recipe uses. Existing sets with the same settings are kept.

    An existing set with other settings is replaced only with `overwrite`. With `remote`, only the indexes of the sets
    are fetched.

    A set is made in `<set>.partial`, shard by shard, and renamed when it is complete. After a failed call, the next one
    continues from the finished shards. The executor determines where shards are made (default: in this process, one
    after another); it does not affect the bytes of a set, nor does an interruption. Concurrent calls take turns.

    Raises:
        ConfigError: The folder contains sets with other settings, and `overwrite` is off; nothing was changed.
        DataError: The corpus is missing or invalid; the message names the utterance or file.
    """
    report = progress or (lambda name, done, total: None)
    with _locked(config.folder):
        written: list[str] = []
        if config.remote is not None:
            rate, names = config.sampling_rate, config.used_sets
            store = (config.remote, config.storage_options)
            written += fetch_sets(*store, config.folder, names, rate, report, config.cache)
        own = config.used_sets if config.remote is None else ()
        missing = [name for name in own if _finished_digest(config.set_folder(name)) != set_digest(config, name)]
        if not overwrite:
            _check_nothing_is_lost(config, missing)
        for name in own:
            if name in missing:
                _prepare_set(config, name, executor or Executor(), report)
                written.append(name)
            elif _partial_folder(config, name).exists():
                shutil.rmtree(_partial_folder(config, name), ignore_errors=True)
        sets = tuple(read_summary(config.set_folder(name)) for name in config.used_sets)
        unnamed = [name for name in written if _has_no_speakers(config.set_folder(name))]
    return Summary(config.folder, sets, tuple(written), tuple(unnamed))


def prepare_all(
    recipe: Recipe, progress: OnProgress | None = None, executor: Executor | None = None, overwrite: bool = False
) -> str:
    """Prepare the sets of `data` and the further ones of the mixture; return a description. Raises ConfigError and
    DataError as `prepare` does."""
    lines = [describe(prepare(recipe.data, progress, executor, overwrite))]
    for name in recipe.mixture.sets if recipe.mixture else ():
        if name in recipe.data.sets and name not in recipe.data.used_sets:
            alone = recipe.data.model_copy(update={"train": name, "valid": None, "test": ()})
            lines.append(describe(prepare(alone, progress, executor, overwrite)))
    return "\n".join(lines)


def describe(summary: Summary) -> str:
    """One line for each set: utterances, hours, speakers, rate, and what was dropped."""
    lines = []
    for each in summary.sets:
        state = "written" if each.name in summary.written else "kept"
        line = (
            f"{each.name}: {_number(each.utterances, 'utterance')}, {each.hours:.2f} h, "
            f"{_number(each.speakers, 'speaker')}, "
            f"{each.sampling_rate} Hz, {state}"
        )
        if each.dropped:
            listed = summary.folder / each.name / "dropped.tsv"
            line += f"; dropped {each.dropped} ({each.dropped_seconds / 3600:.2f} h), listed in {listed}"
            if each.name in summary.written:
                line += f": {_first_dropped(listed)}"
        lines.append(line)
    if summary.without_speakers:
        lines.append(
            f"warning: {', '.join(summary.without_speakers)}: the corpus names no speakers, so all utterances count as "
            "one speaker's, and an overlap of speakers between training and test cannot be detected; name the speakers "
            "(in utt2spk of a Kaldi folder, in `speaker` of other manifests)"
        )
    return "\n".join(lines)


def _first_dropped(path: Path) -> str:
    """The first utterances of a `dropped.tsv`, with the reasons."""
    _, *rows = path.read_text(encoding="utf-8").splitlines()
    fields = [row.split("\t", 2) for row in rows[:_MAX_NAMED]]
    return "; ".join(f"{each[0]} ({each[-1]})" for each in fields) + ("; …" if len(rows) > _MAX_NAMED else "")


def _has_no_speakers(folder: Path) -> bool:
    found = SpeechSet.open(folder)
    return len(found) > 1 and found.summary.speakers == 1 and found.speaker(0) == NO_SPEAKER


def _number(count: int, thing: str) -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise DataError(f"{folder}: cannot be written: {error}; set data.folder to another place") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _finished_digest(folder: Path) -> str | None:
    """The digest of a set that was prepared here and can be opened; otherwise None."""
    if (folder / REMOTE).exists():
        return None
    try:
        return SpeechSet.open(folder).summary.digest
    except DataError:
        return None


def _check_nothing_is_lost(config: DataConfig, missing: Sequence[str]) -> None:
    """Raise ConfigError if a set to be prepared would replace one with other settings."""
    found: dict[str, list[str]] = {}
    for name in missing:
        folder = config.set_folder(name)
        recorded = _recorded_settings(folder)
        if recorded is not None:
            found[name] = setting_differences(name, recorded, set_settings(config, name))
        elif _finished_digest(folder) is not None:
            found[name] = ["other settings, which were not recorded"]
    changed = [name for name, changes in found.items() if changes]
    if changed:
        changes = list(dict.fromkeys(change for name in changed for change in found[name]))
        more = f" and {len(changes) - _MAX_SHOWN} more" if len(changes) > _MAX_SHOWN else ""
        raise ConfigError(
            f"{config.folder}: {', '.join(changed)} prepared with {', '.join(changes[:_MAX_SHOWN])}{more}; set "
            "data.folder to another folder, or replace these sets with `starling prepare RECIPE --overwrite`"
        )


def _recorded_settings(folder: Path) -> Any:
    """The recorded settings of a set that was prepared here; None if they are unknown."""
    if (folder / REMOTE).exists():
        return None
    try:
        return json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def _prepare_set(config: DataConfig, name: str, executor: Executor, report: OnProgress) -> None:
    make_set(source_of(config, name), config.set_folder(name), _partial_folder(config, name), executor, report)


def _partial_folder(config: DataConfig, name: str) -> Path:
    return config.folder / f"{name}.partial"
