"""What is looked for in a corpus, within which limits, and what of it is dropped."""

from typing import Literal, Self, get_args

from pydantic import Field, model_validator

from starling.configuration import Config

Kind = Literal[
    "unreadable",
    "unusable",
    "silence",
    "clipping",
    "too-short",
    "seconds-per-character",
    "same-audio",
    "same-text-and-length",
    "near-text",
    "overlap-audio",
    "overlap-text",
    "overlap-near-text",
    "overlap-speaker",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
OVERLAPS = tuple(kind for kind in KINDS if kind.startswith("overlap-"))
"""Kinds that concern a training and a held-out set; each utterance of either side is a finding of its own."""
SEEN_IN_TRAINING: tuple[Kind, ...] = ("overlap-audio", "overlap-text", "overlap-near-text")
"""Kinds that tie an utterance of a test set to a near-duplicate in training."""


class CheckConfig(Config):
    """The section `data.check` of a recipe."""

    kinds: tuple[Kind, ...] = KINDS
    """What to look for."""
    silence_db: float = Field(default=-60.0, lt=0)
    """Root mean square, relative to full scale, below which an utterance is silent."""
    clipped: float = Field(default=0.001, gt=0, le=1)
    """Share of the samples at full scale from which on an utterance is clipped."""
    seconds_per_character: tuple[float, float] = (0.03, 1.0)
    """Least and most audio that a character of a transcript, spaces included, may have."""
    length_tolerance: float = Field(default=0.01, ge=0, le=1)
    """Seconds by which the lengths of two copies of one recording may differ."""
    alike: float = Field(default=0.95, gt=0, le=1)
    """Correlation of two waveforms from which on they are one recording."""
    similarity: float = Field(default=0.8, ge=0.5, le=1)
    """Jaccard similarity of two texts from which on they are near-duplicates."""
    ngram: int = Field(default=4, ge=1, le=20)
    """Characters in the pieces of text that are compared."""
    drop: tuple[Kind, ...] = (
        "unreadable",
        "silence",
        "too-short",
        "seconds-per-character",
        "same-audio",
        "same-text-and-length",
        "overlap-audio",
    )
    """Kinds that `--drop` lists for leaving out."""
    drop_from: Literal["train", "all"] = "train"
    """Sets that `--drop` takes from; of an overlap, the training side goes whichever is chosen."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        low, high = self.seconds_per_character
        if not 0 <= low < high:
            raise ValueError(f"seconds_per_character {low}, {high}: needs 0 <= first < second")
        if "overlap-speaker" in self.drop:
            raise ValueError("drop: an overlap of speakers concerns whole speakers and cannot be dropped by utterances")
        return self
