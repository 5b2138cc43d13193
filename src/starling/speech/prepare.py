"""Prepares the sets of a corpus: checks, filters and resamples utterances, and writes them as Shar shards.

For prepared sets that were copied to an object store, only the index is fetched, once. Byte ranges of the audio are
read from the store.
"""

import fcntl
import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from starling.errors import ConfigError, DataError, some
from starling.files import sync
from starling.reporting.epochs import duration
from starling.speech.corpora import Utterance, join_strings, plan_strings
from starling.speech.data import DataConfig, set_digest, set_settings, setting_differences, source_of
from starling.speech.object_store import ObjectFolder, StorageOptions
from starling.speech.prepare_stages import (
    Executor,
    Meter,
    OnProgress,
    Result,
    Stage,
    listing_of,
    read_result,
    remove_asides,
)
from starling.speech.recipe import Recipe
from starling.speech.shard_writer import ShardIndex, write_index
from starling.speech.shards import INDEX_FILES, REMOTE, SetSummary, parse_summary, read_summary
from starling.speech.store import SpeechSet
from starling.speech.usable import NO_SPEAKER, Checker, Source

SETTINGS = "settings.json"
"""The file with the settings from which a set was made."""
SHORT = "short.tsv"
"""The file that lists the utterances whose audio files are slightly shorter than their headers declare."""
_MAX_NAMED = 3  # maximum number of dropped utterances in a description
_LISTED = ("dropped.tsv", SHORT)  # files that are fetched from an object store if they exist


@dataclass(frozen=True)
class Summary:
    """All prepared sets of a recipe, and the names of the sets that this call wrote."""

    folder: Path
    sets: tuple[SetSummary, ...]
    written: tuple[str, ...]


def prepare(
    config: DataConfig,
    progress: OnProgress | None = None,
    executor: Executor | None = None,
    overwrite: bool = False,
) -> Summary:
    """Prepare the sets that the recipe uses. Existing sets with the same settings are kept.

    An existing set with other settings is replaced only with `overwrite`. With `remote`, only the indexes of the sets
    are fetched.

    A set is built in `<set>.partial`, shard by shard, and renamed when it is complete. After a failed call, the next
    call continues from the finished shards. The executor determines where shards are built (by default, in this
    process, one after another). Neither the executor nor an interruption affects the bytes of a set. Concurrent calls
    take turns.

    Raises:
        ConfigError: The folder contains sets with other settings, and `overwrite` is off; nothing was changed.
        DataError: The corpus is missing or invalid; the message names the utterance or file.
    """
    report = progress or (lambda name, done, total: None)
    with _locked(config.folder):
        if config.remote is not None:
            store = (config.remote, config.storage_options)
            written = fetch_sets(*store, config.folder, config.used_sets, config.sampling_rate, report, config.cache)
        else:
            written = [
                name
                for name in config.used_sets
                if _finished_digest(config.set_folder(name)) != set_digest(config, name)
            ]
            if not overwrite:
                _check_nothing_is_lost(config, written)
            for name in config.used_sets:
                if name in written:
                    make_set(source_of(config, name), config.set_folder(name), executor or Executor(), report)
                else:
                    shutil.rmtree(_partial_folder(config.set_folder(name)), ignore_errors=True)
        sets = tuple(read_summary(config.set_folder(name)) for name in config.used_sets)
    return Summary(config.folder, sets, tuple(written))


def prepare_all(
    recipe: Recipe, progress: OnProgress | None = None, executor: Executor | None = None, overwrite: bool = False
) -> str:
    """Prepare the sets of `data` and the additional sets of the mixture, and return a description. Raises ConfigError
    and DataError as `prepare` does."""
    lines = [describe(prepare(recipe.data, progress, executor, overwrite))]
    for _, name in recipe.training_sets:
        if name in recipe.data.sets and name not in recipe.data.used_sets:
            alone = recipe.data.model_copy(update={"train": name, "valid": None, "test": ()})
            lines.append(describe(prepare(alone, progress, executor, overwrite)))
    return "\n".join(lines)


def describe(summary: Summary) -> str:
    """A description with one line for each set: the numbers of utterances, hours and speakers, the sampling rate of the
    prepared audio, which may differ from that of the corpus, and the dropped utterances."""
    lines = []
    for each in summary.sets:
        state = "written" if each.name in summary.written else "kept"
        line = (
            f"{each.name}: {_number(each.utterances, 'utterance')}, {duration(each.seconds)}, "
            f"{_number(each.speakers, 'speaker')}, stored at {each.sampling_rate} Hz, {state}"
        )
        if each.dropped:
            listed = summary.folder / each.name / "dropped.tsv"
            line += f"; dropped {each.dropped} ({duration(each.dropped_seconds)}), listed in {listed}"
            if each.name in summary.written:
                line += f": {_first_dropped(listed)}"
        lines.append(line)
        if each.name in summary.written and (listed := summary.folder / each.name / SHORT).is_file():
            _, *names = listed.read_text(encoding="utf-8").splitlines()
            shown = ", ".join(names[:_MAX_NAMED]) + (", …" if len(names) > _MAX_NAMED else "")
            lines.append(
                f"{each.name}: the files of {_number(len(names), 'utterance')} have up to a tenth less audio than "
                f"their headers declare, and are used as they are: {shown}; listed in {listed}"
            )
    if unnamed := [name for name in summary.written if _has_no_speakers(summary.folder / name)]:
        lines.append(
            f"warning: {', '.join(unnamed)}: the corpus names no speakers, so all utterances count as "
            "one speaker's, and an overlap of speakers between training and test cannot be detected; name the speakers "
            "(in utt2spk of a Kaldi folder, in `speaker` of other manifests)"
        )
    return "\n".join(lines)


def _first_dropped(path: Path) -> str:
    """The first utterances of a `dropped.tsv`, with the reasons why they were dropped."""
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
        raise DataError(f"{folder}: cannot be written: {error}; set data.folder to a different folder") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _finished_digest(folder: Path) -> str | None:
    """The digest of a set if it was prepared here and can be opened; otherwise None."""
    if (folder / REMOTE).exists():
        return None
    try:
        return SpeechSet.open(folder).summary.digest
    except DataError:
        return None


def _check_nothing_is_lost(config: DataConfig, missing: Sequence[str]) -> None:
    """Raise ConfigError if a set to be prepared would replace one with other settings."""
    found = {name: changes for name in missing if (changes := _changes(config, name))}
    if found:
        shown = list(dict.fromkeys(chain(*found.values())))
        raise ConfigError(
            f"{config.folder}: {', '.join(found)} prepared with {some(shown)}; set "
            "data.folder to another folder, or replace these sets with `starling prepare RECIPE --overwrite`"
        )


def _changes(config: DataConfig, name: str) -> list[str]:
    """The settings in which an existing set that was prepared here differs from the recipe."""
    folder = config.set_folder(name)
    if (folder / REMOTE).exists():
        return []
    try:
        recorded: Any = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return [] if _finished_digest(folder) is None else ["other settings, which were not recorded"]
    return setting_differences(name, recorded, set_settings(config, name))


def make_set(source: Source, final: Path, executor: Executor, report: OnProgress) -> None:
    """Build a set in a partial folder beside `final`, then rename the folder to `final`.

    Utterances are listed in chunks, and each stage converts a chunk to a shard. Stages that an earlier call finished
    with the same settings and list of utterances are not repeated. If this call fails, its finished stages are kept for
    the next call.

    Raises:
        DataError: The corpus is missing or invalid (the message names the utterance or file), or a file cannot be
            written.
    """
    partial = _partial_folder(final)
    work = partial.absolute() / source.digest[:16]
    try:
        partial.mkdir(exist_ok=True)
        for other in partial.iterdir():
            if other.name != work.name:
                shutil.rmtree(other, ignore_errors=True)
        for folder in (work / "stages", work / "set" / "shar"):
            folder.mkdir(parents=True, exist_ok=True)
        remove_asides(work)
        _Making(source, work, executor, report).write()
        made = work / "set"
        sync(*made.rglob("*"), made)
        if final.exists():
            shutil.rmtree(final)
        made.rename(final)
        shutil.rmtree(partial)
    except BaseException as error:
        executor.stop(at_once=not isinstance(error, Exception))
        remove_asides(work)
        if not any((work / "stages").glob("*.json")):
            shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError):
            raise DataError(f"set {source.name}: {partial} cannot be written: {error}") from error
        raise


def _partial_folder(final: Path) -> Path:
    return final.with_name(f"{final.name}.partial")


class _Making:
    """The stages of a set, run by an executor in the folder `work`."""

    def __init__(self, source: Source, work: Path, executor: Executor, report: OnProgress) -> None:
        self._source, self._work, self._executor, self._report = source, work, executor, report
        self._checking = source.checking
        self._whole = Checker(source.checking)  # accumulates the counts of all stages

    def write(self) -> None:
        """Write the shards, the list of dropped utterances, the settings and the index."""
        source, made = self._source, self._work / "set"
        utterances = source.utterances()
        if source.strings is not None:
            recordings = [
                self._whole.reread(replace(stage.utterances[place], speaker=speaker, text=text))
                for stage, result in self._results(utterances, f"{source.name} (checking)", writes=False)
                for place, speaker, text in zip(result.places, result.shard.speakers, result.shard.texts, strict=True)
            ]
            plans = plan_strings([each.speaker for each in recordings], source.strings, source.name)
            utterances = join_strings(recordings, plans, source.strings, self._checking.sampling_rate)
            limits = self._checking.limits.model_copy(update={"trim": None})  # its recordings are already trimmed
            self._checking = replace(self._checking, limits=limits)
        files, wanted = list[Path](), set[str]()
        for stage, result in self._results(utterances, source.name, writes=True):
            files.append(stage.file)
            wanted |= dict(result.shard.files).keys()
        try:
            dropped = self._whole.finish()
        except DataError:
            self._forget_dropped()
            raise
        for path in (made / "shar").iterdir():
            if path.name not in wanted:  # left by an earlier call that found more utterances
                path.unlink(missing_ok=True)
        rows = "".join(f"{each.id}\t{each.seconds:.3f}\t{each.reason}\n" for each in dropped)
        (made / "dropped.tsv").write_text(f"id\tseconds\treason\n{rows}", encoding="utf-8", errors="backslashreplace")
        if short := self._whole.short:
            (made / SHORT).write_text("".join(f"{name}\n" for name in ("id", *short)), encoding="utf-8")
        (made / SETTINGS).write_text(json.dumps(source.settings, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        rate, seconds = self._checking.sampling_rate, sum(each.seconds for each in dropped)
        write_index(made, source.name, rate, _shards(files), source.digest, len(dropped), seconds)

    def _results(self, utterances: Iterable[Utterance], label: str, writes: bool) -> Iterator[tuple[Stage, Result]]:
        """Yield the stage and the result of each chunk, in order.

        An id is a duplicate if an earlier utterance that is kept, in any chunk, has the same id. A stage does not know
        the ids of other chunks, so a stage with duplicate ids is run again with a list of them.
        """
        meter = Meter(label, utterances, self._report)
        seen: set[str] = set()
        for stage, result in self._executor.run(self._stages(utterances, writes), meter.add):
            taken = seen.intersection(result.shard.ids) | seen.intersection(result.taken)
            if taken != set(result.taken):
                meter.add(-len(result.places))
                stage.file.unlink()
                ((stage, result),) = self._executor.run([replace(stage, taken=frozenset(taken))], meter.add)
            seen.update(result.shard.ids)
            short = () if writes and self._source.strings else result.short  # strings use audio already checked
            self._whole.count(result.total, result.dropped, short)
            yield stage, result
        meter.end()

    def _stages(self, utterances: Iterable[Utterance], writes: bool) -> Iterator[Stage]:
        listed, number = iter(utterances), 0
        while chunk := tuple(islice(listed, self._source.shard_size)):
            yield Stage(self._work, number, chunk, self._checking.narrowed(chunk), writes, listing_of(chunk))
            number += 1

    def _forget_dropped(self) -> None:
        """Make the next call repeat the stages that dropped utterances. Otherwise, repaired audio would not be noticed,
        because it does not change the list of utterances."""
        for file in (self._work / "stages").glob("*.json"):
            result = read_result(file)
            if result is None or result.dropped:
                file.unlink()


def _shards(files: Iterable[Path]) -> Iterator[ShardIndex]:
    """Yield the indexes of the shards. Only one index at a time is in memory."""
    for file in files:
        result = read_result(file)
        if result is None:
            raise DataError(f"{file}: was removed during the preparation; run `starling prepare RECIPE` again")
        yield result.shard


def fetch_sets(
    address: str,
    options: StorageOptions,
    folder: Path,
    names: Sequence[str],
    sampling_rate: int,
    progress: Callable[[str, int, int], None],
    cache: Path | None = None,
) -> list[str]:
    """Fetch the index of each set at `address` to `<folder>/<name>`. Returns the names of the sets that were fetched.

    `address`, e.g. s3://bucket/corpus, is a copy of a folder that `starling prepare` wrote. The sampling rate of the
    sets, in Hz, must equal the recipe's; other settings may differ. If `cache` is given, shards that have been read are
    kept there.

    Raises:
        DataError: A set or shard is missing, incomplete or of the wrong size, access is refused, or the store does not
            respond.
    """
    written = []
    for name in names:
        objects, final = ObjectFolder(f"{address.rstrip('/')}/{name}", options), folder / name
        text = objects.read("summary.json")
        _check_summary(text, objects, sampling_rate)
        where: dict[str, object] = {"address": f"{objects.address}/shar", "options": dict(options)}
        if cache is not None:  # each upload of the set has a separate folder
            where["cache"] = str(cache.absolute() / name / hashlib.sha256(text).hexdigest()[:16])
        if (final / "shar").exists():
            raise DataError(
                f"{final}: contains a set that was prepared on this machine; set data.folder to another folder for the "
                f"set at {objects.address}, or remove data.remote"
            )
        if not _is_there(final, text, where):
            _fetch(objects, text, where, final, partial(progress, name))
            written.append(name)
    return written


def _check_summary(text: bytes, objects: ObjectFolder, sampling_rate: int) -> None:
    """Raise DataError if a set's summary is damaged, or if its sampling rate or the size of a shard is wrong."""
    try:
        summary = parse_summary(text, objects.address)
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{objects.address}/summary.json: cannot be read ({error}); copy the set there again"
        ) from error
    if summary.sampling_rate != sampling_rate:
        raise DataError(
            f"{objects.address}: was prepared at {summary.sampling_rate} Hz; the recipe's data.sampling_rate is "
            f"{sampling_rate} Hz"
        )
    sizes = objects.sizes("shar")
    for shard in summary.shards:
        if (size := sizes.get(shard.file)) != shard.num_bytes:
            raise DataError(f"{objects.address}/shar/{shard.file}: {shard.state(size)}; copy the set there again")


def _is_there(folder: Path, summary: bytes, where: dict[str, object]) -> bool:
    """Whether a set was already fetched from the same address and can be opened."""
    try:
        same = (folder / "summary.json").read_bytes() == summary
        same = same and json.loads((folder / REMOTE).read_text(encoding="utf-8")) == where
        return same and len(SpeechSet.open(folder)) >= 0
    except (OSError, ValueError, DataError):
        return False


def _fetch(
    objects: ObjectFolder,
    summary: bytes,
    where: dict[str, object],
    final: Path,
    report: Callable[[int, int], None],
) -> None:
    """Fetch everything except the shards into a folder next to `final`, and rename it when it is complete."""
    aside = final.with_name(f"{final.name}.partial")
    files = [f"index/{name}" for name in INDEX_FILES] + [name for name in _LISTED if name in objects.sizes()]
    try:
        shutil.rmtree(aside, ignore_errors=True)
        (aside / "index").mkdir(parents=True)
        for number, name in enumerate(files):
            report(number, len(files))
            (aside / name).write_bytes(objects.read(name))
        report(len(files), len(files))
        (aside / REMOTE).write_text(json.dumps(where, indent=2) + "\n", encoding="utf-8")
        (aside / "summary.json").write_bytes(summary)
        sync(*aside.rglob("*"), aside)
        try:
            SpeechSet.open(aside)
        except DataError as error:  # name the store, not the local copy
            found = str(error).partition(";")[0].replace(str(aside), objects.address)
            raise DataError(f"{found}; the set in the store is damaged: copy it again") from error
        shutil.rmtree(final, ignore_errors=True)
        aside.rename(final)
    except OSError as error:
        raise DataError(f"{aside}: cannot be written: {error}; set data.folder to a different folder") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
