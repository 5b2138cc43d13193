"""Searches without a language model: greedy CTC decoding, and greedy and beam search with a decoder.

An attention decoder can also score given texts, and listed phrases can replace words of a text where CTC's outputs
support them.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray

from starling.errors import DataError
from starling.speech.models.network import Decoder
from starling.speech.models.transducer import Transducer
from starling.speech.models.transformer import END, AttentionDecoder
from starling.speech.tokens import BLANK, WORD_START, Tokenizer

Scored = tuple[list[int], float]
"""The tokens of a text, and the natural log of the text's probability, which includes the end of the text."""
MOST_IN_A_FRAME = 10
"""Maximum number of tokens that greedy search emits in one frame."""


class Emission(NamedTuple):
    """A token, and the frames `first` to `last` in which CTC emits it."""

    token: int
    first: int
    last: int


def greedy_decode(log_probs: torch.Tensor, lengths: torch.Tensor, tokenizer: Tokenizer) -> list[str]:
    """The text that greedy CTC decoding finds for each utterance, from `log_probs` `[B, T, V]` and `lengths` `[B]` in
    frames."""
    best = log_probs.argmax(dim=2).cpu().numpy()
    rows = zip(best, lengths.tolist(), strict=True)
    return [tokenizer.decode([each.token for each in emissions_of(row[:size])]) for row, size in rows]


def emissions_of(path: NDArray[np.int64]) -> list[Emission]:
    """The tokens that CTC emits on a path `[T]`, with their frames."""
    starts = np.flatnonzero(np.diff(path, prepend=-1))
    ends = np.append(starts, len(path))[1:] - 1
    spans = zip(path[starts].tolist(), starts.tolist(), ends.tolist(), strict=True)
    return [Emission(*span) for span in spans if span[0] != BLANK]


def words_in(emissions: Iterable[Emission], names: Sequence[str]) -> list[list[Emission]]:
    """Group emissions by word. `names` are the names of the tokens."""
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
    """The tokens that greedy search finds for each utterance, from the encoder's frames `[B, T, W]` with lengths `[B]`.
    The search always takes the likeliest token or, with a transducer, the likeliest step in each cell of the
    lattice."""
    if isinstance(decoder, AttentionDecoder):
        return _attention_greedy(decoder, frames, lengths)
    return _transducer_greedy(cast(Transducer, decoder), frames, lengths)


def best_text(decoder: Decoder, frames: torch.Tensor, beam: int) -> list[int]:
    """The likeliest tokens that beam search finds for one utterance, from its frames `[T, W]` without padding."""
    if isinstance(decoder, AttentionDecoder):
        return attention_beam(decoder, frames, beam)[0][0]
    return transducer_beam(cast(Transducer, decoder), frames, beam)[0][0]


def _attention_greedy(decoder: AttentionDecoder, frames: torch.Tensor, lengths: torch.Tensor) -> list[list[int]]:
    """The tokens that greedy search finds for each utterance, at most as many as the utterance has frames."""
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
    """At most `num_best` texts of one utterance, likeliest first, from its frames `[T, W]` without padding.

    The search keeps the `beam` likeliest partial texts after each token. It ends when no partial text can become
    likelier than the complete texts already found. A text has at most `most_tokens` tokens; None allows as many as
    there are frames.
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
    """The natural log of the probability of each text, given one utterance's frames `[T, W]`."""
    if not texts:
        return []
    heard = decoder.hear(frames[None], torch.tensor([len(frames)], device=frames.device))
    rows = [torch.tensor(each, dtype=torch.long, device=frames.device) for each in texts]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    lengths = torch.tensor([len(each) for each in texts], device=frames.device)
    return decoder.score(heard.times(len(texts)), tokens, lengths).tolist()


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
    """At most `num_best` texts of one utterance, likeliest first, from its frames `[T, W]` without padding.

    The search keeps the `beam` likeliest texts after each frame. The score of a text is summed over the alignments
    within the beam that emit at most `most_in_a_frame` tokens in any frame.

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
                if score > bar  # a score can only fall, so a text below the bar would not be kept
            }
            if not begun:
                break
        kept = dict(sorted(ended.items(), key=lambda each: -each[1])[:beam])
    return [(list(text), score) for text, score in list(kept.items())[:num_best]]


def _predictions(
    decoder: Transducer, texts: Iterable[tuple[int, ...]], known: dict[tuple[int, ...], torch.Tensor]
) -> torch.Tensor:
    """The predictor's outputs `[N, width]` after each text. `known` caches the outputs already computed, by context."""
    contexts = [((BLANK,) * decoder.context + text)[-decoder.context :] for text in texts]
    if missing := [each for each in dict.fromkeys(contexts) if each not in known]:
        rows = decoder.after(torch.tensor(missing, device=decoder.output.weight.device))
        known.update(zip(missing, rows[:, 0], strict=True))
    return torch.stack([known[each] for each in contexts])


BOOST = 1.0
"""Default weight of a phrase per token, in natural-log units."""


class Spotted(NamedTuple):
    """A phrase and its frames, which extend from the separator before it, if any, to the boundary after it."""

    phrase: str
    begin: int
    end: int


class Phrases:
    """Finds the phrases of a list in the outputs of CTC.

    The gain of a phrase with tokens y in a span of frames t, over its best path π, is

        max_π Σ_t (log p(t, π_t) - max_v log p(t, v)) + weight · |y|

    The sum is the log-likelihood ratio of the phrase to the best path, which is at most 0. A phrase consists of whole
    words: its path begins at the beginning of the utterance or at a word boundary, and ends at a word boundary or at
    the end of the utterance. The search finds the set of phrases with the greatest total gain whose spans do not
    overlap.

    Source: Andrusenko et al. 2024, "Fast Context-Biasing for CTC and Transducer ASR models with CTC-based Word Spotter"
    (arXiv 2406.07096). The paper prunes hypotheses and compares each one with the decoded words. Our search is exact:
    outside phrases, it stays in a state whose score is that of the best path, 0.

    Args:
        tokenizer: The tokenizer of the network's outputs.
        lines: `PHRASE` or `PHRASE<tab>WEIGHT`. Blank lines and lines that begin with # are ignored.
        source: The origin of the lines, which error messages name.

    Raises:
        DataError: The tokenizer cannot spell a phrase, or a weight is not a number.
    """

    def __init__(self, tokenizer: Tokenizer, lines: Iterable[str], source: str) -> None:
        weights = dict(
            _weighted(line, f"{source}, line {number}", tokenizer)
            for number, line in enumerate(lines, 1)
            if line.strip() and not line.startswith("#")
        )
        self._tokenizer, self._phrases, names = tokenizer, list(weights), tokenizer.names
        self._separators = [token for token, name in enumerate(names) if name == WORD_START]
        self._starts = [token for token, name in enumerate(names) if name.startswith(WORD_START)]
        spelled = [tokenizer.encode(phrase) for phrase in weights]
        self._has_start = np.array([names[tokens[0]].startswith(WORD_START) for tokens in spelled], bool)
        # The states of a phrase: before the phrase, first token, blank, second token, blank, …, last token, blank.
        rows = [[BLANK, *(label for token in tokens for label in (token, BLANK))] for tokens in spelled]
        sizes = np.array([len(row) for row in rows], np.int64)
        self._labels = labels = np.array([label for row in rows for label in row], np.int64)
        self._befores = np.cumsum(sizes) - sizes
        self._ends = np.concatenate([self._befores + sizes - 1, self._befores + sizes - 2])
        self._bonuses = np.tile(np.array(list(weights.values())) * (sizes // 2), 2)
        self._costs = np.full(len(labels), -np.inf)  # cost of skipping the blank before each state
        self._costs[2:][(labels[2:] != BLANK) & (labels[2:] != labels[:-2])] = 0.0
        self._costs[self._befores + 1] = -np.inf

    def __len__(self) -> int:
        return len(self._phrases)

    def __call__(self, log_probs: NDArray[np.float32], emissions: Sequence[Emission]) -> str | None:
        """The words of `emissions`, with phrases boosted according to log-probabilities `[T, V]`. Each phrase that is
        found replaces the words whose middle lies in its span. Returns None if no phrase is found."""
        if not (spotted := self.spot(log_probs)):
            return None
        words = [((each.begin + each.end) / 2, each.phrase) for each in spotted]
        for word in words_in(emissions, self._tokenizer.names):
            middle = (word[0].first + word[-1].last + 1) / 2
            if not any(each.begin <= middle < each.end for each in spotted):
                words.append((middle, self._tokenizer.decode([each.token for each in word]).strip()))
        return " ".join(text for _, text in sorted(words) if text)

    def spot(self, log_probs: NDArray[np.float32]) -> list[Spotted]:
        """The phrases found in log-probabilities `[T, V]`, in order, by a Viterbi search over all phrases at once."""
        if not self._phrases:
            return []
        scores = (log_probs - log_probs.max(1, keepdims=True)).astype(np.float64)
        states, begins = np.full(len(self._labels) + 2, -np.inf), np.zeros(len(self._labels) + 2, np.int32)
        stayed, moved, behind = states[2:], states[1:-1], states[:-2]
        found: dict[int, Spotted] = {}  # end frame -> last phrase of the best set that ends there
        total = 0.0  # total gain of the best set so far
        separated, begin = 0.0, 0  # gain of the best set followed by a separator; the separator's frame
        end_labels = self._labels[self._ends]
        for frame, (likeliest, best, second) in enumerate(self._boundaries(scores)):
            gains = stayed[self._ends] + np.where(end_labels == likeliest, second, best) + self._bonuses
            if gains[last := int(gains.argmax())] > total:
                total = float(gains[last])
                phrase = self._phrases[last % len(self)]
                found[frame] = Spotted(phrase, int(begins[2:][self._ends[last]]), frame)
            if frame == len(scores):
                break
            stayed[self._befores] = np.where(self._has_start, total, separated)
            begins[2:][self._befores] = np.where(self._has_start, frame, begin)
            came = np.where(moved > stayed, begins[1:-1], begins[2:])
            paths, skipped = np.maximum(moved, stayed), behind + self._costs
            begins[2:] = np.where(skipped > paths, begins[:-2], came)
            stayed[:] = np.maximum(skipped, paths) + scores[frame, self._labels]
            separated += float(scores[frame, BLANK])
            with_separator = total + float(scores[frame, self._separators].max(initial=-np.inf))
            if with_separator > separated:
                separated, begin = with_separator, frame
        return _chosen(found, len(scores))

    def _boundaries(self, scores: NDArray[np.float64]) -> Iterable[tuple[int, float, float]]:
        """For each frame of `[T, V]`, the likeliest token that is or begins with a word boundary, its score, and the
        score of the second likeliest such token, which may follow the same token. There is also a boundary after the
        last frame, which costs nothing."""
        tokens = np.array([*self._starts, -1, -1])
        each = np.pad(scores[:, self._starts], ((0, 1), (0, 2)), constant_values=-np.inf)
        each[-1] = 0.0
        places, best = each.argmax(1), each.max(1)
        places[-1] = -1
        each[np.arange(len(each) - 1), places[:-1]] = -np.inf
        return zip(tokens[places].tolist(), best.tolist(), each.max(1).tolist(), strict=True)


def read_phrases(path: Path) -> list[str]:
    """The lines of a file of phrases. Raises DataError if the file cannot be read or contains no phrase."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"--boost {path}: cannot be read ({reason}); name a text file, one phrase a line") from error
    if not any(line.strip() and not line.startswith("#") for line in lines):
        raise DataError(f"--boost {path}: has no phrases; write one on each line, or leave the option out")
    return lines


def _weighted(line: str, where: str, tokenizer: Tokenizer) -> tuple[str, float]:
    """The phrase in a line, and its weight."""
    written, _, weight = line.partition("\t")
    phrase = " ".join(written.split())
    try:
        found = float(weight) if weight.strip() else BOOST
    except ValueError:
        found = math.nan
    if not phrase or not math.isfinite(found):
        raise DataError(f"{where}: write PHRASE, or PHRASE<tab>WEIGHT with a number for the weight, got {line[:100]!r}")
    if not _can_spell(tokenizer, phrase):
        missing = next((each for each in phrase if each != " " and not _can_spell(tokenizer, each)), " ")
        raise DataError(
            f"{where}: {phrase[:100]!r} has the character {missing!r} (U+{ord(missing):04X}), which the recogniser's "
            "tokens cannot spell; write it as the training texts do"
        )
    return phrase, found


def _can_spell(tokenizer: Tokenizer, text: str) -> bool:
    try:
        return bool(tokenizer.encode(text))
    except DataError:
        return False


def _chosen(found: dict[int, Spotted], place: int) -> list[Spotted]:
    """The phrases, in order, of the best set that ends by the frame `place`."""
    spotted: list[Spotted] = []
    while place > 0:
        if (last := found.get(place)) is not None:
            spotted.insert(0, last)
        place = place - 1 if last is None else last.begin
    return spotted
