"""The weights of a beam search, tuned on utterances whose texts are known."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median_low

import numpy as np
from numpy.typing import NDArray

from starling.configuration import Config
from starling.speech.decoding.beam import SearchPool, Weights
from starling.speech.decoding.config import DecodingConfig, Vocabulary
from starling.speech.scoring.score import count_errors

LM_WEIGHTS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
WORD_PENALTIES = (-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0)
BEAMS = (8, 16, 32, 64, 128)
USUAL = Weights(lm_weight=0.5, word_penalty=0.0, beam=64)
"""Where there is nothing to tune on; of these, `beam` is also that of the search for the other weights."""


class Trial(Config):
    """Weights, and the errors that a search with them made."""

    vocabulary: Vocabulary
    weights: Weights
    word_errors: int
    character_errors: int

    @property
    def errors(self) -> tuple[int, int]:
        """The smaller, the better."""
        return self.word_errors, self.character_errors


def given(config: DecodingConfig) -> Weights:
    """The usual weights, but those that a recipe sets."""
    fixed = {"lm_weight": config.lm_weight, "word_penalty": config.word_penalty, "beam": config.beam}
    return USUAL.model_copy(update={key: value for key, value in fixed.items() if value is not None})


def tune(
    pools: Mapping[Vocabulary, SearchPool],
    utterances: Mapping[str, NDArray[np.float32]],
    references: Mapping[str, str],
    config: DecodingConfig,
    progress: Callable[[], None] = lambda: None,
) -> tuple[Trial, list[Trial]]:
    """The best trial, and all of them, of the searches in `pools`, by vocabulary.

    One weight after another is varied, for each vocabulary: the language model's, the word penalty, and again the
    language model's, in finer steps. At the end comes the beam: the narrowest one that makes as few errors as any.
    Among equally good values, the one in the middle is taken. What the recipe sets is not varied. `progress` is called
    after each trial.
    """
    trials: list[Trial] = []

    def attempt(vocabulary: Vocabulary, weights: Weights) -> Trial:
        known = (each for each in trials if (each.vocabulary, each.weights) == (vocabulary, weights))
        if (found := next(known, None)) is not None:
            return found
        results = pools[vocabulary](list(utterances.values()), weights)
        texts = {name: each[0].text if each else "" for name, each in zip(utterances, results, strict=True)}
        words, characters = count_errors(references, texts)
        trials.append(
            Trial(
                vocabulary=vocabulary,
                weights=weights,
                word_errors=words.errors,
                character_errors=characters.errors,
            )
        )
        progress()
        return trials[-1]

    def vary(start: Trial, key: str, values: Iterable[float]) -> Trial:
        if getattr(config, key) is not None:
            return start
        tried = [attempt(start.vocabulary, start.weights.model_copy(update={key: value})) for value in values]
        return _middle_of_best([start, *tried], key)

    bests = []
    for vocabulary in pools:
        best = vary(attempt(vocabulary, given(config)), "lm_weight", LM_WEIGHTS)
        if vocabulary == "closed":
            best = vary(best, "word_penalty", WORD_PENALTIES)
        bests.append(vary(best, "lm_weight", _between(best.weights.lm_weight)))
    best = min(bests, key=lambda trial: trial.errors)
    if config.beam is None:
        tried = [attempt(best.vocabulary, best.weights.model_copy(update={"beam": beam})) for beam in BEAMS]
        best = min(tried, key=lambda trial: (trial.errors, trial.weights.beam))
    return best, trials


def _between(weight: float) -> list[float]:
    """Half-way to the neighbours of a weight."""
    lower = max((each for each in LM_WEIGHTS if each < weight), default=weight)
    upper = min((each for each in LM_WEIGHTS if each > weight), default=weight)
    return [(lower + weight) / 2, (weight + upper) / 2]


def _middle_of_best(trials: Sequence[Trial], key: str) -> Trial:
    fewest = min(trial.errors for trial in trials)
    best = {getattr(trial.weights, key): trial for trial in trials if trial.errors == fewest}
    return best[median_low(best)]
