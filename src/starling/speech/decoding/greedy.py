"""Greedy CTC decoding: the best token of each frame, repeats merged, blanks dropped."""

import torch

from starling.speech.tokens import BLANK, Tokenizer


def greedy_tokens(log_probs: torch.Tensor, lengths: torch.Tensor) -> list[list[int]]:
    """The token ids of each utterance, from `log_probs` `[B, T, V]` and `lengths` `[B]` in frames."""
    best = log_probs.argmax(dim=2)
    starts = torch.ones_like(best, dtype=torch.bool)
    starts[:, 1:] = best[:, 1:] != best[:, :-1]
    inside = torch.arange(best.shape[1], device=best.device) < lengths[:, None]
    keep = (starts & inside & (best != BLANK)).cpu()
    return [row[kept].tolist() for row, kept in zip(best.cpu(), keep, strict=True)]


def greedy_decode(log_probs: torch.Tensor, lengths: torch.Tensor, tokenizer: Tokenizer) -> list[str]:
    """The text of each utterance, from `log_probs` `[B, T, V]` and `lengths` `[B]` in frames."""
    return [tokenizer.decode(tokens) for tokens in greedy_tokens(log_probs, lengths)]
