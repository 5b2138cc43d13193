"""Converts log-probabilities to text, with greedy decoding or a beam search with an n-gram language model.

This module defines the `decoding:` section of a recipe."""

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
    """How the network's outputs become words. Weights are in natural logarithms."""

    word_list: Path | None = None
    """A text file with one word on each line; null uses the words of the training texts."""
    word_penalty: float | None = None
    """Cost of each word, in natural-log likelihood; below 0, texts have more words. null: 0, or for loss: ctc a value
    tuned on the validation set."""

    words: Literal["loop", "one"] = "loop"
    """Number of words in an utterance: `loop` allows any number, `one` exactly one; for loss: frames."""
    prior_scale: float = Field(default=1.0, ge=0.0)
    """The multiple of a state's log prior that is subtracted from its log posterior; for loss: frames."""

    vocabulary: Vocabulary | None = None
    """`closed` allows known words only, with n-grams of words; `open` allows any word, with n-grams of tokens. null:
    `closed` with a word_list or lm, otherwise whichever scores better on the validation set; for loss: ctc."""
    lm: Path | None = None
    """An ARPA file of words; null estimates a model from the training texts; for loss: ctc."""
    order: int | None = Field(default=None, ge=1, le=6)
    """Order of the estimated n-grams; null: 3 for words, 6 for tokens; for loss: ctc."""
    lm_weight: float | None = Field(default=None, ge=0.0)
    """Weight of the language model's log probability; null tunes it on the validation set; for loss: ctc."""
    beam: int | None = Field(default=None, ge=1)
    """Number of hypotheses kept; null tunes it on the validation set; for loss: ctc."""
    num_best: int = Field(default=10, ge=1)
    """Number of hypotheses written for each utterance; for loss: ctc."""

    decoder_beam: int = Field(default=8, ge=1)
    """Number of hypotheses kept in the beam search of model.decoder."""
    attention_weight: float | None = Field(default=None, ge=0.0)
    """Weight of the attention decoder's log probability when it chooses among the num_best hypotheses; null tunes it on
    the validation set."""
