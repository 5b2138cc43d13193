"""Converts log-probabilities to text, with greedy decoding or a beam search with an n-gram language model.

This module defines the `decoding:` section of a recipe.
"""

from pathlib import Path
from typing import Literal

from pydantic import Field

from starling.configuration import Config

Vocabulary = Literal["closed", "open"]
OF_FRAMES = ("words", "prior_scale")
"""Keys that apply only to `loss: frames`."""
OF_CTC = ("vocabulary", "lm", "order", "lm_weight", "beam", "num_best", "decoder_beam", "attention_weight")
"""Keys that apply only to `loss: ctc`."""


class DecodingConfig(Config):
    """The search that turns the network's outputs into words. Weights refer to natural logarithms."""

    word_list: Path | None = None
    """A text file with one word on each line; null uses the words of the training texts."""
    word_penalty: float | None = None
    """Cost of each word, in natural-log likelihood; with a value below 0, texts have more words. With null, the cost is
    0 or, for loss: ctc, tuned on the validation set."""

    words: Literal["loop", "one"] = "loop"
    """Number of words in an utterance, for loss: frames. `loop` allows any number; `one` allows exactly one."""
    prior_scale: float = Field(default=1.0, ge=0.0)
    """Multiple of a state's log prior that is subtracted from its log posterior, for loss: frames."""

    vocabulary: Vocabulary | None = None
    """The vocabulary, for loss: ctc. `closed` allows only known words, with n-grams of words; `open` allows any word,
    with n-grams of tokens. null means `closed` with a word_list or lm, and otherwise the one that scores better on the
    validation set."""
    lm: Path | None = None
    """An ARPA file with n-grams of words, for loss: ctc. null estimates a language model from the training texts."""
    order: int | None = Field(default=None, ge=1, le=6)
    """Order of the estimated n-grams, for loss: ctc. null means 3 for words and 6 for tokens."""
    lm_weight: float | None = Field(default=None, ge=0.0)
    """Weight of the language model's log probability, for loss: ctc. null tunes it on the validation set."""
    beam: int | None = Field(default=None, ge=1)
    """Number of hypotheses that the beam search keeps, for loss: ctc. null tunes it on the validation set."""
    num_best: int = Field(default=10, ge=1)
    """Number of hypotheses that are written for each utterance, for loss: ctc."""

    decoder_beam: int = Field(default=8, ge=1)
    """Number of hypotheses that the beam search of model.decoder keeps."""
    attention_weight: float | None = Field(default=None, ge=0.0)
    """Weight of the attention decoder's log probability when it chooses among the num_best hypotheses; null tunes it on
    the validation set."""
