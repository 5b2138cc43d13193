"""From log-probabilities to text: greedy decoding, and a beam search with an n-gram language model.

Here is the section `decoding:` of a recipe."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from starling.configuration import Config

Vocabulary = Literal["closed", "open"]
OF_FRAMES = ("words", "prior_scale")
"""Keys for `loss: frames` alone."""
OF_CTC = ("vocabulary", "lm", "order", "lm_weight", "beam", "num_best", "decoder_beam", "attention_weight")
"""Keys for `loss: ctc` alone."""


class DecodingConfig(Config):
    """How the network's outputs become words. Weights are in natural logarithms."""

    word_list: Path | None = None
    """A text file, one word a line; null: the words of the training texts."""
    word_penalty: float | None = None
    """What each word costs, in natural-log likelihood; more words below 0. null: 0, and for loss: ctc tuned on the
    validation set."""

    words: Literal["loop", "one"] = "loop"
    """Words of an utterance: any number, or one; for loss: frames."""
    prior_scale: float = Field(default=1.0, ge=0.0)
    """How much of a state's log prior is taken from its log posterior; for loss: frames."""

    vocabulary: Vocabulary | None = None
    """closed: only known words, with n-grams of words. open: any word, with n-grams of tokens. null: closed with a
    word_list or lm, otherwise what scores better on the validation set; for loss: ctc."""
    lm: Path | None = None
    """An ARPA file of words; null: estimated from the training texts; for loss: ctc."""
    order: int | None = Field(default=None, ge=1, le=6)
    """Order of the n-grams that are estimated; null: 3 words or 6 tokens; for loss: ctc."""
    lm_weight: float | None = Field(default=None, ge=0.0)
    """Weight of the language model's log probability; null: tuned on the validation set; for loss: ctc."""
    beam: int | None = Field(default=None, ge=1)
    """Hypotheses kept; null: tuned on the validation set; for loss: ctc."""
    num_best: int = Field(default=10, ge=1)
    """Hypotheses written for each utterance; for loss: ctc."""

    decoder_beam: int = Field(default=8, ge=1)
    """Hypotheses kept in the beam search of model.decoder."""
    attention_weight: float | None = Field(default=None, ge=0.0)
    """Weight of the attention decoder's log probability when it chooses among the num_best; null: tuned on the
    validation set."""
