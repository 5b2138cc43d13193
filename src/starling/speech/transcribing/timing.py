"""Where words are: the frames in which CTC emits their tokens, and the sound around them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from starling.speech.tokens import BLANK, WORD_START, Tokenizer
from starling.speech.transcribing.segmenter import FRAME, Seconds, floor_of, is_above, levels, powers, runs
from starling.speech.transcribing.transcript import Word

_IMPOSSIBLE = -1e30


@dataclass(frozen=True)
class Emission:
    """A token, the frames `first` to `last` in which it is emitted, and its highest log-probability there."""

    token: int
    first: int
    last: int
    log_prob: float


def greedy_path(log_probs: NDArray[np.float32]) -> list[Emission]:
    """The tokens of the best token of each frame of `[T, V]`, repeats merged."""
    best = log_probs.argmax(axis=1)
    starts = np.flatnonzero(np.diff(best, prepend=-1))
    ends = np.append(starts[1:], len(best))
    return [
        Emission(int(best[first]), int(first), int(end) - 1, float(log_probs[first:end, best[first]].max()))
        for first, end in zip(starts, ends, strict=True)
        if best[first] != BLANK
    ]


def aligned(log_probs: NDArray[np.float32], tokens: Sequence[int]) -> list[Emission] | None:
    """The best alignment of CTC of given tokens with `[T, V]`; None if there are too few frames."""
    size, num_frames = 2 * len(tokens) + 1, len(log_probs)
    labels = np.full(size, BLANK)
    labels[1::2] = tokens
    skips = np.zeros(size, bool)  # where the blank before a token may be left out
    skips[3::2] = labels[3::2] != labels[1:-2:2]
    emitted = log_probs[:, labels].astype(np.float64)
    best = np.full(size, _IMPOSSIBLE)
    best[:2] = emitted[0, :2]
    steps = np.zeros((num_frames, size), np.int8)
    choices = np.full((3, size), _IMPOSSIBLE)
    for frame in range(1, num_frames):
        choices[0], choices[1, 1:] = best, best[:-1]
        choices[2, 2:] = np.where(skips[2:], best[:-2], _IMPOSSIBLE)
        steps[frame] = choices.argmax(axis=0)
        best = choices.max(axis=0) + emitted[frame]
    place = size - 1 if size == 1 or best[-1] >= best[-2] else size - 2
    if best[place] < _IMPOSSIBLE / 2:
        return None
    path = np.zeros(num_frames, np.int64)
    for frame in range(num_frames - 1, -1, -1):
        path[frame] = place
        place -= int(steps[frame, place])
    found = []
    for number, token in enumerate(tokens):
        frames = np.flatnonzero(path == 2 * number + 1)
        found.append(Emission(token, int(frames[0]), int(frames[-1]), float(log_probs[frames, token].max())))
    return found


def words_of(
    emissions: Sequence[Emission],
    tokenizer: Tokenizer,
    frame_seconds: Seconds,
    samples: NDArray[np.float32],
    rate: int,
    offset: Seconds,
) -> tuple[Word, ...]:
    """The words of a segment of audio `[T]` that begins at `offset`.

    CTC emits a token somewhere within its sound, often for one frame only. A word therefore reaches from the end of the
    pause before it to the beginning of the pause after it. Where two words have no pause between them, they meet at the
    quietest place.
    """
    names = tokenizer.names
    groups: list[list[Emission]] = []
    is_open = False
    for each in emissions:
        is_open = is_open and not names[each.token].startswith(WORD_START)
        if names[each.token] == WORD_START:
            continue
        if not is_open:
            groups.append([])
            is_open = True
        groups[-1].append(each)
    texts = [tokenizer.decode([each.token for each in group]).strip() for group in groups]
    spans = [(group[0].first * frame_seconds, (group[-1].last + 1) * frame_seconds) for group in groups]
    found = []
    for text, group, (start, end) in zip(texts, groups, _widened(spans, samples, rate), strict=True):
        if text:
            confidence = float(np.exp(np.mean([each.log_prob for each in group])))
            found.append(Word(text, round(offset + start, 3), round(offset + end, 3), round(min(1.0, confidence), 4)))
    return tuple(found)


def _widened(
    spans: Sequence[tuple[Seconds, Seconds]], samples: NDArray[np.float32], rate: int
) -> list[tuple[Seconds, Seconds]]:
    """The words' beginnings and ends by the sound, where they emit their tokens in `spans`."""
    hop = max(1, round(rate * FRAME))
    level = levels(powers(samples, hop), 3)
    count, total = len(level), len(samples) / rate
    if not spans or not count:
        return list(spans)
    quiet = ~is_above(level, floor_of(level))
    seconds = hop / rate

    def pause(begin: Seconds, end: Seconds) -> tuple[Seconds, Seconds]:
        """End of the sound and beginning of the next one between two times: around the longest pause."""
        first = min(max(0, int(begin / seconds)), count - 1)
        last = min(max(first + 1, round(end / seconds)), count)
        found = runs(quiet[first:last])
        if not len(found):
            place = (first + int(level[first:last].argmin()) + 0.5) * seconds
            return place, place
        left, right = found[(found[:, 1] - found[:, 0]).argmax()]
        return float(first + left) * seconds, float(first + right) * seconds

    before = pause(0.0, spans[0][0])[1] if quiet[: max(1, round(spans[0][0] / seconds))].any() else 0.0
    after = pause(spans[-1][1], total)[0] if quiet[min(count - 1, int(spans[-1][1] / seconds)) :].any() else total
    edges = [before]
    for (_, end), (start, _) in pairwise(spans):
        edges += pause(end, max(start, end))
    edges.append(after)
    heard = np.flatnonzero(~quiet)

    def trimmed(start: Seconds, end: Seconds) -> tuple[Seconds, Seconds]:
        """Without silence at either end: a token may be emitted before or after its sound."""
        inside = heard[np.searchsorted(heard, round(start / seconds)) : np.searchsorted(heard, round(end / seconds))]
        if not len(inside):
            return start, min(max(start, end), total)
        first, last = float(inside[0]) * seconds, float(inside[-1] + 1) * seconds
        return max(start, first), min(end, last, total)

    return [trimmed(*span) for span in zip(edges[::2], edges[1::2], strict=True)]
