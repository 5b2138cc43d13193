"""Checks a whole corpus: all kinds of findings, including audio, transcripts and speakers that occur twice."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from starling.configuration import Config
from starling.speech.augmentation import AugmentConfig
from starling.speech.check.collect import Line, Record, collect, lines_of
from starling.speech.check.findings import HEARD, KINDS, CheckConfig, Finding, Kind, Report, SetSize
from starling.speech.check.likeness import Near, likeness, near_texts
from starling.speech.check.transcripts import misfits
from starling.speech.corpora import Audio
from starling.speech.features import FeatureConfig, LogMel
from starling.speech.models import ModelConfig
from starling.speech.preparing.making import OnProgress
from starling.speech.recogniser import Recogniser
from starling.speech.tokens import TokenConfig, make_tokenizer
from starling.speech.too_short import too_short_for_ctc
from starling.speech.usable import Source

Told = Callable[[int, int], None]
"""Called with the number done and the total."""
Group = list[int]
"""Indices of equal utterances of one set, in order."""
_MAX_ENVELOPE_DB = 4.0  # above this mean difference waveforms are not compared; a digit as MP3 at 8 kHz had 3.4
_MAX_COMPARED = 5  # waveforms with the nearest envelopes that are compared with each one; bounds the time


def shared_audio(records: Sequence[Record], train: str, config: CheckConfig, told: Told) -> Iterator[Finding]:
    """Utterances whose decoded audio equals that of another, or is similar if text and length are the same.

    Within a set, all except the first are findings; between training and a held-out set, those of both sides.
    """
    groups: dict[bytes, dict[str, Group]] = defaultdict(lambda: defaultdict(list))
    for place, record in enumerate(records):
        groups[record.sound.digest][record.set].append(place)
    overlaps = []
    for by_set in groups.values():
        for places in by_set.values():
            for place in places[1:]:
                yield _shared(records, "same-audio", place, places[0])
        overlaps += [
            (by_set[train], places, 1.0) for name, places in by_set.items() if train in by_set and name != train
        ]
    later_of: dict[int, Finding] = {}
    for first, second, value in _alike(records, groups.values(), train, config, told):
        name, other = records[first[0]].set, records[second[0]].set
        if name == other:
            earlier, later = sorted((first[0], second[0]))
            found = _shared(records, "same-text-and-length", later, earlier, value, config.alike)
            later_of.setdefault(later, found)
        else:
            overlaps.append((first, second, value) if name == train else (second, first, value))
    yield from later_of.values()
    seen: set[tuple[int, str]] = set()
    for ours, theirs, value in overlaps:
        for places, others in ((ours, theirs), (theirs, ours)):
            for place in places:
                key = (place, records[others[0]].set)
                if key not in seen:
                    seen.add(key)
                    yield _shared(records, "overlap-audio", place, others[0], value, config.alike)


def shared_texts(lines: Sequence[Line], train: str, config: CheckConfig, told: Told) -> Iterator[Finding]:
    """Duplicate and similar texts within a set, and between training and a held-out set."""
    texts: dict[str, dict[str, Group]] = defaultdict(lambda: defaultdict(list))
    for place, line in enumerate(lines):
        texts[line.text][line.set].append(place)
    held_out = dict.fromkeys(line.set for line in lines if line.set != train)
    groups = [dict(by_set) for by_set in texts.values()]
    for here, near in zip(groups, near_texts(list(texts), config.similarity, config.ngram, told), strict=True):
        nearest_first = sorted(near, key=lambda each: -each[1])
        for name, places in here.items():
            yield from _near_inside(lines, name, places, groups, nearest_first, config.similarity)
            for other in held_out if name == train else [train]:
                yield from _near_across(lines, other, here, places, groups, nearest_first, config.similarity)


def shared_speakers(records: Sequence[Record], train: str) -> Iterator[Finding]:
    """Speakers of the training set in held-out sets; one finding for each speaker and held-out set."""
    spoken: dict[str, dict[str, Group]] = defaultdict(lambda: defaultdict(list))
    for place, record in enumerate(records):
        if record.speaker != "unknown":
            spoken[record.speaker][record.set].append(place)
    for speaker, by_set in spoken.items():
        if ours := by_set.get(train):
            for places in (places for name, places in by_set.items() if name != train):
                first, other = records[places[0]], records[ours[0]]
                detail = f"{speaker}: {len(places)} utterances in {first.set}, {len(ours)} in {train}"
                yield Finding("overlap-speaker", first.set, first.id, train, other.id, len(places), 0, detail)


def _near_inside(
    lines: Sequence[Line], name: str, places: Group, groups: Sequence[Mapping[str, Group]], near: Near, limit: float
) -> Iterator[Finding]:
    """The utterances of set `name` at `places`, all with one text, that have an earlier equal or similar text."""
    for group, value in near:
        if (other := groups[group].get(name)) and other[0] < places[0]:
            yield _shared(lines, "near-text", places[0], other[0], value, limit)
            break
    for place in places[1:]:
        yield _shared(lines, "near-text", place, places[0], 1.0, limit)


def _near_across(
    lines: Sequence[Line],
    other: str,
    here: Mapping[str, Group],
    places: Group,
    groups: Sequence[Mapping[str, Group]],
    near: Near,
    limit: float,
) -> Iterator[Finding]:
    """The utterances at `places`, all with one text, if set `other` has an equal or similar text."""
    if theirs := here.get(other):
        for place in places:
            yield _shared(lines, "overlap-text", place, theirs[0], 1.0)
        return
    for group, value in near:
        if theirs := groups[group].get(other):
            for place in places:
                yield _shared(lines, "overlap-near-text", place, theirs[0], value, limit)
            return


def _alike(
    records: Sequence[Record], groups: Iterable[Mapping[str, Group]], train: str, config: CheckConfig, told: Told
) -> Iterator[tuple[Group, Group, float]]:
    """Pairs of groups of equal text and length that are copies of a recording although their samples differ.

    Equal text and length are not enough: of 3,000 spoken digits, 13,701 pairs of one speaker and digit agree in length
    within 20 ms, and none is a copy. So the envelopes are compared, and if they are similar, the waveforms.
    """
    by_text: dict[str, list[Group]] = defaultdict(list)
    for by_set in groups:
        for places in by_set.values():
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
    groups = sorted(groups, key=lambda places: records[places[0]].sound.seconds)
    members = [records[places[0]] for places in groups]
    seconds = np.array([each.sound.seconds for each in members])
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


def _shared(
    items: Sequence[Record] | Sequence[Line],
    kind: Kind,
    place: int,
    other: int,
    value: float | None = None,
    limit: float | None = None,
) -> Finding:
    own, theirs = items[place], items[other]
    seconds = own.sound.seconds if isinstance(own, Record) else own.seconds
    return Finding(kind, own.set, own.id, theirs.set, theirs.id, value, limit, seconds=seconds)


class Training(Config):
    """The settings that determine how much audio a transcript needs."""

    tokens: TokenConfig = TokenConfig()
    features: FeatureConfig = FeatureConfig()
    augment: AugmentConfig | None = None
    model: ModelConfig = ModelConfig()


def check_corpus(
    sources: Sequence[Source],
    train: str,
    config: CheckConfig,
    training: Training,
    progress: OnProgress,
    recogniser: Recogniser | None = None,
) -> Report:
    """Check sets for everything in `config`; `train` names the training set, the others are held out.

    Whether transcripts fit is checked only with a `recogniser`.

    Raises:
        DataError: The corpus is missing or its manifest is invalid.
    """
    records: list[Record] = []
    lines: list[Line] = []
    findings: list[Finding] = []
    sizes, heard = [], []
    for source in sources:
        own, faults = collect(source, config, progress)
        records += own
        lines += lines_of(source, own)
        findings += faults
        if recogniser is not None and set(HEARD) & set(config.kinds):
            whole, faults = misfits(source.name, own, recogniser, config, partial(progress, f"hearing {source.name}"))
            heard.append(whole)
            findings += faults
        sizes.append(SetSize(source.name, len(own), sum(each.sound.seconds for each in own), source.digest))
    if "too-short" in config.kinds:
        findings += _too_short(sources, lines, train, training)
    if {"same-audio", "same-text-and-length", "overlap-audio"} & set(config.kinds):
        findings += shared_audio(records, train, config, lambda done, total: progress("audio", done, total))
    if {"near-text", "overlap-text", "overlap-near-text"} & set(config.kinds):
        findings += shared_texts(lines, train, config, lambda done, total: progress("texts", done, total))
    findings += shared_speakers(records, train)
    places = {kind: place for place, kind in enumerate(KINDS)}
    wanted = sorted((each for each in findings if each.kind in config.kinds), key=lambda each: places[each.kind])
    return Report(train, tuple(sizes), tuple(wanted), tuple(heard))


def _too_short(sources: Sequence[Source], lines: Sequence[Line], train: str, training: Training) -> Iterator[Finding]:
    """Transcripts whose audio has too few frames for CTC; in training, at the highest speed factor."""
    if not lines:
        return
    tokens = training.tokens.model_copy(update={"alphabet": None})  # held-out sets may have other characters
    tokenizer = make_tokenizer(tokens, (line.text for line in lines))
    for source in sources:
        own = {line.id: line for line in lines if line.set == source.name}
        spoken = ((line.id, line.text, line.seconds) for line in own.values())
        features = LogMel(training.features, source.checking.sampling_rate)
        augment = training.augment if source.name == train else None
        for each in too_short_for_ctc(spoken, tokenizer, training.model, features, augment):
            line = own[each.id]
            detail = f"frames for the {len(line.text)} characters in {line.seconds:.3f} s"
            yield Finding(
                "too-short", line.set, line.id, value=each.frames, limit=each.needed, detail=detail,
                seconds=line.seconds,
            )  # fmt: skip
