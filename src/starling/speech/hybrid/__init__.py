"""The sections of a recipe whose loss is `frames`."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from starling.configuration import Config


class SequencesConfig(Config):
    """What a mini-batch holds; the `sequences:` section of a recipe."""

    frames: int = Field(default=21, ge=1)
    """Frames of a sub-sequence; the rest of an utterance is shorter."""
    batch: int = Field(default=128, ge=1)
    """Sub-sequences in a micro-batch, drawn from all utterances."""


class StatesConfig(Config):
    """The tied states, which are the network's outputs; the `states:` section of a recipe."""

    number: int = Field(default=100, ge=2, le=1_000_000)
    """Tied states, at most."""
    per_unit: int = Field(default=3, ge=1, le=10)
    """States of a character, from left to right."""
    context: Literal[0, 1, 2] = 1
    """Neighbours on either side that a state depends on, within the word."""
    min_frames: int = Field(default=20, ge=1)
    """Frames of the training set that a tied state must have."""


class AlignmentConfig(Config):
    """Where the states of the frames come from; the `alignment:` section of a recipe."""

    experiment: Path | None = None
    """An experiment, or a recogniser's folder, whose model aligns: one with tied states by its scaled likelihoods, or
    one trained with CTC; null: a flat start, which divides each utterance equally."""
    rounds: int | None = Field(default=None, ge=0, le=1000)
    """Rounds of estimating a Gaussian for each state and aligning with it; null: 20 after a flat start, 5 after CTC, 0
    after a model with tied states."""
