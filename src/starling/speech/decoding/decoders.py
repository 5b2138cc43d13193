"""Searches without a language model: greedy CTC, greedy and beam search over the texts of a decoder, and an attention
decoder's scores of given texts."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray

from starling.speech.models.attention import END, AttentionDecoder
from starling.speech.models.network import Decoder
from starling.speech.models.transducer import Transducer
from starling.speech.tokens import BLANK, WORD_START, Tokenizer

Scored = tuple[list[int], float]
"""The tokens of a text, and the natural log of its probability, which includes the end of the text."""
MOST_IN_A_FRAME = 10
"""Maximum number of tokens that greedy search emits in one frame."""


class Emission(NamedTuple):
    """A token, and the frames `first` to `last` in which CTC emits it."""

    token: int
    first: int
    last: int


def greedy_decode(log_probs: torch.Tensor, lengths: torch.Tensor, tokenizer: Tokenizer) -> list[str]:
    """The text of each utterance by CTC, from `log_probs` `[B, T, V]` and `lengths` `[B]` in frames."""
    best = log_probs.argmax(dim=2).cpu().numpy()
    rows = zip(best, lengths.tolist(), strict=True)
    return [tokenizer.decode([each.token for each in emissions_of(row[:size])]) for row, size in rows]


def emissions_of(path: NDArray[np.int64]) -> list[Emission]:
    """What CTC emits on a path of tokens `[T]`."""
    starts = np.flatnonzero(np.diff(path, prepend=-1))
    ends = np.append(starts, len(path))[1:] - 1
    spans = zip(path[starts].tolist(), starts.tolist(), ends.tolist(), strict=True)
    return [Emission(*span) for span in spans if span[0] != BLANK]


def words_in(emissions: Iterable[Emission], names: Sequence[str]) -> list[list[Emission]]:
    """The emissions of each word; `names` are the names of the tokens."""
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


def greedy(decoder: Decoder, frames: torch.Tensor, lengths: torch.Tensor) -> list[list[int]]:
    """The tokens of each utterance, from frames `[B, T, W]` of the encoder with lengths `[B]`: always the likeliest
    token or, for a transducer, the likeliest step in each cell of the lattice."""
    if isinstance(decoder, AttentionDecoder):
        return _attention_greedy(decoder, frames, lengths)
    return _transducer_greedy(cast(Transducer, decoder), frames, lengths)


def best_text(decoder: Decoder, frames: torch.Tensor, beam: int) -> list[int]:
    """The likeliest tokens of one utterance by a beam search, from its frames `[T, W]`, without padding."""
    if isinstance(decoder, AttentionDecoder):
        return attention_beam(decoder, frames, beam)[0][0]
    return transducer_beam(cast(Transducer, decoder), frames, beam)[0][0]


def _attention_greedy(decoder: AttentionDecoder, frames: torch.Tensor, lengths: torch.Tensor) -> list[list[int]]:
    """The likeliest tokens of each utterance, at most as many as it has frames."""
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


def attention_beam(
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


def _transducer_greedy(decoder: Transducer, frames: torch.Tensor, lengths: torch.Tensor) -> list[list[int]]:
    encoded = decoder.frames(frames)
    last = torch.full((len(frames), decoder.context), BLANK, device=frames.device)
    predicted = decoder.after(last)
    found: list[list[int]] = [[] for _ in frames]
    for frame in range(frames.shape[1]):
        for _ in range(MOST_IN_A_FRAME):
            best = decoder.join(encoded[:, frame], predicted[:, 0]).argmax(1)
            emits = (best != BLANK) & (frame < lengths)
            if not bool(emits.any()):
                break
            for row in emits.nonzero()[:, 0].tolist():
                found[row].append(int(best[row]))
            last = torch.where(emits[:, None], torch.cat([last[:, 1:], best[:, None]], dim=1), last)
            predicted = decoder.after(last)
    return found


def transducer_beam(
    decoder: Transducer, frames: torch.Tensor, beam: int, num_best: int = 1, most_in_a_frame: int = 3
) -> list[Scored]:
    """At most `num_best` texts of one utterance, likeliest first, from its frames `[T, W]`, without padding.

    After each frame the `beam` likeliest texts are kept. A score sums over the alignments within the beam that have at
    most `most_in_a_frame` tokens in a frame.

    Source: the time-synchronous search of Saon et al. 2020, "Alignment-length synchronous decoding for RNN transducer".
    """
    encoded = decoder.frames(frames)
    known: dict[tuple[int, ...], torch.Tensor] = {}
    kept: dict[tuple[int, ...], float] = {(): 0.0}
    for frame in encoded:
        ended: dict[tuple[int, ...], float] = {}
        begun: Mapping[tuple[int, ...], float] = kept
        for number in range(most_in_a_frame + 1):
            log_probs = decoder.join(frame, _predictions(decoder, begun, known)).float().log_softmax(1)
            totals = log_probs + torch.tensor(list(begun.values()), device=frames.device)[:, None]
            for text, score in zip(begun, totals[:, BLANK].tolist(), strict=True):
                ended[text] = float(np.logaddexp(ended.get(text, -math.inf), score))
            if number == most_in_a_frame:
                break
            totals[:, BLANK] = -math.inf
            bar = sorted(ended.values(), reverse=True)[beam - 1] if len(ended) >= beam else -math.inf
            scores, places = totals.flatten().topk(min(beam, totals.numel() - len(totals)))
            texts = list(begun)
            begun = {
                (*texts[place // totals.shape[1]], place % totals.shape[1]): score
                for place, score in zip(places.tolist(), scores.tolist(), strict=True)
                if score > bar  # it can only fall: below, it would not be kept
            }
            if not begun:
                break
        kept = dict(sorted(ended.items(), key=lambda each: -each[1])[:beam])
    return [(list(text), score) for text, score in list(kept.items())[:num_best]]


def _predictions(
    decoder: Transducer, texts: Iterable[tuple[int, ...]], known: dict[tuple[int, ...], torch.Tensor]
) -> torch.Tensor:
    """The predictor's outputs after each text, `[N, width]`; `known` holds those computed before, by their context."""
    contexts = [((BLANK,) * decoder.context + text)[-decoder.context :] for text in texts]
    if missing := [each for each in dict.fromkeys(contexts) if each not in known]:
        rows = decoder.after(torch.tensor(missing, device=decoder.output.weight.device))
        known.update(zip(missing, rows[:, 0], strict=True))
    return torch.stack([known[each] for each in contexts])
