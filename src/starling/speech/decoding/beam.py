"""CTC prefix beam search with an n-gram language model, using flashlight-text."""

import contextlib
import math
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from starling.configuration import Config
from starling.errors import DataError
from starling.speech.decoding.decoders import emissions_of, words_in
from starling.speech.decoding.ngram import END, UNKNOWN
from starling.speech.tokens import BLANK, WORD_START, Tokenizer

_MOST_TOKENS = 50
"""Number of tokens, best first, that the search considers in each frame."""
_BEAM_LOSS = 50.0
"""Largest difference in score, in natural-log units, from the best hypothesis of a frame. Worse hypotheses are
dropped."""
_NEVER = -1e9  # log-probability of an impossible event; an infinity would become NaN
_LN10 = math.log(10)


class Weights(Config):
    """The weights of a search, which maximises

        log p_ctc(text | audio) + lm_weight log p_lm(text) - word_penalty * words

    p_ctc is summed over all alignments within the beam. The penalty applies only to a closed vocabulary.
    """

    lm_weight: float = 0.5
    word_penalty: float = 0.0
    beam: int = 50


@dataclass(frozen=True)
class TimedWord:
    """A word with its times in seconds: the first frame of its first token, and the last frame of its last token."""

    word: str
    start: float
    end: float


@dataclass(frozen=True)
class Hypothesis:
    """One possible text of an utterance, with its scores."""

    text: str
    score: float  # the quantity that the search maximises, in natural-log units
    lm: float  # the language model's unweighted log-probability, including the end of the sentence
    words: tuple[TimedWord, ...]


class BeamSearch:
    """Finds the best hypotheses for the log-probabilities of CTC.

    Args:
        tokenizer: The tokenizer of the network's outputs.
        lm: An ARPA file with n-grams of words for a closed vocabulary, or of tokens (`Tokenizer.names`) for an open
            one.
        words: The closed vocabulary; None allows any sequence of tokens.
        frame_seconds: Seconds between two rows of log-probabilities.
    """

    def __init__(
        self, tokenizer: Tokenizer, lm: Path, words: Sequence[str] | None = None, frame_seconds: float = 0.01
    ) -> None:
        self.tokenizer = tokenizer
        self.lm = lm
        self.words = None if words is None else list(words)
        self.frame_seconds = frame_seconds
        self._names = [*tokenizer.names, WORD_START]  # the last name ends the utterance if no token separates words
        spaces = [token for token, name in enumerate(tokenizer.names) if name == WORD_START]
        is_pieces = any(len(name) > 1 and name.startswith(WORD_START) for name in tokenizer.names)
        self._ends_words = not is_pieces
        self._separator = len(self._names) - 1 if is_pieces or not spaces else spaces[0]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.tokenizer, self.lm, self.words, self.frame_seconds)

    def __call__(self, log_probs: NDArray[np.float32], weights: Weights, num_best: int = 1) -> list[Hypothesis]:
        """At most `num_best` different texts of one utterance, best first, from log-probabilities `[T, V]`. The list is
        empty if no word fits."""
        emissions = self._emissions(log_probs)
        found: dict[str, Hypothesis] = {}
        for each in self._decoder(weights).decode(emissions.ctypes.data, *emissions.shape):
            if each.score > _NEVER / 2:
                hypothesis = self._hypothesis(each, len(log_probs))
                found.setdefault(hypothesis.text, hypothesis)
                if len(found) == num_best:
                    break
        return list(found.values())

    def _emissions(self, log_probs: NDArray[np.float32]) -> NDArray[np.float32]:
        """The log-probabilities with an added column for the end of the utterance and, if words end with a separator,
        an added frame with the separator."""
        frames, tokens = log_probs.shape
        extra = int(self.words is not None and self._ends_words)
        emissions = np.full((frames + extra, tokens + 1), _NEVER, dtype=np.float32)
        emissions[:frames, :tokens] = np.maximum(log_probs, _NEVER)
        if extra:
            emissions[-1, self._separator] = 0.0
        return emissions

    def _hypothesis(self, result: Any, num_frames: int) -> Hypothesis:
        """The hypothesis in a result of flashlight, which adds a frame at either end."""
        path = np.asarray(result.tokens[1 : num_frames + 1], np.int64)
        timed = tuple(
            TimedWord(
                self.tokenizer.decode([each.token for each in word]).strip(),
                round(word[0].first * self.frame_seconds, 4),
                round((word[-1].last + 1) * self.frame_seconds, 4),
            )
            for word in words_in(emissions_of(path), self._names)
        )
        return Hypothesis(" ".join(each.word for each in timed), result.score, result.lmScore * _LN10, timed)

    def _decoder(self, weights: Weights) -> Any:
        from flashlight.lib.text import decoder

        common = {
            "beam_size": weights.beam,
            "beam_size_token": min(len(self._names), _MOST_TOKENS),
            "beam_threshold": _BEAM_LOSS,
            "lm_weight": weights.lm_weight * _LN10,  # flashlight's language model has logarithms to base 10
            "sil_score": 0.0,
            "log_add": True,
            "criterion_type": decoder.CriterionType.CTC,
        }
        if self.words is None:
            free = decoder.LexiconFreeDecoderOptions(**common)
            # Flashlight assumes that the silence token was emitted before the first frame, so we pass a token that the
            # network does not have.
            return decoder.LexiconFreeDecoder(free, self._language_model, len(self._names) - 1, BLANK, [])
        options = decoder.LexiconDecoderOptions(**common, word_score=-weights.word_penalty, unk_score=-math.inf)
        return decoder.LexiconDecoder(
            options, self._trie, self._language_model, self._separator, BLANK, len(self.words), [], False
        )

    @cached_property
    def _language_model(self) -> Any:
        from flashlight.lib.text.decoder.kenlm import KenLM
        from flashlight.lib.text.dictionary import Dictionary

        entries = [*self._names[:-1], END] if self.words is None else [*self.words, UNKNOWN]
        try:
            with _quiet():
                return KenLM(str(self.lm), Dictionary(entries))
        except (RuntimeError, ValueError) as error:
            raise DataError(f"{self.lm}: KenLM cannot read this language model: {error}") from error

    @cached_property
    def _trie(self) -> Any:
        """The closed vocabulary, spelled in tokens."""
        from flashlight.lib.text import decoder

        trie = decoder.Trie(len(self._names), self._separator)
        start = self._language_model.start(False)
        for number, word in enumerate(self.words or ()):
            spelling = [*self.tokenizer.encode(word, word), *([self._separator] if self._ends_words else [])]
            trie.insert(spelling, number, self._language_model.score(start, number)[1])
        trie.smear(decoder.SmearingMode.MAX)
        return trie


class SearchPool(contextlib.AbstractContextManager["SearchPool"]):
    """A context manager that runs searches in `jobs` processes, or in this process for one job."""

    def __init__(self, search: BeamSearch, jobs: int = 1) -> None:
        self._search = search
        self._jobs = jobs
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(jobs, context, _begin, (search,)) if jobs > 1 else None

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def __call__(
        self, utterances: Sequence[NDArray[np.float32]], weights: Weights, num_best: int = 1
    ) -> list[list[Hypothesis]]:
        """The hypotheses of each utterance. They do not depend on the number of jobs."""
        if self._pool is None:
            return [self._search(each, weights, num_best) for each in utterances]
        chunk = max(1, len(utterances) // (4 * self._jobs))
        search = partial(_search, weights=weights, num_best=num_best)
        return list(self._pool.map(search, utterances, chunksize=chunk))


_searching: BeamSearch
"""The search of this worker process."""


def _begin(search: BeamSearch) -> None:
    global _searching
    _searching = search


def _search(utterance: NDArray[np.float32], weights: Weights, num_best: int) -> list[Hypothesis]:
    return _searching(utterance, weights, num_best)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide KenLM's progress bar, which it writes to file descriptor 2."""
    kept = os.dup(2)
    try:
        with Path(os.devnull).open("w") as nothing:
            os.dup2(nothing.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
