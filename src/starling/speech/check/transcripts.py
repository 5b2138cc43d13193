"""Finds transcripts that do not fit their audio, from what a recogniser with CTC hears."""

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

import kaldialign
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from starling.chance import derive_seed, one_thread
from starling.errors import DataError
from starling.speech.check.findings import CheckConfig, Finding, Heard, Kind, SetHeard
from starling.speech.check.recordings import Record, Told
from starling.speech.decoding.decoders import emissions_of
from starling.speech.recogniser import Recogniser, by_duration
from starling.speech.tokens import BLANK

_OTHERS = 16  # transcripts of other utterances that each transcript is compared with
_MAX_DURATION = 60.0  # padded seconds of audio in a batch
_USUAL_SHARE = 0.9  # of the utterances, whose scores say how large the others' may be
_SUSPECTS = (50, 0.05, 400)  # at least, share, and at most: the utterances whose transcripts may be exchanged


def misfits(
    name: str, records: Sequence[Record], recogniser: Recogniser, config: CheckConfig, told: Told
) -> tuple[SetHeard, list[Finding]]:
    """What a recogniser hears in set `name`, and the transcripts that do not fit.

    The likelihood p(y|x) of a transcript y for the audio x is CTC's, summed over all alignments. Let y^ be the
    transcript that is heard (greedy decoding), and m the mean log-likelihood of transcripts of other utterances of
    about the same length. Then

        gap = (log p(y^|x) - log p(y|x)) / |y|,  fit = (log p(y|x) - m) / (log p(y^|x) - m),  score = gap * (1 - fit)

    A transcript does not fit if its score is an outlier of the set's (`usual_limit`). Pairs of utterances with the
    highest scores are also compared crosswise: if the transcript of each is much more likely for the audio of the
    other, the two are swapped. This needs no limit on the score, so it also works with a poor recogniser.
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
    """The score above which a transcript does not fit: the median plus `outlier` times the distance from the median to
    the 90th percentile, but at least `misfit`. It hardly changes if up to a tenth of the transcripts are wrong."""
    finite = [score for score in scores if math.isfinite(score)]
    if not finite:
        return config.misfit
    median = float(np.median(finite))
    return max(config.misfit, median + config.outlier * (float(np.quantile(finite, _USUAL_SHARE)) - median))


def log_likelihoods(log_probs: Tensor, texts: Sequence[Sequence[int]]) -> NDArray[np.float64]:
    """log p(text | audio) under CTC for each of several texts (token ids), from the log-probabilities `[T, V]` of one
    recording; -inf for a text that is too long for it."""
    losses = F.ctc_loss(
        log_probs[:, None].expand(-1, len(texts), -1),
        torch.tensor([token for text in texts for token in text], dtype=torch.long),
        torch.full((len(texts),), len(log_probs)),
        torch.tensor([len(text) for text in texts]),
        blank=BLANK,
        reduction="none",
    )
    values: NDArray[np.float64] = -losses.double().numpy()
    return values


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
        """Nats per token by which the transcript of suspect j is less likely than what is heard in the audio of suspect
        i, `[N, N]`."""
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
        """Up to `_OTHERS` transcripts that differ from `text`, those closest to it in length."""
        place = bisect_left(self._texts, len(text), key=len)
        start = max(0, min(place - _OTHERS // 2, len(self._texts) - _OTHERS - 1))
        own = tuple(text)
        return [each for each in self._texts[start : start + _OTHERS + 1] if each != own][:_OTHERS]

    def _listen(self, names: Sequence[str]) -> Iterator[tuple[Record, Tensor]]:
        """Each utterance, with the log-probabilities `[T, V]` of its audio on the CPU; longest first."""
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
    """Swapped transcripts, followed by transcripts that do not fit."""
    usual = [each.gap for each in whole.heard if math.isfinite(each.gap)]
    if not usual:
        return
    median, high = float(np.median(usual)), float(np.quantile(usual, _USUAL_SHARE))
    least_gain = max(0.5, high - median)
    most_gap = max(0.5, median + 2.5 * (high - median))  # a transcript with at most this gap fits as the others do
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
    """The partner of each suspect whose transcript is swapped. Each has one partner; pairs that gain most come
    first."""
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
