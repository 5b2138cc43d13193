"""Checks a whole corpus for all kinds of findings, including audio, transcripts and speakers that occur twice."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial

from rensa import RMinHash, RMinHashLSH

from starling.configuration import Config
from starling.speech.augmentation import AugmentConfig
from starling.speech.check.findings import HEARD, KINDS, CheckConfig, Finding, Report, SetSize
from starling.speech.check.recordings import Line, Record, Told, by_set, collect, lines_of, shared, shared_audio
from starling.speech.check.transcripts import misfits
from starling.speech.features import FeatureConfig, LogMel
from starling.speech.models import ModelConfig
from starling.speech.models.architectures import BlstmConfig
from starling.speech.preparing.stages import OnProgress
from starling.speech.recogniser import Recogniser
from starling.speech.tokens import TokenConfig, make_tokenizer
from starling.speech.too_short import too_short_for_ctc
from starling.speech.usable import NO_SPEAKER, Source

NUM_HASHES = 120
_MAX_MISS_RATE = 1e-4
_BLOCK = 1000
_CACHED = 5000  # texts whose n-grams are kept, about 10 kB each
_MARGIN = 0.25  # how much lower than the truth an estimate by 120 hashes may be: over five standard deviations
Near = list[tuple[int, float]]
"""Indices of other texts, each with its similarity."""


def pieces(text: str, ngram: int) -> frozenset[str]:
    """The n-grams of `ngram` characters in a text with a space at each end; repeated ones are numbered.

    The numbers make the similarity below that of multisets, so that `ONE ONE ONE` differs from `ONE`.
    """
    padded = f" {text} "
    seen = Counter[str]()
    found = set()
    for start in range(max(1, len(padded) - ngram + 1)):
        piece = padded[start : start + ngram]
        found.add(f"{piece}\0{seen[piece]}" if seen[piece] else piece)
        seen[piece] += 1
    return frozenset(found)


def similarity(first: frozenset[str], second: frozenset[str]) -> float:
    """Jaccard similarity: |A and B| / |A or B|."""
    shared = len(first & second)
    return shared / (len(first) + len(second) - shared)


def num_bands(threshold: float) -> int:
    """The number of bands of hashes, such that at most one near-duplicate in 10,000 is missed.

    Two texts of similarity s agree in at least one of b bands of r hashes with probability 1 - (1 - s^r)^b (Leskovec,
    Rajaraman & Ullman, Mining of Massive Datasets, section 3.4). The smallest such number gives the fewest candidates.
    """
    fitting = [bands for bands in range(1, NUM_HASHES + 1) if NUM_HASHES % bands == 0]
    return next(bands for bands in fitting if (1 - threshold ** (NUM_HASHES // bands)) ** bands <= _MAX_MISS_RATE)


def near_texts(
    texts: Sequence[str], threshold: float, ngram: int, progress: Callable[[int, int], None] | None = None
) -> Iterator[Near]:
    """For each of several distinct texts, the others with a similarity of at least `threshold`.

    Needs about 3 kB per text. With a small vocabulary, such as digits, the number of candidates grows faster than the
    number of texts. `progress` is called with the number of texts done and the total.
    """
    cached = lru_cache(maxsize=_CACHED)(pieces)
    sketches: list[RMinHash] = []
    for start in range(0, len(texts), _BLOCK):
        block = [list(pieces(text, ngram)) for text in texts[start : start + _BLOCK]]
        sketches += RMinHash.from_token_sets(block, NUM_HASHES, 1)
    index = RMinHashLSH(threshold=threshold, num_perm=NUM_HASHES, num_bands=num_bands(threshold))
    index.insert_many(sketches, 0)
    promising = threshold - _MARGIN
    for start in range(0, len(texts), _BLOCK):
        for place, candidates in enumerate(index.query_all(sketches[start : start + _BLOCK]), start):
            sketch, own = sketches[place], cached(texts[place], ngram)
            others = sorted(other for other in set(candidates) if sketch.jaccard(sketches[other]) >= promising)
            near = ((other, similarity(own, cached(texts[other], ngram))) for other in others if other != place)
            yield [(other, value) for other, value in near if value >= threshold]
        if progress is not None:
            progress(min(start + _BLOCK, len(texts)), len(texts))


def shared_texts(lines: Sequence[Line], train: str, config: CheckConfig, told: Told) -> Iterator[Finding]:
    """Duplicate and similar texts within a set, and between training and a held-out set."""
    texts = by_set(lines, (line.text for line in lines))
    held_out = dict.fromkeys(line.set for line in lines if line.set != train)
    groups = list(texts.values())
    for here, near in zip(groups, near_texts(list(texts), config.similarity, config.ngram, told), strict=True):
        similar = [(groups[group], value) for group, value in sorted(near, key=lambda each: -each[1])]
        for name, places in here.items():
            first = places[0]
            earlier = ((own[0], value) for others, value in similar if (own := others.get(name)) and own[0] < first)
            if (found := next(earlier, None)) is not None:
                yield shared(lines, "near-text", first, *found, config.similarity)
            for place in places[1:]:
                yield shared(lines, "near-text", place, first, 1.0, config.similarity)
            for other in held_out if name == train else [train]:
                if theirs := here.get(other):
                    yield from (shared(lines, "overlap-text", place, theirs[0], 1.0) for place in places)
                elif nearest := next(((others[other][0], value) for others, value in similar if other in others), None):
                    for place in places:
                        yield shared(lines, "overlap-near-text", place, *nearest, config.similarity)


def shared_speakers(records: Sequence[Record], train: str) -> Iterator[Finding]:
    """Speakers of the training set in held-out sets; one finding for each speaker and held-out set."""
    for speaker, spoken in by_set(records, (record.speaker for record in records)).items():
        if speaker != NO_SPEAKER and (ours := spoken.get(train)):
            for places in (places for name, places in spoken.items() if name != train):
                first, other = records[places[0]], records[ours[0]]
                detail = f"{speaker}: {len(places)} utterances in {first.set}, {len(ours)} in {train}"
                yield Finding("overlap-speaker", first.set, first.id, train, other.id, len(places), 0, detail)


class Training(Config):
    """The settings that determine how much audio a transcript needs."""

    tokens: TokenConfig = TokenConfig()
    features: FeatureConfig = FeatureConfig()
    augment: AugmentConfig | None = None
    model: ModelConfig = BlstmConfig()


def check_corpus(
    sources: Sequence[Source],
    train: str,
    config: CheckConfig,
    training: Training,
    progress: OnProgress,
    recogniser: Recogniser | None = None,
) -> Report:
    """Check sets for everything in `config`; `train` names the training set, the others are held out.

    Checking whether transcripts fit needs a `recogniser`.

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
        sizes.append(SetSize(source.name, len(own), sum(each.seconds for each in own), source.digest))
    if "too-short" in config.kinds:
        findings += _too_short(sources, lines, train, training)
    if {"same-audio", "same-text-and-length", "overlap-audio"} & set(config.kinds):
        findings += shared_audio(records, train, config, partial(progress, "audio"))
    if {"near-text", "overlap-text", "overlap-near-text"} & set(config.kinds):
        findings += shared_texts(lines, train, config, partial(progress, "texts"))
    findings += shared_speakers(records, train)
    places = {kind: place for place, kind in enumerate(KINDS)}
    wanted = sorted((each for each in findings if each.kind in config.kinds), key=lambda each: places[each.kind])
    return Report(train, tuple(sizes), tuple(wanted), tuple(heard))


def _too_short(sources: Sequence[Source], lines: Sequence[Line], train: str, training: Training) -> Iterator[Finding]:
    """Transcripts whose audio has too few frames for CTC; for the training set, at the highest speed factor."""
    if not lines:
        return
    tokens = training.tokens.model_copy(update={"alphabet": None})  # held-out sets may have other characters
    tokenizer = make_tokenizer(tokens, (line.text for line in lines))
    for source in sources:
        own = [line for line in lines if line.set == source.name]
        spoken = ((line.id, line.text, line.seconds) for line in own)
        features = LogMel(training.features, source.checking.sampling_rate)
        augment = training.augment if source.name == train else None
        for each in too_short_for_ctc(spoken, tokenizer, training.model, features, augment):
            line = own[each.number]
            detail = f"frames for the {len(line.text)} characters in {line.seconds:.3f} s"
            yield Finding(
                "too-short", line.set, line.id, value=each.frames, limit=each.needed, detail=detail,
                seconds=line.seconds,
            )  # fmt: skip
