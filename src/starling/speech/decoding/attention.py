"""Greedy and beam search over the texts of an attention decoder, and its scores of given texts."""

from collections.abc import Sequence

import torch

from starling.speech.models.attention import END, AttentionDecoder

Scored = tuple[list[int], float]
"""The tokens of a text, and the natural log of its probability, with the end of the text."""


def greedy(decoder: AttentionDecoder, frames: torch.Tensor, lengths: torch.Tensor) -> list[list[int]]:
    """The tokens of each utterance, from frames `[B, T, W]` of the encoder with lengths `[B]`: always the likeliest.

    A text has at most as many tokens as frames.
    """
    memory, past = decoder.hear(frames, lengths), None
    last = torch.full((len(frames), 1), END, device=frames.device)
    open_ones = torch.ones(len(frames), dtype=torch.bool, device=frames.device)
    steps: list[torch.Tensor] = []
    while bool((open_ones := open_ones & (lengths > len(steps))).any()):
        log_probs, past = decoder.log_probs(last, memory, past)
        last = log_probs.argmax(2).masked_fill(~open_ones[:, None], END)
        open_ones = open_ones & (last[:, 0] != END)
        steps.append(last)
    if not steps:
        return [[] for _ in frames]
    return [[token for token in row if token != END] for row in torch.cat(steps, dim=1).tolist()]


def beam_search(
    decoder: AttentionDecoder, frames: torch.Tensor, beam: int, num_best: int = 1, most_tokens: int | None = None
) -> list[Scored]:
    """At most `num_best` texts of one utterance, likeliest first, from its frames `[T, W]`, without padding.

    The `beam` likeliest beginnings are kept after each token. The search ends when none of them can become likelier
    than the texts found. A text has at most `most_tokens` tokens (None: as many as frames).
    """
    limit = len(frames) if most_tokens is None else most_tokens
    heard = decoder.hear(frames[None], torch.tensor([len(frames)], device=frames.device))
    ended: list[Scored] = []
    begun: list[list[int]] = [[]]
    scores = torch.zeros(1, device=frames.device)
    past = None
    for length in range(limit + 1):
        last = torch.tensor([[each[-1] if each else END] for each in begun], device=frames.device)
        log_probs, past = decoder.log_probs(last, heard.times(len(begun)), past)
        totals = scores[:, None] + log_probs[:, 0]
        ended += [(tokens, score) for tokens, score in zip(begun, totals[:, END].tolist(), strict=True)]
        ended = sorted(ended, key=lambda each: -each[1])[:num_best]
        totals[:, END] = float("-inf")
        scores, places = totals.flatten().topk(min(beam, totals.numel() - len(begun)))
        if length == limit or (len(ended) == num_best and float(scores[0]) <= ended[-1][1]):
            break
        rows, tokens = places // totals.shape[1], (places % totals.shape[1]).tolist()
        begun = [[*begun[row], token] for row, token in zip(rows.tolist(), tokens, strict=True)]
        past = [each[:, rows] for each in past]
    return ended


def scores(decoder: AttentionDecoder, frames: torch.Tensor, texts: Sequence[Sequence[int]]) -> list[float]:
    """The natural log of the probability of each of the texts, for one utterance's frames `[T, W]`."""
    if not texts:
        return []
    heard = decoder.hear(frames[None], torch.tensor([len(frames)], device=frames.device))
    rows = [torch.tensor(each, dtype=torch.long, device=frames.device) for each in texts]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    lengths = torch.tensor([len(each) for each in texts], device=frames.device)
    found: list[float] = decoder.score(heard.times(len(texts)), tokens, lengths).tolist()
    return found
