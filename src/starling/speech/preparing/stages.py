"""One stage of preparing a set: it checks a chunk of utterances and writes it as one shard.

<work>/stages/checked.000000.json     result of checking recordings that will be joined into strings
<work>/stages/written.000000.json     the index of a shard; written after the shard, so it shows that this is complete
<work>/set/shar/...                   the shards
<work>/aside-.../                     unfinished files of a process
"""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from pydantic import TypeAdapter

from starling.configuration import digest
from starling.files import replace_file
from starling.speech.corpora import Utterance
from starling.speech.shard_writer import ShardIndex, Spoken, audio_file, cuts_file, write_shard
from starling.speech.usable import Checker, Checking, Dropped

Tick = Callable[[int], None]
"""A function that is called with the number of utterances done since the last call."""
OnProgress = Callable[[str, int, int], None]
"""A function that is called with the name of a set, the number of utterances done, and their total (0 if it is
unknown)."""
REPORT_EVERY = 25
_SEPARATORS = (",", ":")


@dataclass(frozen=True)
class Result:
    """The result of a stage. `places` are the indices of the used utterances in the chunk; a check writes no files."""

    listing: str
    taken: tuple[str, ...]
    total: int
    places: tuple[int, ...]
    dropped: tuple[Dropped, ...]
    shard: ShardIndex
    short: tuple[str, ...] = ()
    """The used utterances whose files have slightly less audio than their headers declare."""


_RESULT = TypeAdapter(Result)


@dataclass(frozen=True)
class Stage:
    """A chunk of utterances to check or write; can be pickled."""

    work: Path
    number: int
    utterances: tuple[Utterance, ...]
    checking: Checking
    writes: bool
    """Whether to write a shard; otherwise, the stage only checks."""
    listing: str
    """Digest of the chunk as the corpus lists it; a result with another digest is invalid."""
    taken: frozenset[str] = frozenset()
    """The ids of this chunk that utterances of earlier chunks already use."""

    @property
    def file(self) -> Path:
        """The file of the result; it exists once the stage is complete."""
        return self.work / "stages" / f"{'written' if self.writes else 'checked'}.{self.number:06d}.json"

    def result(self) -> Result | None:
        """The result of an earlier run, if it is complete; otherwise None."""
        result = read_result(self.file)
        if result is None or result.listing != self.listing:
            return None
        files = result.shard.files if self.writes else ()
        return result if all(_has(self.work / "set" / "shar" / name, size) for name, size in files) else None

    def run(self, tick: Tick) -> int:
        """Run the stage, replacing an earlier result. Returns the number of utterances used.

        Raises:
            DataError: An utterance is unusable, and `on_bad` is `fail`.
            OSError: A file cannot be written.
        """
        checker = Checker(self.checking, self.taken)
        places: list[int] = []

        def used() -> Iterator[Spoken]:
            for place, each, samples, _ in checker.usable(self.utterances):
                places.append(place)
                yield each.id, each.speaker, each.text, samples
                tick(1)

        with TemporaryDirectory(prefix="aside-", dir=self.work, ignore_cleanup_errors=True) as name:
            aside = Path(name)
            if self.writes:
                shard = write_shard(aside, self.number, self.checking.sampling_rate, used())
            else:
                shard = ShardIndex(self.number, 0, 0, *zip(*[each[:3] for each in used()], strict=True))
            taken, dropped = tuple(sorted(self.taken)), tuple(checker.dropped)
            result = Result(
                self.listing, taken, len(self.utterances), tuple(places), dropped, shard, tuple(checker.short)
            )
            self.file.unlink(missing_ok=True)
            if self.writes:
                self._publish(aside, shard)
            replace_file(self.file, json.dumps(asdict(result), separators=_SEPARATORS), aside)
        return len(places)

    def _publish(self, aside: Path, shard: ShardIndex) -> None:
        folder, made = self.work / "set" / "shar", [name for name, _ in shard.files]
        for name in (audio_file(self.number), cuts_file(self.number)):
            if name in made:
                (aside / name).replace(folder / name)
            else:
                (folder / name).unlink(missing_ok=True)


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


def listing_of(utterances: Iterable[Utterance]) -> str:
    """Digest of a corpus's entries for some utterances, without their audio."""
    rows = [(each.id, each.speaker, each.text, each.origin, each.segment) for each in utterances]
    return digest(rows)


def read_result(file: Path) -> Result | None:
    """The result in a file; None if it is missing or invalid."""
    try:
        return _RESULT.validate_python(json.loads(file.read_text(encoding="utf-8")))  # ids may have lone surrogates
    except (OSError, ValueError):
        return None


def remove_asides(work: Path) -> None:
    """Remove the unfinished files of processes that were killed."""
    for each in work.glob("aside-*"):
        shutil.rmtree(each, ignore_errors=True)


def _has(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size
