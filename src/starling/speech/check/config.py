"""The kinds of findings, their limits, and which of them are dropped."""

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
    "swapped",
    "misfit",
    "same-audio",
    "same-text-and-length",
    "near-text",
    "overlap-audio",
    "overlap-text",
    "overlap-near-text",
    "overlap-speaker",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
HEARD: tuple[Kind, ...] = ("swapped", "misfit")
"""Kinds that need a recogniser."""
OVERLAPS = tuple(kind for kind in KINDS if kind.startswith("overlap-"))
"""Kinds of overlap between a training and a held-out set. Affected utterances of both sets are listed."""
SEEN_IN_TRAINING: tuple[Kind, ...] = ("overlap-audio", "overlap-text", "overlap-near-text")
"""Kinds that show that a test utterance has a near-duplicate in training."""


class CheckConfig(Config):
    """What `starling check` looks for, and its limits."""

    kinds: tuple[Kind, ...] = KINDS
    """The kinds of findings to look for."""
    silence_db: float = Field(default=-60.0, lt=0)
    """An utterance with a lower root mean square, in dB relative to full scale, is silent."""
    clipped: float = Field(default=0.001, gt=0, le=1)
    """An utterance with at least this fraction of its samples at full scale is clipped."""
    seconds_per_character: tuple[float, float] = (0.03, 1.0)
    """Minimum and maximum seconds of audio per character of the transcript, including spaces."""
    misfit: float = Field(default=0.5, gt=0)
    """With a model: a transcript fits if it scores less than this, in nats per token (starling.speech.check.transcripts
    defines the score). 0: it is as likely as what the model hears."""
    outlier: float = Field(default=8.0, gt=0)
    """With a model: a transcript also fits if its score is within this many times the distance from the median of its
    set's scores to their 90th percentile."""
    length_tolerance: float = Field(default=0.01, ge=0, le=1)
    """The maximum difference in seconds between the lengths of two copies of a recording."""
    alike: float = Field(default=0.95, gt=0, le=1)
    """Two waveforms with at least this correlation are copies of a recording."""
    similarity: float = Field(default=0.8, ge=0.5, le=1)
    """Two texts with at least this Jaccard similarity are near-duplicates."""
    ngram: int = Field(default=4, ge=1, le=20)
    """Length, in characters, of the n-grams by which texts are compared."""
    drop: tuple[Kind, ...] = (
        "unreadable",
        "silence",
        "too-short",
        "seconds-per-character",
        "swapped",
        "misfit",
        "same-audio",
        "same-text-and-length",
        "overlap-audio",
    )
    """Kinds of findings whose utterances `--drop` lists for leaving out."""
    drop_from: Literal["train", "all"] = "train"
    """The sets from which `--drop` leaves utterances out. For overlaps, only those of the training set."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        low, high = self.seconds_per_character
        if not 0 <= low < high:
            raise ValueError(f"seconds_per_character {low}, {high}: needs 0 <= first < second")
        if "overlap-speaker" in self.drop:
            raise ValueError("drop: overlap-speaker concerns whole speakers, not single utterances; leave it out")
        return self
