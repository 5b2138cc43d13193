"""Checks a whole corpus for all kinds of findings. These include audio, transcripts and speakers that occur twice, and
transcripts that do not fit what a recogniser hears."""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial

import kaldialign
import numpy as np
import torch
from numpy.typing import NDArray
from rensa import RMinHash, RMinHashLSH
from torch import Tensor
from torch.nn import functional as F

from starling.chance import derive_seed, one_thread
from starling.configuration import Config
from starling.errors import DataError
from starling.speech.augmentation import AugmentConfig
from starling.speech.check.findings import HEARD, KINDS, CheckConfig, Finding, Heard, Kind, Report, SetHeard, SetSize
from starling.speech.check.recordings import Line, Record, Told, by_set, collect, lines_of, shared, shared_audio
from starling.speech.decoding.decoders import emissions_of
from starling.speech.features import FeatureConfig, LogMel
from starling.speech.models import ModelConfig
from starling.speech.models.architectures import BlstmConfig
from starling.speech.prepare_stages import OnProgress
from starling.speech.recogniser import Recogniser, by_duration
from starling.speech.tokens import BLANK, TokenConfig, make_tokenizer
from starling.speech.usable import NO_SPEAKER, Source, too_short_for_ctc

NUM_HASHES = 120
_MAX_MISS_RATE = 1e-4
_BLOCK = 1000
_CACHED = 5000  # number of texts whose n-grams are cached, about 10 kB each
_MARGIN = 0.25  # largest error of a similarity estimated from 120 hashes: over five standard deviations
Near = list[tuple[int, float]]
"""The indices of similar texts, each with its similarity."""


def pieces(text: str, ngram: int) -> frozenset[str]:
    """The n-grams of `ngram` characters in a text with a space added at each end. Repeated n-grams are numbered.

    Because of the numbers, `similarity` compares the n-grams as multisets, so that `ONE ONE ONE` differs from `ONE`.
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
    """The Jaccard similarity |A and B| / |A or B| of two sets of n-grams."""
    shared = len(first & second)
    return shared / (len(first) + len(second) - shared)


def num_bands(threshold: float) -> int:
    """The smallest number of bands of hashes with which at most one near-duplicate in 10,000 is missed.

    Two texts of similarity s agree in at least one of b bands of r hashes with probability 1 - (1 - s^r)^b (Leskovec,
    Rajaraman & Ullman, Mining of Massive Datasets, section 3.4). The fewer bands, the fewer candidates.
    """
    fitting = [bands for bands in range(1, NUM_HASHES + 1) if NUM_HASHES % bands == 0]
    return next(bands for bands in fitting if (1 - threshold ** (NUM_HASHES // bands)) ** bands <= _MAX_MISS_RATE)


def near_texts(texts: Sequence[str], threshold: float, ngram: int, progress: Told) -> Iterator[Near]:
    """For each of several distinct texts, the other texts with a similarity of at least `threshold`.

    Memory use is about 3 kB per text. With a small vocabulary, such as digits, the number of candidates grows faster
    than the number of texts. `progress` is called with the number of texts done and the total.
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
        progress(min(start + _BLOCK, len(texts)), len(texts))


def shared_texts(lines: Sequence[Line], train: str, config: CheckConfig, told: Told) -> Iterator[Finding]:
    """Yield duplicate and similar texts within a set, and between the training set and a held-out set."""
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
    """Yield the speakers of the training set that also occur in held-out sets, with one finding for each speaker and
    held-out set."""
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
    """Check sets for everything in `config`. The training set is named `train`; all other sets are held out.

    The check whether transcripts fit requires a `recogniser`.

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
    """Yield transcripts whose audio has too few frames for CTC. For the training set, frames are counted at the highest
    speed factor."""
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


_OTHERS = 16  # number of other utterances' transcripts with which each transcript is compared
_MAX_DURATION = 60.0  # seconds of audio in a batch, including padding
_USUAL_SHARE = 0.9  # fraction of the utterances whose scores determine how large the other scores may be
_SUSPECTS = (50, 0.05, 400)  # suspects for swapped transcripts: minimum, share of the set, maximum


def misfits(
    name: str, records: Sequence[Record], recogniser: Recogniser, config: CheckConfig, told: Told
) -> tuple[SetHeard, list[Finding]]:
    """The texts that a recogniser hears in set `name`, and the transcripts that do not fit.

    The likelihood p(y|x) of a transcript y for the audio x is CTC's, summed over all alignments. Let y^ be the text
    that greedy decoding finds, and m the mean log-likelihood of other utterances' transcripts of about the same length.
    Then

        gap = (log p(y^|x) - log p(y|x)) / |y|,  fit = (log p(y|x) - m) / (log p(y^|x) - m),  score = gap * (1 - fit)

    A transcript does not fit if its score is an outlier among the scores of its set (`usual_limit`). The utterances
    with the highest scores are also compared in pairs. If the transcript of each utterance is much more likely for the
    audio of the other, the transcripts are swapped. This comparison does not depend on a limit on the score, so it also
    works with a poor recogniser.
    """
    with one_thread():
        listener = _Listener(records, recogniser)
        heard = sorted(listener.all_heard(told), key=lambda each: (-each.score, each.id))
        limit = usual_limit([each.score for each in heard], config)
        whole = SetHeard(name, tuple(heard), tuple(listener.skipped), limit)
        count = min(max(_SUSPECTS[0], math.ceil(_SUSPECTS[1] * len(heard))), _SUSPECTS[2], len(heard))
        suspects = heard[:count]
        fits = listener.gaps(suspects) if count > 1 else np.zeros((count, count))
        return whole, list(_findings(whole, suspects, fits, listener.records))


def usual_limit(scores: Sequence[float], config: CheckConfig) -> float:
    """The score above which a transcript does not fit. It is the median plus `outlier` times the distance from the
    median to the 90th percentile, but at least `misfit`. It hardly changes if up to a tenth of the transcripts are
    wrong."""
    finite = [score for score in scores if math.isfinite(score)]
    if not finite:
        return config.misfit
    median = float(np.median(finite))
    return max(config.misfit, median + config.outlier * (float(np.quantile(finite, _USUAL_SHARE)) - median))


def log_likelihoods(log_probs: Tensor, texts: Sequence[Sequence[int]]) -> NDArray[np.float64]:
    """The log-likelihood log p(text | audio) under CTC of each of several texts (token ids), from the log-probabilities
    `[T, V]` of one recording. It is -inf for a text that is too long for the recording."""
    losses = F.ctc_loss(
        log_probs[:, None].expand(-1, len(texts), -1),
        torch.tensor([token for text in texts for token in text], dtype=torch.long),
        torch.full((len(texts),), len(log_probs)),
        torch.tensor([len(text) for text in texts]),
        blank=BLANK,
        reduction="none",
    )
    return -losses.double().numpy()


def _greedy(log_probs: Tensor) -> list[int]:
    """The greedy tokens of log-probabilities `[T, V]`."""
    return [each.token for each in emissions_of(log_probs.argmax(1).numpy())]


class _Listener:
    """Runs a recogniser over the utterances of a set."""

    def __init__(self, records: Sequence[Record], recogniser: Recogniser) -> None:
        self._recogniser = recogniser
        self.records: dict[str, Record] = {}
        self._tokens: dict[str, list[int]] = {}
        self.skipped: list[tuple[str, str]] = []
        for record in records:
            try:
                self._tokens[record.id] = recogniser.tokenizer.encode(record.text, record.id)
                self.records[record.id] = record
            except DataError as error:
                self.skipped.append((record.id, str(error)))
        distinct = sorted({tuple(tokens) for tokens in self._tokens.values()})
        np.random.default_rng(derive_seed(0, "other transcripts")).shuffle(distinct)
        self._texts = sorted(distinct, key=len)

    def all_heard(self, told: Told) -> Iterator[Heard]:
        for done, (record, log_probs) in enumerate(self._listen(list(self.records)), start=1):
            yield self._heard(record, log_probs)
            if done % 100 == 0 or done == len(self.records):
                told(done, len(self.records))

    def gaps(self, suspects: Sequence[Heard]) -> NDArray[np.float64]:
        """A matrix `[N, N]` of the nats per token by which the transcript of suspect j is less likely than the text
        that is heard in the audio of suspect i."""
        texts = [self._tokens[each.id] for each in suspects]
        lengths = np.array([len(text) for text in texts])
        places = {each.id: place for place, each in enumerate(suspects)}
        gaps = np.full((len(suspects), len(suspects)), math.inf)
        for record, log_probs in self._listen(list(places)):
            own = _greedy(log_probs)
            best, *values = log_likelihoods(log_probs, [own, *texts])
            gaps[places[record.id]] = (best - np.array(values)) / lengths
        return gaps

    def _heard(self, record: Record, log_probs: Tensor) -> Heard:
        tokens = self._tokens[record.id]
        best_tokens = _greedy(log_probs)
        own, best, *rest = log_likelihoods(log_probs, [tokens, best_tokens, *self._like(tokens)])
        fit = 0.0
        if others := [value for value in rest if math.isfinite(value)]:
            mean = sum(others) / len(others)
            fit = (own - mean) / (best - mean) if best > mean else float(own >= best)
        heard = self._recogniser.tokenizer.decode(best_tokens)
        errors = kaldialign.edit_distance(list(record.text), list(heard))["total"] / len(record.text)
        gap = max(best - own, 0.0) / len(tokens)
        return Heard(record.set, record.id, record.text, heard, errors, float(gap), float(fit))

    def _like(self, text: Sequence[int]) -> list[tuple[int, ...]]:
        """Up to `_OTHERS` transcripts that differ from `text` and are closest to it in length."""
        place = bisect_left(self._texts, len(text), key=len)
        start = max(0, min(place - _OTHERS // 2, len(self._texts) - _OTHERS - 1))
        own = tuple(text)
        return [each for each in self._texts[start : start + _OTHERS + 1] if each != own][:_OTHERS]

    def _listen(self, names: Sequence[str]) -> Iterator[tuple[Record, Tensor]]:
        """Yield each utterance with the log-probabilities `[T, V]` of its audio, on the CPU, longest utterances
        first."""
        for batch in by_duration(np.array([self.records[name].seconds for name in names]), _MAX_DURATION):
            records, waveforms = [], []
            for record in (self.records[names[place]] for place in batch):
                try:
                    waveforms.append(self._recogniser.waveform(*record.read()))
                    records.append(record)
                except DataError as error:
                    self.skipped.append((record.id, str(error)))
            if records:
                rows = map(torch.from_numpy, self._recogniser.listen(waveforms).rows)
                yield from zip(records, rows, strict=True)


def _findings(
    whole: SetHeard, suspects: Sequence[Heard], gaps: NDArray[np.float64], records: Mapping[str, Record]
) -> Iterator[Finding]:
    """Yield findings about swapped transcripts, followed by those about transcripts that do not fit."""
    usual = [each.gap for each in whole.heard if math.isfinite(each.gap)]
    if not usual:
        return
    median, high = float(np.median(usual)), float(np.quantile(usual, _USUAL_SHARE))
    least_gain = max(0.5, high - median)
    most_gap = max(0.5, median + 2.5 * (high - median))  # a transcript with at most this gap fits as well as the others
    other_of = _swapped(gaps, least_gain, most_gap)

    def finding(kind: Kind, each: Heard, other: Heard | None) -> Finding:
        detail = f"{each.text!r}, heard {each.heard!r}, {each.errors:.0%} of the characters wrong"
        where = ("", "")
        if other is not None:
            where, detail = (whole.name, other.id), f"{detail}; fits {other.text!r}"
        return Finding(kind, whole.name, each.id, *where, each.score, whole.limit, detail, records[each.id].seconds)

    for place, other in sorted(other_of.items()):
        yield finding("swapped", suspects[place], suspects[other])
    for place, each in enumerate(suspects):
        if place not in other_of and each.score >= whole.limit:
            best = int(np.argmin(gaps[place]))
            is_near = gaps[place, best] <= min(most_gap, each.gap - least_gain)
            yield finding("misfit", each, suspects[best] if is_near else None)


def _swapped(gaps: NDArray[np.float64], least_gain: float, most_gap: float) -> dict[int, int]:
    """The partner of each suspect whose transcript is swapped. Each suspect has at most one partner; the pairs with the
    largest gains are chosen first."""
    own = np.where(np.isfinite(np.diag(gaps)), np.diag(gaps), 1e9)
    gains = own[:, None] - gaps
    mutual = np.minimum(gains, gains.T)
    fitting = (mutual >= least_gain) & (np.maximum(gaps, gaps.T) <= most_gap)
    pairs = [(float(mutual[i, j]), int(i), int(j)) for i, j in np.argwhere(fitting) if i < j]
    partner: dict[int, int] = {}
    for _, i, j in sorted(pairs, key=lambda pair: (-pair[0], pair[1:])):
        if i not in partner and j not in partner:
            partner[i], partner[j] = j, i
    return partner
