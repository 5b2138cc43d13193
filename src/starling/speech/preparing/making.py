"""Makes one set from its corpus: lists it in chunks, processes these in stages, and writes the index."""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from starling.errors import DataError
from starling.files import sync
from starling.speech.corpora import Utterance
from starling.speech.preparing.executors import Executor
from starling.speech.preparing.stages import Result, Stage, listing_of, read_result, remove_asides
from starling.speech.shard_writer import ShardIndex, write_index
from starling.speech.strings import join_strings, plan_strings
from starling.speech.usable import Checker, Source

OnProgress = Callable[[str, int, int], None]
"""Called with the name of a set, the number of utterances done, and their total (0: unknown)."""
REPORT_EVERY = 25
SETTINGS = "settings.json"
"""The file with the settings from which a set was made."""


def make_set(source: Source, final: Path, partial: Path, executor: Executor, report: OnProgress) -> None:
    """Make the set in the folder `partial`, then rename it to `final`.

    Stages that an earlier call finished, with the same settings and list of utterances, are not repeated. If this call
    fails, its finished stages are kept for the next one.

    Raises:
        DataError: The corpus is missing or invalid (the message names the utterance or file), or a file cannot be
            written.
    """
    work = partial.absolute() / source.digest[:16]
    try:
        _begin(partial, work)
        _make(source, work, executor, report)
        made = work / "set"
        sync(*made.rglob("*"), made)
        if final.exists():
            shutil.rmtree(final)
        made.rename(final)
        shutil.rmtree(partial)
    except BaseException as error:
        executor.abandon(at_once=not isinstance(error, Exception))
        remove_asides(work)
        if not any((work / "stages").glob("*.json")):
            shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError):
            raise DataError(f"set {source.name}: {partial} cannot be written: {error}") from error
        raise


def _begin(partial: Path, work: Path) -> None:
    partial.mkdir(exist_ok=True)
    for other in partial.iterdir():
        if other.name != work.name:
            shutil.rmtree(other, ignore_errors=True)
    for folder in (work / "stages", work / "set" / "shar"):
        folder.mkdir(parents=True, exist_ok=True)
    remove_asides(work)


def _make(source: Source, work: Path, executor: Executor, report: OnProgress) -> None:
    whole = Checker(source.checking)
    utterances = source.utterances()
    stages = _Stages(source, work, executor, whole, report)
    if source.strings is not None:
        recordings = [
            whole.reread(replace(stage.utterances[place], speaker=speaker, text=text))
            for stage, result in stages.results(utterances, f"{source.name} (checking)", writes=False)
            for place, speaker, text in zip(result.places, result.shard.speakers, result.shard.texts, strict=True)
        ]
        plans = plan_strings([each.speaker for each in recordings], source.strings, source.name)
        utterances = join_strings(recordings, plans, source.strings, source.checking.sampling_rate)
        limits = source.checking.limits.model_copy(update={"trim": None})  # its recordings are trimmed
        stages = replace(stages, source=replace(source, checking=replace(source.checking, limits=limits)))
    files = [stage.file for stage, _ in stages.results(utterances, source.name, writes=True)]
    try:
        dropped = whole.finish()
    except DataError:
        _forget_dropped(work)
        raise
    _remove_others(work / "set" / "shar", _shards(files))
    rows = "".join(f"{each.id}\t{each.seconds:.3f}\t{each.reason}\n" for each in dropped)
    (work / "set" / "dropped.tsv").write_text(
        "id\tseconds\treason\n" + rows, encoding="utf-8", errors="backslashreplace"
    )
    (work / "set" / SETTINGS).write_text(json.dumps(source.settings, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    seconds = sum(each.seconds for each in dropped)
    write_index(
        work / "set", source.name, source.checking.sampling_rate, _shards(files), source.digest, len(dropped), seconds
    )


@dataclass(frozen=True)
class _Stages:
    """The stages of a set, run by an executor; `whole` collects their counts."""

    source: Source
    work: Path
    executor: Executor
    whole: Checker
    report: OnProgress

    def results(self, utterances: Iterable[Utterance], label: str, writes: bool) -> Iterator[tuple[Stage, Result]]:
        """Each chunk's stage with its result, in order.

        An id is a duplicate if an earlier utterance that is used has it, in any chunk. A stage does not know the ids of
        other chunks, so a stage with such ids is run again with them.
        """
        meter = Meter(label, utterances, self.report)
        seen: set[str] = set()
        for stage in self.executor.run(self._stages(utterances, writes), meter.add):
            result = self._found(stage)
            taken = seen.intersection(result.shard.ids) | seen.intersection(result.taken)
            if taken != set(result.taken):
                meter.add(-len(result.places))
                stage.file.unlink()
                stage = replace(stage, taken=frozenset(taken))
                for _ in self.executor.run([stage], meter.add):
                    result = self._found(stage)
            seen.update(result.shard.ids)
            self.whole.count(result.total, result.dropped)
            yield stage, result
        meter.end()

    def _stages(self, utterances: Iterable[Utterance], writes: bool) -> Iterator[Stage]:
        listed, number = iter(utterances), 0
        while chunk := tuple(islice(listed, self.source.shard_size)):
            checking = self.source.checking.narrowed(chunk)
            yield Stage(self.work, number, chunk, checking, writes, listing_of(chunk))
            number += 1

    def _found(self, stage: Stage) -> Result:
        result = stage.result()
        if result is None:
            raise DataError(
                f"set {self.source.name}: a process has written shard {stage.number}, but {stage.file} or the shard is "
                f"missing; {self.work} must be the same folder for all processes"
            )
        return result


class Meter:
    """Counts the utterances that are done, and reports every `REPORT_EVERY`."""

    def __init__(self, label: str, utterances: Iterable[Utterance], report: OnProgress) -> None:
        self._label, self._report, self._done = label, report, 0
        self._total = len(utterances) if isinstance(utterances, Sequence) else 0

    def add(self, count: int) -> None:
        before, self._done = self._done, self._done + count
        if self._done // REPORT_EVERY > before // REPORT_EVERY:
            self._report(self._label, self._done, self._total)

    def end(self) -> None:
        self._report(self._label, self._done, self._total or self._done)


def _shards(files: Iterable[Path]) -> Iterator[ShardIndex]:
    """The indexes of the shards, one at a time in memory."""
    for file in files:
        result = read_result(file)
        if result is None:
            raise DataError(f"{file}: was removed during the preparation; run `starling prepare RECIPE` again")
        yield result.shard


def _forget_dropped(work: Path) -> None:
    """Let the next call repeat the stages that dropped utterances: repaired audio does not change their listing."""
    for file in (work / "stages").glob("*.json"):
        result = read_result(file)
        if result is None or result.dropped:
            file.unlink()


def _remove_others(folder: Path, shards: Iterable[ShardIndex]) -> None:
    """Remove shards left by an earlier call that found more utterances."""
    wanted = {name for shard in shards for name, _ in shard.files}
    for path in folder.iterdir():
        if path.name not in wanted:
            with suppress(FileNotFoundError):
                path.unlink()
