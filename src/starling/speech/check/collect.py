"""One pass over the audio of a set: faults of single utterances, and what is needed to compare them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from starling.errors import ConfigError
from starling.speech.chance import one_thread
from starling.speech.check.config import CheckConfig
from starling.speech.check.findings import Finding
from starling.speech.check.sound import Sound, measure
from starling.speech.corpora import Audio, Utterance
from starling.speech.left_out import LeftOut
from starling.speech.preparing.making import REPORT_EVERY, Progress
from starling.speech.store import SpeechSet
from starling.speech.strings import StringsConfig, plan_strings
from starling.speech.usable import Checked, Checker, Dropped, FilterConfig, TextStyle


@dataclass(frozen=True)
class Source:
    """One set to look at, and what it is made from."""

    name: str
    utterances: Callable[[], Iterable[Utterance]]
    sampling_rate: int
    style: TextStyle
    limits: FilterConfig
    left_out: Mapping[str, LeftOut]
    strings: StringsConfig | None
    digest: str


@dataclass(frozen=True, slots=True)
class Line:
    """One text that is trained or tested on, and how long it lasts at most."""

    set: str
    id: str
    text: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Record:
    """What is kept of one utterance that is used."""

    set: str
    id: str
    speaker: str
    text: str
    sound: Sound
    read: Callable[[], Audio]


def prepared_sources(folder: Path, names: Iterable[str]) -> list[Source]:
    """Sets as they were prepared.

    Raises:
        DataError: one of them is incomplete.
        ConfigError: they differ in sampling rate.
    """
    sets = [SpeechSet.open(folder / name) for name in names]
    rates = {each.name: each.sampling_rate for each in sets}
    if len(set(rates.values())) > 1:
        listed = ", ".join(f"{name} {rate} Hz" for name, rate in rates.items())
        raise ConfigError(f"{folder}: its sets differ in sampling rate ({listed}); check them one by one")
    limits = FilterConfig(min_seconds=0.0, max_seconds=1e9, on_bad="skip", max_skipped=1.0)
    return [
        Source(each.name, partial(_prepared, each), each.sampling_rate, "as-is", limits, {}, None, each.summary.digest)
        for each in sets
    ]


def collect(source: Source, config: CheckConfig, report: Progress) -> tuple[list[Record], list[Finding]]:
    """The utterances of a set that are used, in order, and the faults of all; reads each audio once.

    Memory follows the number of utterances, not their length.
    """
    checker = Checker(source.name, source.sampling_rate, source.style, source.limits, source.left_out)
    utterances = source.utterances()
    heard: list[Audio] = []
    watched = (_watched(utterance, heard) for utterance in utterances)
    records = []
    with one_thread():
        for utterance, _ in _counted(checker.usable(watched), utterances, f"{source.name} (checking)", report):
            sound = measure(*heard[0])
            records.append(Record(source.name, utterance.id, utterance.speaker, utterance.text, sound, utterance.read))
            heard.clear()
    faults = [fault for each in checker.dropped for fault in _unused(source.name, each, each.id in checker.seen)]
    return records, faults + [fault for record in records for fault in _faults(record, config)]


def lines_of(source: Source, records: list[Record]) -> list[Line]:
    """The texts that are trained or tested on: those of the utterances, or of the strings joined from them."""
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


def _watched(utterance: Utterance, heard: list[Audio]) -> Utterance:
    """The same utterance; what was read of it last stays in `heard`, as it was decoded."""
    read = utterance.read

    def reading() -> Audio:
        heard[:] = [read()]
        return heard[0]

    return replace(utterance, read=reading)


def _unused(set_name: str, dropped: Dropped, shares_id: bool) -> Iterator[Finding]:
    """The fault of an utterance that cannot be used; none of one that is left out on purpose."""
    finding = partial(
        Finding, set=set_name, id=dropped.id, detail=dropped.reason, seconds=dropped.seconds, droppable=not shares_id
    )
    if dropped.fault == "silence":
        yield finding(kind="silence", value=float("-inf"))
    elif dropped.fault == "audio":
        yield finding(kind="unreadable")
    elif dropped.bad:
        yield finding(kind="unusable")


def _faults(record: Record, config: CheckConfig) -> Iterator[Finding]:
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


def _counted(
    usable: Iterable[Checked], utterances: Iterable[Utterance], label: str, report: Progress
) -> Iterator[Checked]:
    """The usable ones of some utterances, reporting progress under a label on the way."""
    total = len(utterances) if isinstance(utterances, Sequence) else 0
    done = 0
    for done, each in enumerate(usable, start=1):
        if done % REPORT_EVERY == 0:
            report(label, done, total)
        yield each
    report(label, done, total or done)
