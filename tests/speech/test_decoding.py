"""Greedy decoding against the simplest Python implementation."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from starling.speech.decoding.decoders import greedy_decode
from starling.speech.tokens import CharacterTokenizer


def naive(path: list[int]) -> list[int]:
    tokens, previous = [], 0
    for token in path:
        if token != previous and token != 0:
            tokens.append(token)
        previous = token
    return tokens


def as_log_probs(paths: list[list[int]], vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities whose best tokens are `paths`, with random values in the padding."""
    longest = max(len(path) for path in paths)
    log_probs = torch.randn(len(paths), longest, vocab_size, generator=torch.Generator().manual_seed(0))
    for row, path in enumerate(paths):
        for frame, token in enumerate(path):
            log_probs[row, frame, token] += 100
    return log_probs, torch.tensor([len(path) for path in paths])


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=5))
def test_greedy_decoding_merges_repeats_and_drops_blanks(paths):
    """For any best path, the tokens are those of a loop over its frames, with padding ignored."""
    texts = ["".join("ABC"[token - 1] for token in naive(path)) for path in paths]
    assert greedy_decode(*as_log_probs(paths, 4), CharacterTokenizer("ABC")) == texts


def test_tokens_become_text():
    """A blank between equal letters keeps both letters."""
    log_probs, lengths = as_log_probs([[1, 1, 0, 2, 0, 2], [0, 0]], 3)
    assert greedy_decode(log_probs, lengths, CharacterTokenizer("AB")) == ["ABB", ""]
