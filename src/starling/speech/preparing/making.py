"""One set made from its corpus: listed in chunks, stage by stage in any process, and put together."""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from starling.errors import DataError
from starling.files import sync
from starling.speech.corpora import Utterance
from starling.speech.preparing.executors import Executor
from starling.speech.preparing.stages import Checking, Result, Stage, listing_of, read_result, remove_asides
from starling.speech.shard_writer import ShardIndex, write_index
from starling.speech.strings import StringsConfig, join_strings, plan_strings
from starling.speech.usable import Checker

Progress = Callable[[str, int, int], None]
"""Called with the name of a set, utterances done, and utterances in all (0: not known)."""
REPORT_EVERY = 25
SETTINGS = "settings.json"
"""The file of a set with what it was made from."""


@dataclass(frozen=True)
class SetPlan:
    """What a set is made from; `digest` is that of all `settings`."""

    name: str
    digest: str
    settings: dict[str, Any]
    utterances: Callable[[], Iterable[Utterance]]
    checking: Checking
    strings: StringsConfig | None
    shard_size: int


def make_set(plan: SetPlan, final: Path, partial: Path, executor: Executor, report: Progress) -> None:
    """Make the set in the folder `partial`, then rename it to `final`.

    Stages that an earlier call has finished, from the same settings and the same list of utterances, are not done
    again. Where this one ends early, its finished stages stay for the next.

    Raises:
        DataError: the corpus is missing or wrong, naming the utterance or file, or nothing can be written.
    """
    work = partial.absolute() / plan.digest[:16]
    try:
        _begin(partial, work)
        _make(plan, work, executor, report)
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
            raise DataError(f"set {plan.name}: {partial} cannot be written: {error}") from error
        raise


def _begin(partial: Path, work: Path) -> None:
    partial.mkdir(exist_ok=True)
    for other in partial.iterdir():
        if other.name != work.name:
            shutil.rmtree(other, ignore_errors=True)
    for folder in (work / "stages", work / "set" / "shar"):
        folder.mkdir(parents=True, exist_ok=True)
    remove_asides(work)


def _make(plan: SetPlan, work: Path, executor: Executor, report: Progress) -> None:
    whole = plan.checking.checker()
    utterances = plan.utterances()
    stages = _Stages(plan, work, executor, whole, report)
    if plan.strings is not None:
        recordings = [
            whole.reread(replace(stage.utterances[place], speaker=speaker, text=text))
            for stage, result in stages.results(utterances, f"{plan.name} (checking)", writes=False)
            for place, speaker, text in zip(result.places, result.shard.speakers, result.shard.texts, strict=True)
        ]
        plans = plan_strings([each.speaker for each in recordings], plan.strings, plan.name)
        utterances = join_strings(recordings, plans, plan.strings, plan.checking.sampling_rate)
    files = [stage.file for stage, _ in stages.results(utterances, plan.name, writes=True)]
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
    (work / "set" / SETTINGS).write_text(json.dumps(plan.settings, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    seconds = sum(each.seconds for each in dropped)
    write_index(
        work / "set", plan.name, plan.checking.sampling_rate, _shards(files), plan.digest, len(dropped), seconds
    )


@dataclass(frozen=True)
class _Stages:
    """The stages of a set, run by an executor; `whole` counts what they find."""

    plan: SetPlan
    work: Path
    executor: Executor
    whole: Checker
    report: Progress

    def results(self, utterances: Iterable[Utterance], label: str, writes: bool) -> Iterator[tuple[Stage, Result]]:
        """Every chunk of the utterances with what its stage found, in order.

        An id counts as used twice when an earlier utterance that is used has it, in whichever chunk. A stage does
        not know of the others, so one with such ids is run again with them.
        """
        total = len(utterances) if isinstance(utterances, Sequence) else 0
        meter = _Meter(label, total, self.report)
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
        while chunk := tuple(islice(listed, self.plan.shard_size)):
            checking = self.plan.checking.narrowed(chunk)
            yield Stage(self.work, number, chunk, checking, writes, listing_of(chunk))
            number += 1

    def _found(self, stage: Stage) -> Result:
        result = stage.result()
        if result is None:
            raise DataError(
                f"set {self.plan.name}: a process has written shard {stage.number}, but {stage.file} or the shard is "
                f"not there; all processes must see {self.work} as the same folder"
            )
        return result


class _Meter:
    """Counts utterances that are done, and reports now and then."""

    def __init__(self, label: str, total: int, report: Progress) -> None:
        self._label, self._total, self._report = label, total, report
        self._done = 0

    def add(self, count: int) -> None:
        before, self._done = self._done, self._done + count
        if self._done // REPORT_EVERY > before // REPORT_EVERY:
            self._report(self._label, self._done, self._total)

    def end(self) -> None:
        self._report(self._label, self._done, self._total or self._done)


def _shards(files: Iterable[Path]) -> Iterator[ShardIndex]:
    """What the shards hold, one at a time in memory."""
    for file in files:
        result = read_result(file)
        if result is None:
            raise DataError(f"{file}: was removed while the set was prepared; run `starling prepare RECIPE` again")
        yield result.shard


def _forget_dropped(work: Path) -> None:
    """Have the stages that dropped anything done again by the next call: who mends the audio changes no list."""
    for file in (work / "stages").glob("*.json"):
        result = read_result(file)
        if result is None or result.dropped:
            file.unlink()


def _remove_others(folder: Path, shards: Iterable[ShardIndex]) -> None:
    """Remove shards of an earlier call that found more utterances in the corpus."""
    wanted = {name for shard in shards for name, _ in shard.files}
    for path in folder.iterdir():
        if path.name not in wanted:
            with suppress(FileNotFoundError):
                path.unlink()
