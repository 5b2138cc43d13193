"""Reads the audio of a set once: findings about single utterances, and measurements for comparing them."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from starling.chance import one_thread
from starling.errors import ConfigError
from starling.speech.check.findings import CheckConfig, Finding
from starling.speech.check.likeness import Sound, measure
from starling.speech.corpora import Audio, Utterance
from starling.speech.preparing.stages import Meter, OnProgress
from starling.speech.store import SpeechSet
from starling.speech.strings import plan_strings
from starling.speech.usable import Checker, Checking, Dropped, FilterConfig, Source


@dataclass(frozen=True, slots=True)
class Line:
    """A transcript of training or test data, and the maximum length of its audio."""

    set: str
    id: str
    text: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Record:
    """The transcript and measurements of a usable utterance."""

    set: str
    id: str
    speaker: str
    text: str
    sound: Sound
    read: Callable[[], Audio]


def prepared_sources(folder: Path, names: Iterable[str]) -> list[Source]:
    """Prepared sets as sources.

    Raises:
        DataError: A set is incomplete.
        ConfigError: The sets differ in sampling rate.
    """
    sets = [SpeechSet.open(folder / name) for name in names]
    rates = {each.name: each.sampling_rate for each in sets}
    if len(set(rates.values())) > 1:
        listed = ", ".join(f"{name} {rate} Hz" for name, rate in rates.items())
        raise ConfigError(f"{folder}: its sets differ in sampling rate ({listed}); check them one by one")
    limits = FilterConfig(min_seconds=0.0, max_seconds=1e9, on_bad="skip", max_skipped=1.0)
    return [
        Source(
            Checking(each.name, each.sampling_rate, "as-is", limits),
            partial(_prepared, each),
            None,
            each.summary.digest,
        )
        for each in sets
    ]


def collect(source: Source, config: CheckConfig, report: OnProgress) -> tuple[list[Record], list[Finding]]:
    """The usable utterances of a set, in order, and findings about single utterances; reads all audio once.

    Memory use depends on the number of utterances, not on their length.
    """
    checker = Checker(source.checking)
    utterances = source.utterances()
    meter = Meter(f"{source.name} (checking)", utterances, report)
    records = []
    with one_thread():
        for _, utterance, _, decoded in checker.usable(utterances):
            sound = measure(*decoded)
            records.append(Record(source.name, utterance.id, utterance.speaker, utterance.text, sound, utterance.read))
            meter.add(1)
    meter.end()
    unused = [found for each in checker.dropped for found in _unused(source.name, each, each.id in checker.seen)]
    return records, unused + [found for record in records for found in _findings(record, config)]


def lines_of(source: Source, records: list[Record]) -> list[Line]:
    """The transcripts of a set: those of its utterances, or of the strings joined from them."""
    if source.strings is None:
        return [Line(each.set, each.id, each.text, each.sound.seconds) for each in records]
    longest_gap = source.strings.gap_seconds[1]
    lines = []
    for plan in plan_strings([each.speaker for each in records], source.strings, source.name):
        members = [records[place] for place in plan.members]
        seconds = sum(each.sound.seconds for each in members) + longest_gap * (len(members) - 1)
        lines.append(Line(source.name, plan.id, " ".join(each.text for each in members), seconds))
    return lines


def _prepared(speech_set: SpeechSet) -> list[Utterance]:
    def utterance(index: int) -> Utterance:
        return Utterance(
            speech_set.id(index),
            speech_set.speaker(index),
            speech_set.text(index),
            str(speech_set.folder),
            lambda: (speech_set.audio(index), speech_set.sampling_rate),
        )

    return [utterance(index) for index in range(len(speech_set))]


def _unused(set_name: str, dropped: Dropped, shares_id: bool) -> Iterator[Finding]:
    """The finding about an unusable utterance; none for one that is left out or filtered."""
    finding = partial(
        Finding, set=set_name, id=dropped.id, detail=dropped.reason, seconds=dropped.seconds, droppable=not shares_id
    )
    if dropped.kind == "silence":
        yield finding(kind="silence", value=float("-inf"))
    elif dropped.kind == "audio":
        yield finding(kind="unreadable")
    elif dropped.bad:
        yield finding(kind="unusable")


def _findings(record: Record, config: CheckConfig) -> Iterator[Finding]:
    sound = record.sound
    finding = partial(Finding, set=record.set, id=record.id, seconds=sound.seconds)
    if sound.level_db < config.silence_db:
        yield finding(kind="silence", value=sound.level_db, limit=config.silence_db, detail="dB, root mean square")
    if sound.clipped >= config.clipped:
        yield finding(kind="clipping", value=sound.clipped, limit=config.clipped, detail="of the samples at full scale")
    low, high = config.seconds_per_character
    pace = sound.seconds / len(record.text)
    if not low <= pace <= high:
        detail = f"{sound.seconds:.3f} s for {len(record.text)} characters"
        yield finding(kind="seconds-per-character", value=pace, limit=low if pace < low else high, detail=detail)
