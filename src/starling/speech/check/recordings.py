"""Checks the recordings of a corpus one by one, and searches them for copies. All audio is read once."""

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from starling.chance import one_thread
from starling.errors import ConfigError, DataError
from starling.speech.audio import Audio
from starling.speech.check.findings import CheckConfig, Finding, Kind
from starling.speech.corpora import Utterance, plan_strings
from starling.speech.prepare_stages import Meter, OnProgress
from starling.speech.store import SpeechSet
from starling.speech.usable import Checker, Checking, DropKind, FilterConfig, Source, resampled

K = TypeVar("K")
Told = Callable[[int, int], None]
"""A function that is called with the number of items done and the total."""
Group = list[int]
"""The indices of equal utterances of one set, in order."""
_UNUSED: dict[DropKind, Kind] = {"silence": "silence", "audio": "unreadable"}
FULL_SCALE = 32767 / 32768
"""The largest positive 16-bit sample; samples of at least this magnitude count as clipped."""
ENVELOPE_LENGTH = 32
"""Number of equally long segments of an utterance whose levels are kept."""
_FLOOR = -40.0  # dB relative to the utterance's level; raising lower levels to this hides noise and codecs
_COMPARED_SECONDS = 20.0
_MAX_ENVELOPE_DB = 4.0  # mean difference above which waveforms are not compared; a digit as MP3 at 8 kHz had 3.4
_MAX_COMPARED = 5  # number of waveforms, nearest envelopes first, with which each one is compared


@dataclass(frozen=True, slots=True)
class Sound:
    """The measurements of one utterance, which take about 250 bytes in CPython, whatever the utterance's length."""

    digest: bytes
    """Digest of the decoded 16-bit samples and their rate, which is the same for all lossless encodings."""
    envelope: bytes
    """The levels `[ENVELOPE_LENGTH]` as int8, in units of 0.5 dB relative to the utterance's level."""
    level_db: float
    """Root mean square, in dB relative to full scale."""
    clipped: float
    """Fraction of the samples at full scale."""


@dataclass(frozen=True, slots=True)
class Line:
    """A transcript of the training or test data, and the maximum length of its audio."""

    set: str
    id: str
    text: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Record(Line):
    """A usable utterance, with its speaker and the measurements of its audio."""

    speaker: str
    sound: Sound
    read: Callable[[], Audio]


def prepared_sources(folder: Path, names: Iterable[str]) -> list[Source]:
    """The prepared sets in `folder`, as sources.

    Raises:
        DataError: A set is incomplete.
        ConfigError: The sets differ in sampling rate.
    """
    sets = [SpeechSet.open(folder / name) for name in names]
    rates = {each.name: each.sampling_rate for each in sets}
    if len(set(rates.values())) > 1:
        listed = ", ".join(f"{name} {rate} Hz" for name, rate in rates.items())
        raise ConfigError(f"{folder}: its sets differ in sampling rate ({listed}); check each set separately")
    limits = FilterConfig(min_seconds=0.0, max_seconds=1e9, on_bad="skip", max_skipped=1.0)
    checks = [Checking(each.name, each.sampling_rate, "as-is", limits) for each in sets]
    pairs = zip(checks, sets, strict=True)
    return [Source(checking, partial(_prepared, each), digest=each.summary.digest) for checking, each in pairs]


def collect(source: Source, config: CheckConfig, report: OnProgress) -> tuple[list[Record], list[Finding]]:
    """The usable utterances of a set, in order, and the findings about single utterances.

    All audio is read once. Memory use depends on the number of utterances, but not on their lengths.
    """
    checker = Checker(source.checking)
    utterances = source.utterances()
    meter = Meter(f"{source.name} (checking)", utterances, report)
    records = []
    with one_thread():
        for _, each, _, (samples, rate) in checker.usable(utterances):
            line = (source.name, each.id, each.text, len(samples) / rate)
            records.append(Record(*line, each.speaker, measure(samples, rate), each.read))
            meter.add(1)
    meter.end()
    unused = [
        Finding(
            _UNUSED.get(each.kind, "unusable"),
            source.name,
            each.id,
            value=-math.inf if each.kind == "silence" else None,
            detail=each.reason,
            seconds=each.seconds,
            droppable=each.id not in checker.seen,
        )
        for each in checker.dropped
        if each.bad
    ]
    return records, unused + [found for record in records for found in _findings(record, config)]


def lines_of(source: Source, records: Sequence[Record]) -> Sequence[Line]:
    """The transcripts of a set: those of its utterances, or of the strings joined from them."""
    if source.strings is None:
        return records
    longest_gap = source.strings.gap_seconds[1]
    lines = []
    for plan in plan_strings([each.speaker for each in records], source.strings, source.name):
        members = [records[place] for place in plan.members]
        seconds = sum(each.seconds for each in members) + longest_gap * (len(members) - 1)
        lines.append(Line(source.name, plan.id, " ".join(each.text for each in members), seconds))
    return lines


def _prepared(speech_set: SpeechSet) -> list[Utterance]:
    def utterance(index: int) -> Utterance:
        name, speaker, text = speech_set.id(index), speech_set.speaker(index), speech_set.text(index)
        origin, rate = str(speech_set.folder), speech_set.sampling_rate
        return Utterance(name, speaker, text, origin, lambda: (speech_set.audio(index), rate))

    return [utterance(index) for index in range(len(speech_set))]


def _findings(record: Record, config: CheckConfig) -> Iterator[Finding]:
    sound = record.sound
    finding = partial(Finding, set=record.set, id=record.id, seconds=record.seconds)
    if sound.level_db < config.silence_db:
        yield finding(kind="silence", value=sound.level_db, limit=config.silence_db, detail="dB, root mean square")
    if sound.clipped >= config.clipped:
        yield finding(kind="clipping", value=sound.clipped, limit=config.clipped, detail="of the samples at full scale")
    low, high = config.seconds_per_character
    pace = record.seconds / len(record.text)
    if not low <= pace <= high:
        detail = f"{record.seconds:.3f} s for {len(record.text)} characters"
        yield finding(kind="seconds-per-character", value=pace, limit=low if pace < low else high, detail=detail)


def by_set(lines: Iterable[Line], keys: Iterable[K]) -> dict[K, dict[str, Group]]:
    """For each key, the indices of the lines that have this key, grouped by set."""
    groups: dict[K, dict[str, Group]] = defaultdict(lambda: defaultdict(list))
    for place, (line, key) in enumerate(zip(lines, keys, strict=True)):
        groups[key][line.set].append(place)
    return {key: dict(places) for key, places in groups.items()}


def shared_audio(records: Sequence[Record], train: str, config: CheckConfig, told: Told) -> Iterator[Finding]:
    """Yield utterances whose decoded audio equals that of another utterance, or is similar if text and length are
    equal.

    Within a set, all copies except the first are findings. Between the training set and a held-out set, the utterances
    of both sets are findings.
    """
    groups = by_set(records, (record.sound.digest for record in records))
    overlaps = []
    for copies in groups.values():
        for places in copies.values():
            for place in places[1:]:
                yield shared(records, "same-audio", place, places[0])
        overlaps += [
            (copies[train], places, 1.0) for name, places in copies.items() if train in copies and name != train
        ]
    later_of: dict[int, Finding] = {}
    for first, second, value in _alike(records, groups.values(), train, config, told):
        name, other = records[first[0]].set, records[second[0]].set
        if name == other:
            earlier, later = sorted((first[0], second[0]))
            found = shared(records, "same-text-and-length", later, earlier, value, config.alike)
            later_of.setdefault(later, found)
        else:
            overlaps.append((first, second, value) if name == train else (second, first, value))
    yield from later_of.values()
    found_of: dict[tuple[int, str], Finding] = {}
    for ours, theirs, value in overlaps:
        for places, others in ((ours, theirs), (theirs, ours)):
            for place in places:
                found = shared(records, "overlap-audio", place, others[0], value, config.alike)
                found_of.setdefault((place, found.other_set), found)
    yield from found_of.values()


def _alike(
    records: Sequence[Record], groups: Iterable[Mapping[str, Group]], train: str, config: CheckConfig, told: Told
) -> Iterator[tuple[Group, Group, float]]:
    """Yield pairs of groups with equal text and length that are copies of a recording although their samples differ.

    Equal text and length are not sufficient: among 3,000 spoken digits, 13,701 pairs with the same speaker and digit
    agree in length within 20 ms, and none of the pairs are copies. Therefore the envelopes are compared and, if they
    are similar, the waveforms.
    """
    by_text: dict[str, list[Group]] = defaultdict(list)
    for places in (places for copies in groups for places in copies.values()):
        by_text[records[places[0]].text].append(places)
    done = 0
    for candidates in by_text.values():
        if len(candidates) > 1:
            yield from _alike_of_one_text(records, candidates, train, config)
        done += sum(map(len, candidates))
        told(done, len(records))


def _alike_of_one_text(
    records: Sequence[Record], groups: list[Group], train: str, config: CheckConfig
) -> Iterator[tuple[Group, Group, float]]:
    groups = sorted(groups, key=lambda places: records[places[0]].seconds)
    members = [records[places[0]] for places in groups]
    seconds = np.array([each.seconds for each in members])
    envelopes = np.stack([np.frombuffer(each.sound.envelope, np.int8) for each in members]).astype(np.int16)
    ends = np.searchsorted(seconds, seconds + config.length_tolerance + 1e-9, side="right")
    for i, first in enumerate(members):
        others = range(i + 1, int(ends[i]))
        distances = np.abs(envelopes[others.start : others.stop] - envelopes[i]).mean(axis=1) / 2  # dB
        audio: Audio | None = None
        compared = 0
        for j in (others[int(place)] for place in np.argsort(distances, kind="stable")):
            if distances[j - others.start] > _MAX_ENVELOPE_DB or compared == _MAX_COMPARED:
                break
            second = members[j]
            both_held_out = first.set != second.set and train not in (first.set, second.set)
            if both_held_out or first.sound.digest == second.sound.digest:
                continue
            compared += 1
            audio = audio or first.read()
            value = likeness(audio, second.read(), config.length_tolerance)
            if value >= config.alike:
                yield groups[i], groups[j], value


def shared(
    lines: Sequence[Line],
    kind: Kind,
    place: int,
    other: int,
    value: float | None = None,
    limit: float | None = None,
) -> Finding:
    """A finding about something that the utterance at `place` has in common with another utterance."""
    own, theirs = lines[place], lines[other]
    return Finding(kind, own.set, own.id, theirs.set, theirs.id, value, limit, seconds=own.seconds)


def measure(samples: NDArray[np.float32], rate: int) -> Sound:
    """Measure samples `[T]` at `rate` Hz that passed `check_samples`."""
    quantised = np.clip(np.rint(samples * 32768.0), -32768, 32767).astype("<i2")
    digest = hashlib.blake2b(quantised.tobytes(), digest_size=16, key=str(rate).encode()).digest()
    power = float(np.mean(np.square(samples, dtype=np.float64)))
    return Sound(
        digest,
        _envelope(samples, power).tobytes(),
        10 * math.log10(power) if power else -math.inf,
        float(np.mean(np.abs(samples) >= FULL_SCALE)),
    )


def likeness(first: Audio, second: Audio, tolerance: float) -> float:
    """The correlation of two waveforms, from 0 to 1, at the best shift of up to `tolerance` seconds.

        max_|s| |sum_t a[t] b[t + s]| / (|a| |b|)

    The level and polarity have no effect. At most the first 20 s are compared. The result is 0 if one sampling rate
    cannot be converted to the other.
    """
    (a, rate), (b, other) = first, second
    try:
        b = resampled(b, other, rate)
    except DataError:
        return 0.0
    end = round(_COMPARED_SECONDS * rate)
    a, b = a[:end], b[:end]
    size = 1 << (len(a) + len(b) - 1).bit_length()
    products = np.fft.irfft(np.fft.rfft(a, size) * np.conj(np.fft.rfft(b, size)), size)
    shift = round(tolerance * rate)
    best = max(np.abs(products[: shift + 1]).max(), np.abs(products[size - shift :]).max(initial=0.0))
    norm = math.sqrt(float(np.sum(np.square(a, dtype=np.float64))) * float(np.sum(np.square(b, dtype=np.float64))))
    return min(1.0, float(best) / norm) if norm else 0.0


def _envelope(samples: NDArray[np.float32], power: float) -> NDArray[np.int8]:
    padded = np.pad(samples, (0, max(0, ENVELOPE_LENGTH - len(samples)))).astype(np.float64)
    edges = np.linspace(0, len(padded), ENVELOPE_LENGTH + 1).astype(int)
    powers = np.add.reduceat(np.square(padded), edges[:-1]) / np.diff(edges)
    relative = 10 * np.log10(np.maximum(powers / max(power, 1e-30), 10 ** (_FLOOR / 10)))
    halves: NDArray[np.int8] = np.clip(np.rint(2 * relative), -128, 127).astype(np.int8)
    return halves
