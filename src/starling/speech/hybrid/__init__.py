"""The sections of a recipe whose loss is `frames`."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from starling.configuration import Config


class SequencesConfig(Config):
    """The contents of a mini-batch; the `sequences:` section of a recipe."""

    frames: int = Field(default=21, ge=1)
    """Number of frames of a sub-sequence; the remainder of an utterance is shorter."""
    batch: int = Field(default=128, ge=1)
    """Number of sub-sequences in a micro-batch, drawn from all utterances."""


class StatesConfig(Config):
    """The tied states, which are the network's outputs; the `states:` section of a recipe."""

    number: int = Field(default=100, ge=2, le=1_000_000)
    """Maximum number of tied states."""
    per_unit: int = Field(default=3, ge=1, le=10)
    """Number of states of a character, from left to right."""
    context: Literal[0, 1, 2] = 1
    """Number of neighbours on either side, within the word, on which a state depends."""
    min_frames: int = Field(default=20, ge=1)
    """Minimum number of frames of the training set for each tied state."""


class AlignmentConfig(Config):
    """The alignment of frames to states; the `alignment:` section of a recipe."""

    experiment: Path | None = None
    """The model that aligns the training set: an experiment, or a recogniser's folder. A model with tied states aligns
    by its scaled likelihoods, and a CTC model by its best path. null makes a flat start, which divides each utterance
    equally."""
    rounds: int | None = Field(default=None, ge=0, le=1000)
    """Number of rounds that estimate a Gaussian for each state and align with the Gaussians. null makes 20 rounds after
    a flat start, 5 after CTC, and none after a model with tied states."""
