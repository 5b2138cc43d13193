"""Finds, lists and leaves out utterances that CTC cannot align because they have too few encoder frames."""

import math
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from starling.errors import DataError
from starling.speech.augmentation import AugmentConfig
from starling.speech.corpora.lines import read_table
from starling.speech.features import LogMel
from starling.speech.models import Architecture
from starling.speech.store import SpeechSets
from starling.speech.tokens import Tokenizer


class TooShort(NamedTuple):
    """An utterance with fewer frames than its transcript needs: a row of `too_short.tsv`."""

    id: str
    frames: int  # at the highest speed factor
    needed: int
    number: int  # its index in the set


def transcripts(speech_set: SpeechSets) -> Iterator[tuple[str, str, float]]:
    """The id, text and duration in seconds of each utterance of a set."""
    return (
        (speech_set.id(index), speech_set.text(index), seconds)
        for index, seconds in enumerate(speech_set.durations.tolist())
    )


def frames_needed(tokens: list[int]) -> int:
    """The number of encoder frames that CTC needs for `tokens`: one per token, and one blank between equal
    neighbours."""
    return len(tokens) + sum(first == second for first, second in pairwise(tokens))


def frames_of_all(encoded: Iterable[list[int] | DataError], subsampling: int) -> list[int]:
    """The number of feature frames that CTC needs for the tokens of each utterance; 0 if they are an error."""
    return [0 if isinstance(tokens, DataError) else subsampling * frames_needed(tokens) for tokens in encoded]


def too_short_for_ctc(
    utterances: Iterable[tuple[str, str, float]],
    tokenizer: Tokenizer,
    model: Architecture,
    features: LogMel,
    augment: AugmentConfig | None = None,
) -> list[TooShort]:
    """The utterances that would have too few encoder frames at the highest factors of speed and tempo of `augment`.

    `utterances` are ids, texts and seconds, as returned by `transcripts`. All texts are encoded, so characters outside
    the alphabet raise DataError.
    """
    fastest, tempo = augment.fastest if augment is not None else (1.0, 1.0)
    found = []
    for number, (name, text, seconds) in enumerate(utterances):
        samples = math.ceil(round(seconds * features.sampling_rate) / fastest)
        frames = model.encoder_frames(features.num_frames(samples, tempo))
        if frames < (needed := frames_needed(tokenizer.encode(text, name))):
            found.append(TooShort(name, frames, needed, number))
    return found


def kept_utterances(train: SpeechSets, path: Path) -> SpeechSets:
    """The utterances to train on: all except those that a table, with rows of `TooShort`, lists."""
    if not path.is_file():
        return train
    listed = [(row["id"], int(row["number"])) for _, row in read_table(path, TooShort._fields)]
    for name, number in listed:
        if number >= len(train) or train.id(number) != name:
            raise DataError(f"{path}: {name} is not utterance {number} of {train.name}; train again without resume")
    return train.only(np.delete(np.arange(len(train)), [number for _, number in listed]))
