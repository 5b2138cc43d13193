"""Viterbi search for the best path through a row of states, including those of CTC, and for the best words of tied
states."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from starling.speech.decoding.decoders import Emission
from starling.speech.hybrid.tying import TiedStates
from starling.speech.tokens import BLANK, Tokenizer

NEVER = -torch.inf
_MOST_STEPS = 1 << 27
"""Maximum size, in bytes, of the back-pointers of the utterances that are searched together."""


def best_path(
    scores: NDArray[np.floating],
    lengths: NDArray[np.int64],
    optional: NDArray[np.bool_],
    num_positions: NDArray[np.int64],
) -> NDArray[np.int64]:
    """The position of every frame on the path with the highest total score, `[B, T]`.

    A path begins at the first position and ends at the last. From one frame to the next, it stays, moves to the next
    position, or skips an optional position. It may also leave out an optional first or last position. Among paths with
    equal scores, the one that moves later is chosen. After the end of an utterance, its last position is repeated.
    Scores are added in the precision of `scores`. We use NumPy because it takes an eighth of torch's time for one
    utterance, and a third for hundreds.

    Args:
        scores: The log-likelihood of position p at frame t, `[B, T, P]`.
        lengths: The number of frames of each utterance, `[B]`, which must be at least its number of positions that are
            not optional.
        optional: Whether a position may be skipped, `[B, P]`; no two positions in a row may be optional.
        num_positions: The number of positions of each utterance, `[B]`.
    """
    count, num_frames, width = scores.shape
    rows, shortest = np.arange(count), lengths.min()
    behind = np.full((count, width + 2), -np.inf, scores.dtype)  # behind[:, p + 2 - k]: k positions before p
    stayed, moved, before = behind[:, 2:], behind[:, 1:-1], behind[:, :-2]
    cost = np.full((count, width), -np.inf, scores.dtype)  # cost of skipping the position before
    cost[:, 2:][optional[:, 1:-1]] = 0.0
    stayed[:, 0] = scores[:, 0, 0]
    stayed[:, 1:2] = np.where(optional[:, :1], scores[:, 0, 1:2], -np.inf)
    steps = np.zeros((num_frames, count, width), np.int8)
    for frame in range(1, num_frames):
        step, skipped = steps[frame], before + cost
        np.greater(moved, stayed, out=step)
        best = np.maximum(moved, stayed)
        step[skipped > best] = 2
        best = np.maximum(skipped, best) + scores[:, frame]
        if frame >= shortest:
            is_inside = (frame < lengths)[:, None]
            step *= is_inside
            best = np.where(is_inside, best, stayed)
        stayed[:] = best
    place = num_positions - 1
    previous = np.maximum(place - 1, 0)
    place = np.where(optional[rows, place] & (stayed[rows, previous] > stayed[rows, place]), previous, place)
    path = np.empty((num_frames, count), np.int64)
    place += rows * width  # `take` indexes the flattened rows
    for frame in range(num_frames - 1, -1, -1):
        path[frame] = place
        place -= steps[frame].take(place)
    path -= rows * width
    return path.T


def path_of(scores: NDArray[np.floating], optional: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The best path `[T]` of one utterance, computed in double precision from scores `[T, P]`. `optional` `[P]` says
    which positions may be skipped."""
    lengths, num_positions = (np.asarray([size]) for size in scores.shape)
    path: NDArray[np.int64] = best_path(scores[None].astype(np.float64), lengths, optional[None], num_positions)[0]
    return path


def ctc_row(tokens: Sequence[int]) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """The positions of CTC for `tokens`, with a blank before and after each token, and whether each position may be
    skipped. Blanks may be skipped unless they are between equal tokens."""
    labels = np.full(2 * len(tokens) + 1, BLANK, np.int32)
    labels[1::2] = tokens
    optional = np.zeros(len(labels), np.bool_)
    optional[0::2] = True
    optional[2:-1:2] = labels[1:-2:2] != labels[3::2]
    return labels, optional


def ctc_spans(
    path: NDArray[np.int32] | NDArray[np.int64], num_tokens: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The first frame of each token and the frame after its last, on a path through the positions of `ctc_row`."""
    places = 2 * np.arange(num_tokens) + 1
    return np.searchsorted(path, places), np.searchsorted(path, places, side="right")


def aligned(log_probs: NDArray[np.float32], tokens: Sequence[int]) -> list[Emission] | None:
    """The best CTC alignment of `tokens` with log-probabilities `[T, V]`; None if there are too few frames."""
    labels, optional = ctc_row(tokens)
    if len(log_probs) < np.count_nonzero(~optional):
        return None
    firsts, behind = ctc_spans(path_of(log_probs[:, labels], optional), len(tokens))
    return [Emission(*span) for span in zip(tokens, firsts.tolist(), (behind - 1).tolist(), strict=True)]


class WordDecoder:
    """Searches the scaled likelihoods of tied states for the best texts.

    Words are chains of states. With `decoding.words: loop`, an utterance is any number of words, with optional silence
    between them. With `one`, it is a single word between two optional silences. All words are equally probable, and
    each word costs `decoding.word_penalty`.
    """

    def __init__(self, states: TiedStates, tokenizer: Tokenizer) -> None:
        self._states = states
        self._words = states.words
        speller = states.speller(tokenizer)
        silence = states.tied(speller.silence)
        is_loop = states.decoding.words == "loop"
        num_silences = 1 if is_loop else 2
        chains = [[silence]] * num_silences + [
            [states.tied(each) for each in speller.word(word)] for word in self._words
        ]
        sizes = [len(chain) for chain in chains]
        starts = torch.tensor([0, *accumulate(sizes[:-1])])
        ends = starts + torch.tensor(sizes) - 1
        word_starts, word_ends = starts[num_silences:], ends[num_silences:]
        self._emitted = torch.tensor([state for chain in chains for state in chain])
        self._is_start = torch.zeros(sum(sizes), dtype=torch.bool)
        self._is_start[starts] = True
        self._word_at: NDArray[np.int64] = np.full(sum(sizes), -1)
        self._word_at[word_starts.numpy()] = np.arange(len(self._words))
        first = torch.tensor([0])
        if is_loop:  # (states that are left, states that are entered)
            self._junctions, self._finals = [(ends, starts)], ends
        else:
            self._junctions = [(first, word_starts), (word_ends, first + 1)]
            self._finals = torch.cat([word_ends, first + 1])
        self._begin = torch.full((sum(sizes),), NEVER)
        self._begin[first] = 0.0
        self._cost = torch.zeros(sum(sizes))
        self._cost[word_starts] = states.decoding.word_penalty or 0.0
        self._begin[word_starts] = -self._cost[word_starts]

    def __call__(self, log_posteriors: Tensor, lengths: Tensor) -> list[str]:
        """The text of each utterance, from log posteriors `[B, T, S]` and lengths `[B]`; empty if no word fits."""
        scores = self._states.scaled(log_posteriors.float().cpu(), self._states.decoding.prior_scale)
        lengths = lengths.cpu()
        together = max(1, _MOST_STEPS // (scores.shape[1] * len(self._emitted)))
        texts: list[str] = []
        for first in range(0, len(scores), together):
            some = slice(first, first + together)
            texts += [
                " ".join(self._words[word] for word in words) for words in self._search(scores[some], lengths[some])
            ]
        return texts

    def _search(self, scores: Tensor, lengths: Tensor) -> list[list[int]]:
        """The indices of the words of each utterance."""
        count, num_frames, _ = scores.shape
        size = len(self._emitted)
        never = scores.new_full((count, 1), NEVER)
        steps = torch.zeros(num_frames, count, size, dtype=torch.int8)  # 0: stay, 1: next in the chain, 2 + j: junction
        entered_from = torch.zeros(num_frames, count, len(self._junctions), dtype=torch.int64)
        best = self._begin + scores[:, 0, self._emitted]
        for frame in range(1, num_frames):
            moved = torch.cat([never, best[:, :-1]], dim=1).masked_fill(self._is_start, NEVER)
            is_moved = moved > best
            following, step = torch.where(is_moved, moved, best), is_moved.to(torch.int8)
            for number, (leave, enter) in enumerate(self._junctions):
                value, place = best[:, leave].max(dim=1)
                entered_from[frame, :, number] = leave[place]
                entering = value[:, None] - self._cost[enter]
                is_entered = entering > following[:, enter]
                following[:, enter] = torch.where(is_entered, entering, following[:, enter])
                step[:, enter] = torch.where(is_entered, 2 + number, step[:, enter])
            following += scores[:, frame, self._emitted]
            inside = (frame < lengths)[:, None]
            best = torch.where(inside, following, best)
            steps[frame] = step * inside
        values, places = best[:, self._finals].max(dim=1)
        ends = self._finals[places]
        return [
            self._trace(int(ends[row]), steps[:last, row].numpy(), entered_from[:last, row].numpy())
            if torch.isfinite(values[row])
            else []
            for row, last in enumerate(lengths.tolist())
        ]

    def _trace(self, state: int, steps: NDArray[np.int8], entered_from: NDArray[np.int64]) -> list[int]:
        """The indices of the words on the path that ends in `state`, in order."""
        words = []
        for frame in range(len(steps) - 1, 0, -1):
            step = int(steps[frame, state])
            if step == 1:
                state -= 1
            elif step >= 2:
                words.append(int(self._word_at[state]))
                state = int(entered_from[frame, step - 2])
        words.append(int(self._word_at[state]))
        return [word for word in reversed(words) if word >= 0]
