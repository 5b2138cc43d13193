"""Where words are: what CTC hears in each frame, and pauses in the sound."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from starling.speech.decoding.greedy import Emission, emissions_of, words_in
from starling.speech.hybrid.viterbi import ctc_row, ctc_spans, path_of
from starling.speech.tokens import Tokenizer
from starling.speech.transcribing.segmenter import FRAME, Seconds, floor_of, is_above, levels, powers, runs
from starling.speech.transcribing.transcript import Word

_PAUSE: Seconds = 0.15
"""What is quiet for so long is a pause; for less, it may be a part of a consonant: weak ones drown in noise."""
_DROWNED: Seconds = 0.05
"""How long a word may be heard before its sound rises above the noise."""
_SHORTEST = 2
"""Frames of the shortest quiet stretch that is looked at."""


def greedy_path(log_probs: NDArray[np.float32]) -> list[Emission]:
    """What CTC emits by the best token of each frame of `[T, V]`."""
    return emissions_of(log_probs.argmax(axis=1))


def aligned(log_probs: NDArray[np.float32], tokens: Sequence[int]) -> list[Emission] | None:
    """The best alignment of CTC of given tokens with `[T, V]`; None if there are too few frames."""
    labels, optional = ctc_row(tokens)
    if len(log_probs) < np.count_nonzero(~optional):
        return None
    firsts, behind = ctc_spans(path_of(log_probs[:, labels], optional), len(tokens))
    spans = zip(tokens, firsts.tolist(), (behind - 1).tolist(), strict=True)
    return [Emission(*span) for span in spans]


def beginnings(log_probs: NDArray[np.float32], tokens: Sequence[int]) -> NDArray[np.int64]:
    """The frame in which each of the tokens begins, `[N]`, on the best path through `[T, V]` without blanks.

    A frame belongs to the token that is likelier in it, however unlikely both are beside the blank. In a network that
    emits tokens late or for one frame only, that tells more of their sound than the frames of their emission.
    """
    path = path_of(log_probs[:, tokens], np.zeros(len(tokens), bool))
    return np.searchsorted(path, np.arange(len(tokens)))


def timed_words(
    log_probs: NDArray[np.float32],
    emissions: Sequence[Emission],
    tokenizer: Tokenizer,
    frame_seconds: Seconds,
    samples: NDArray[np.float32],
    rate: int,
    offset: Seconds,
) -> tuple[Word, ...]:
    """The words of a segment of audio `[T]` that begins at `offset`, whose tokens CTC emits in `log_probs` `[T', V]`.

    A word begins where its first token does on the best path without blanks. Next to a pause, it begins and ends with
    its sound.
    """
    words = words_in(emissions, tokenizer.names)
    if not words:
        return ()
    begin_of = dict(zip(emissions, beginnings(log_probs, [each.token for each in emissions]).tolist(), strict=True))
    begins = [begin_of[word[0]] * frame_seconds for word in words]
    firsts = [word[0].first * frame_seconds for word in words]
    begins[0] = firsts[0]  # the first token has all frames before it
    lasts = [(word[-1].last + 1) * frame_seconds for word in words]
    found = []
    for word, (start, end) in zip(words, _placed(begins, firsts, lasts, samples, rate), strict=True):
        if text := tokenizer.decode([each.token for each in word]).strip():
            best = [log_probs[each.first : each.last + 1, each.token].max() for each in word]
            confidence = round(min(1.0, float(np.exp(np.mean(best, dtype=np.float64)))), 4)
            found.append(Word(text, round(offset + start, 3), round(offset + end, 3), confidence))
    return tuple(found)


def _placed(
    begins: Sequence[Seconds],
    firsts: Sequence[Seconds],
    lasts: Sequence[Seconds],
    samples: NDArray[np.float32],
    rate: int,
) -> list[tuple[Seconds, Seconds]]:
    """The words' beginnings and ends by the sound: words begin at `begins` as CTC hears them, and their last tokens are
    emitted by `lasts`."""
    hop = max(1, round(rate * FRAME))
    level = levels(powers(samples, hop), 3)
    seconds, total = hop / rate, len(samples) / rate
    quiet = runs(~is_above(level, floor_of(level)))
    pauses = quiet[quiet[:, 1] - quiet[:, 0] >= _SHORTEST] * seconds
    is_long = pauses[:, 1] - pauses[:, 0] >= _PAUSE - seconds / 2
    before = pauses[(pauses[:, 0] < begins[0]) & (pauses[:, 1] < begins[0] + 2 * _DROWNED)]
    edges = [min(float(before[-1, 1]), begins[0] + _DROWNED) if len(before) else 0.0]
    for begin, first, last in zip(begins[1:], firsts[1:], lasts, strict=False):
        is_between = (pauses[:, 1] > min(last, begin)) & (pauses[:, 0] < max(begin, first))
        found = pauses[is_between & (is_long | (pauses[:, 1] < begin + _DROWNED))]
        if len(found):
            left, right = found[(found[:, 1] - found[:, 0]).argmax()]
            begin = min(float(right), begin + _DROWNED)
            edges.append(min(float(left), begin))
        else:
            edges.append(begin)
        edges.append(begin)
    after = pauses[(pauses[:, 1] > lasts[-1]) & (is_long | (pauses[:, 1] > total - 1.5 * seconds))]
    end = max(float(after[0, 0]), lasts[-1]) if len(after) else total
    edges.append((end + total) / 2 if total - end < _PAUSE else end)  # a weak consonant, or a pause: half of it each
    times = np.minimum(np.maximum.accumulate(edges), total).tolist()
    return list(zip(times[::2], times[1::2], strict=True))
