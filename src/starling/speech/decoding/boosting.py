"""Boosting: phrases of a list replace words of a text where CTC's outputs come close to them."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from starling.errors import DataError
from starling.speech.decoding.decoders import Emission, words_in
from starling.speech.tokens import BLANK, WORD_START, Tokenizer

BOOST = 1.0
"""Default weight of phrases, in natural logarithms for each token."""


class Spotted(NamedTuple):
    """A phrase, and its frames, from the separator before it (if there is one) to the boundary after it."""

    phrase: str
    begin: int
    end: int


class Phrases:
    """Finds the phrases of a list in the outputs of CTC.

    The gain of a phrase with tokens y in a span of frames t, over its best path π, is

        max_π Σ_t (log p(t, π_t) - max_v log p(t, v)) + weight · |y|

    The sum is the log likelihood ratio of the phrase to the best path, at most 0. A phrase consists of whole words: its
    path begins with the utterance or a boundary of words, and ends with a boundary or the utterance. The search finds
    the set of phrases with the greatest total gain whose spans do not overlap.

    Source: Andrusenko et al. 2024, "Fast Context-Biasing for CTC and Transducer ASR models with CTC-based Word Spotter"
    (arXiv 2406.07096). There, hypotheses are pruned, and each is compared with the words that were decoded. This search
    is exact: outside phrases, it stays in a state that has the score of the best path, 0.

    Args:
        tokenizer: What the outputs mean.
        lines: `PHRASE` or `PHRASE<tab>WEIGHT`. Blank lines, and those that begin with #, are ignored.
        source: The origin of the lines, for messages.

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
        # the states of a phrase: before it, its first token, a blank, its second token, …, its last token, a blank
        rows = [[BLANK, *(label for token in tokens for label in (token, BLANK))] for tokens in spelled]
        sizes = np.array([len(row) for row in rows], np.int64)
        self._labels = labels = np.array([label for row in rows for label in row], np.int64)
        self._befores = np.cumsum(sizes) - sizes
        self._ends = np.concatenate([self._befores + sizes - 1, self._befores + sizes - 2])
        self._bonuses = np.tile(np.array(list(weights.values())) * (sizes // 2), 2)
        self._costs = np.full(len(labels), -np.inf)  # of skipping the blank before a state
        self._costs[2:][(labels[2:] != BLANK) & (labels[2:] != labels[:-2])] = 0.0
        self._costs[self._befores + 1] = -np.inf

    def __len__(self) -> int:
        return len(self._phrases)

    def __call__(self, log_probs: NDArray[np.float32], emissions: Sequence[Emission]) -> str | None:
        """The words of emissions in `[T, V]`, in which the phrases that are found replace the words whose middle is in
        their spans; None if no phrase is found."""
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
        found: dict[int, Spotted] = {}  # the last phrase of the best set, by its end
        total = 0.0  # of the best set so far
        separated, begin = 0.0, 0  # of the best set that is followed by a separator, and the separator's frame
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
        """For each frame of `[T, V]`, and after the last, where it costs nothing: the likeliest token that is or begins
        with a word boundary, its score, and the score of the second likeliest, which may follow the same token."""
        tokens = np.array([*self._starts, -1, -1])
        each = np.pad(scores[:, self._starts], ((0, 1), (0, 2)), constant_values=-np.inf)
        each[-1] = 0.0
        places, best = each.argmax(1), each.max(1)
        places[-1] = -1
        each[np.arange(len(each) - 1), places[:-1]] = -np.inf
        return zip(tokens[places].tolist(), best.tolist(), each.max(1).tolist(), strict=True)


def read_phrases(path: Path) -> list[str]:
    """The lines of a list of phrases. Raises DataError for a file that cannot be read, or contains no phrase."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"--boost {path}: cannot be read ({reason}); name a text file, one phrase a line") from error
    if not any(line.strip() and not line.startswith("#") for line in lines):
        raise DataError(f"--boost {path}: has no phrases; write one a line, or leave the option out")
    return lines


def _weighted(line: str, where: str, tokenizer: Tokenizer) -> tuple[str, float]:
    """The phrase in a line, with its weight."""
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
    """The phrases of the best set that ends by a given frame, in order."""
    spotted: list[Spotted] = []
    while place > 0:
        if (last := found.get(place)) is not None:
            spotted.insert(0, last)
        place = place - 1 if last is None else last.begin
    return spotted
