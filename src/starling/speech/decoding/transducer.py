"""Greedy and beam search over the texts of a transducer."""

import math
from collections.abc import Iterable, Mapping

import torch

from starling.speech.decoding.attention import Scored
from starling.speech.models.transducer import Transducer
from starling.speech.tokens import BLANK

MOST_IN_A_FRAME = 10
"""Tokens that greedy search emits in one frame, at most."""


def greedy(decoder: Transducer, frames: torch.Tensor, lengths: torch.Tensor) -> list[list[int]]:
    """The tokens of each utterance, from frames `[B, T, W]` of the encoder with lengths `[B]`: the likeliest step of
    each cell of the lattice."""
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


def beam_search(
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
                ended[text] = _sum(ended.get(text, -math.inf), score)
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
    """The predictor's outputs after each text, `[N, width]`; `known` has those computed before, by their context."""
    contexts = [((BLANK,) * decoder.context + text)[-decoder.context :] for text in texts]
    if missing := [each for each in dict.fromkeys(contexts) if each not in known]:
        rows = decoder.after(torch.tensor(missing, device=decoder.output.weight.device))
        known.update(zip(missing, rows[:, 0], strict=True))
    return torch.stack([known[each] for each in contexts])


def _sum(first: float, second: float) -> float:
    """log(exp(first) + exp(second))."""
    larger, smaller = max(first, second), min(first, second)
    return larger if smaller == -math.inf else larger + math.log1p(math.exp(smaller - larger))
