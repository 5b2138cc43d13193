"""Greedy CTC decoding: the best token of each frame, repeats merged, blanks dropped; and the words of such a path."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from starling.speech.tokens import BLANK, WORD_START, Tokenizer


class Emission(NamedTuple):
    """A token, and the frames `first` to `last` in which it is emitted."""

    token: int
    first: int
    last: int


def greedy_tokens(log_probs: torch.Tensor, lengths: torch.Tensor) -> list[list[int]]:
    """The token ids of each utterance, from `log_probs` `[B, T, V]` and `lengths` `[B]` in frames."""
    best = log_probs.argmax(dim=2).cpu().numpy()
    return [[each.token for each in emissions_of(row[:size])] for row, size in zip(best, lengths.tolist(), strict=True)]


def greedy_decode(log_probs: torch.Tensor, lengths: torch.Tensor, tokenizer: Tokenizer) -> list[str]:
    """The text of each utterance, from `log_probs` `[B, T, V]` and `lengths` `[B]` in frames."""
    return [tokenizer.decode(tokens) for tokens in greedy_tokens(log_probs, lengths)]


def emissions_of(path: NDArray[np.int64]) -> list[Emission]:
    """What CTC emits on a path of tokens `[T]`."""
    starts = np.flatnonzero(np.diff(path, prepend=-1))
    ends = np.append(starts, len(path))[1:] - 1
    spans = zip(path[starts].tolist(), starts.tolist(), ends.tolist(), strict=True)
    return [Emission(*span) for span in spans if span[0] != BLANK]


def words_in(emissions: Iterable[Emission], names: Sequence[str]) -> list[list[Emission]]:
    """The emissions of each word; `names` are those of the tokens."""
    words: list[list[Emission]] = []
    is_open = False
    for each in emissions:
        name = names[each.token]
        is_open = is_open and not name.startswith(WORD_START)
        if name != WORD_START:
            if not is_open:
                words.append([])
                is_open = True
            words[-1].append(each)
    return words
