"""One stage of preparing a set: a chunk of its utterances is checked and written as one shard.

<work>/stages/checked.000000.json     result of checking recordings that will be joined into strings
<work>/stages/written.000000.json     the index of a shard; written after the shard, so it shows that this is complete
<work>/set/shar/...                   the shards
<work>/aside-.../                     unfinished files of a process
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from starling.configuration import digest
from starling.files import replace_file
from starling.speech.corpora import Utterance
from starling.speech.shard_writer import ShardIndex, ShardWriter, audio_file, cuts_file
from starling.speech.usable import Checker, Dropped, FilterConfig, LeftOut, TextStyle

Tick = Callable[[int], None]
"""Called with the number of utterances done since the last call."""
_SEPARATORS = (",", ":")


@dataclass(frozen=True)
class Checking:
    """How the utterances of a set are checked."""

    set_name: str
    sampling_rate: int
    """Hz"""
    style: TextStyle
    limits: FilterConfig
    left_out: Mapping[str, LeftOut] = field(default_factory=dict)

    def checker(self) -> Checker:
        return Checker(self.set_name, self.sampling_rate, self.style, self.limits, self.left_out)

    def narrowed(self, utterances: Iterable[Utterance]) -> "Checking":
        """A copy for some utterances only, without the other utterances to leave out, which is small to send."""
        left_out = {each.id: self.left_out[each.id] for each in utterances if each.id in self.left_out}
        return Checking(self.set_name, self.sampling_rate, self.style, self.limits, left_out)


@dataclass(frozen=True)
class Result:
    """The result of a stage. `places` are the indices of the used utterances in the chunk; a check writes no files."""

    listing: str
    taken: tuple[str, ...]
    total: int
    places: tuple[int, ...]
    dropped: tuple[Dropped, ...]
    shard: ShardIndex


@dataclass(frozen=True)
class Stage:
    """A chunk of utterances to check or write; can be pickled."""

    work: Path
    number: int
    utterances: tuple[Utterance, ...]
    checking: Checking
    writes: bool
    """Whether to write a shard; otherwise only check."""
    listing: str
    """Digest of the chunk as the corpus lists it; a result with another digest is invalid."""
    taken: frozenset[str] = frozenset()
    """Ids of this chunk that utterances of earlier chunks already use."""

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
        with _aside(self.work) as aside:
            result = self._written(aside, tick) if self.writes else self._checked(tick)
            self.file.unlink(missing_ok=True)
            if self.writes:
                self._publish(aside, result.shard)
            replace_file(self.file, json.dumps(asdict(result), separators=_SEPARATORS), aside)
        return len(result.places)

    def _checked(self, tick: Tick) -> Result:
        checker, source = self._begin()
        used = []
        for utterance, _ in checker.usable(source):
            used.append(utterance)
            source.keep()
            tick(1)
        ids, speakers, texts = (tuple(getattr(each, name) for each in used) for name in ("id", "speaker", "text"))
        return self._result(checker, source, ShardIndex(self.number, 0, 0, ids, speakers, texts))

    def _written(self, aside: Path, tick: Tick) -> Result:
        checker, source = self._begin()
        with ShardWriter(aside, self.number, self.checking.sampling_rate) as writer:
            for utterance, audio in checker.usable(source):
                writer.write(utterance.id, utterance.speaker, utterance.text, audio)
                source.keep()
                tick(1)
            return self._result(checker, source, writer.finish())

    def _begin(self) -> "tuple[Checker, _Places]":
        checker = self.checking.checker()
        checker.seen.update(self.taken)
        return checker, _Places(self.utterances)

    def _result(self, checker: Checker, source: "_Places", shard: ShardIndex) -> Result:
        dropped, taken = tuple(checker.dropped), tuple(sorted(self.taken))
        return Result(self.listing, taken, len(self.utterances), tuple(source.kept), dropped, shard)

    def _publish(self, aside: Path, shard: ShardIndex) -> None:
        folder, made = self.work / "set" / "shar", [name for name, _ in shard.files]
        for name in (audio_file(self.number), cuts_file(self.number)):
            if name in made:
                (aside / name).replace(folder / name)
            else:
                (folder / name).unlink(missing_ok=True)


class _Places:
    """Iterates over utterances and records the indices of those used."""

    def __init__(self, utterances: tuple[Utterance, ...]) -> None:
        self._utterances = utterances
        self._place = 0
        self.kept: list[int] = []

    def __iter__(self) -> Iterator[Utterance]:
        for place, utterance in enumerate(self._utterances):
            self._place = place
            yield utterance

    def keep(self) -> None:
        """Record that the last yielded utterance is used."""
        self.kept.append(self._place)


def listing_of(utterances: Iterable[Utterance]) -> str:
    """Digest of a corpus's entries for some utterances, without their audio."""
    rows = [(each.id, each.speaker, each.text, each.origin, each.segment) for each in utterances]
    return digest(rows)


def read_result(file: Path) -> Result | None:
    """The result in a file; None if it is missing or invalid."""
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
        fields["dropped"] = tuple(Dropped(**each) for each in fields["dropped"])
        fields["shard"] = ShardIndex(**_tuples(fields["shard"]))
        return Result(**_tuples(fields))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def remove_asides(work: Path) -> None:
    """Remove the unfinished files of processes that were killed."""
    for each in work.glob("aside-*"):
        shutil.rmtree(each, ignore_errors=True)


@contextmanager
def _aside(work: Path) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="aside-", dir=work))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _tuples(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


def _has(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size
