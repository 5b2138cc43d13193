"""Where words are: what CTC hears in each frame, and pauses in the sound."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from starling.speech.tokens import BLANK, WORD_START, Tokenizer
from starling.speech.transcribing.segmenter import FRAME, Seconds, floor_of, is_above, levels, powers, runs
from starling.speech.transcribing.transcript import Word

_IMPOSSIBLE = -1e30
_PAUSE: Seconds = 0.15
"""What is quiet for so long is a pause; for less, it may be a part of a consonant: weak ones drown in noise."""
_DROWNED: Seconds = 0.05
"""How long a word may be heard before its sound rises above the noise."""
_SHORTEST = 2
"""Frames of the shortest quiet stretch that is looked at."""


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


def beginnings(log_probs: NDArray[np.float32], tokens: Sequence[int]) -> NDArray[np.int64]:
    """The frame in which each of the tokens begins, `[N]`, on the best path through `[T, V]` without blanks.

    A frame belongs to the token that is likelier in it, however unlikely both are beside the blank. In a network that
    emits tokens late or for one frame only, that tells more of their sound than the frames of their emission.
    """
    scores = log_probs[:, tokens].astype(np.float64)
    best = np.full(len(tokens), _IMPOSSIBLE)
    best[0] = scores[0, 0]
    is_new = np.zeros(scores.shape, bool)
    for frame in range(1, len(scores)):
        np.greater(best[:-1], best[1:], out=is_new[frame, 1:])
        best[1:] = np.maximum(best[1:], best[:-1])
        best += scores[frame]
    found = np.zeros(len(tokens), np.int64)
    place = len(tokens) - 1
    for frame in range(len(scores) - 1, 0, -1):
        if is_new[frame, place]:
            found[place] = frame
            place -= 1
    return found


def words_of(
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
    names = tokenizer.names
    groups: list[list[int]] = []
    is_open = False
    for place, each in enumerate(emissions):
        is_open = is_open and not names[each.token].startswith(WORD_START)
        if names[each.token] == WORD_START:
            continue
        if not is_open:
            groups.append([])
            is_open = True
        groups[-1].append(place)
    if not groups:
        return ()
    frames = beginnings(log_probs, [each.token for each in emissions])
    begins = [float(frames[group[0]]) * frame_seconds for group in groups]
    firsts = [emissions[group[0]].first * frame_seconds for group in groups]
    begins[0] = firsts[0]  # the first token has all frames before it
    lasts = [(emissions[group[-1]].last + 1) * frame_seconds for group in groups]
    found = []
    for group, (start, end) in zip(groups, _placed(begins, firsts, lasts, samples, rate), strict=True):
        if text := tokenizer.decode([emissions[place].token for place in group]).strip():
            confidence = float(np.exp(np.mean([emissions[place].log_prob for place in group])))
            found.append(Word(text, round(offset + start, 3), round(offset + end, 3), round(min(1.0, confidence), 4)))
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
