"""Utterances that CTC cannot align, because they have too few encoder frames: found, listed, and left out."""

import math
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from starling.errors import DataError
from starling.speech.augmentation import AugmentConfig
from starling.speech.corpora.lines import read_table, write_table
from starling.speech.features import LogMel
from starling.speech.models import Architecture
from starling.speech.store import SpeechSets
from starling.speech.tokens import Tokenizer

_COLUMNS = ("id", "frames", "needed", "number")
"""Of `too_short.tsv`."""


class TooShort(NamedTuple):
    """An utterance with fewer encoder frames than CTC needs."""

    id: str
    frames: int  # encoder frames at the highest speed factor
    needed: int  # one per token, and one blank between equal neighbours


def transcripts(speech_set: SpeechSets) -> Iterator[tuple[str, str, float]]:
    """The id, the text and the seconds of each utterance of a set."""
    return (
        (speech_set.id(index), speech_set.text(index), seconds)
        for index, seconds in enumerate(speech_set.durations.tolist())
    )


def frames_needed(tokens: list[int]) -> int:
    """The encoder frames that CTC needs for `tokens`: one per token, and one blank between equal neighbours."""
    return len(tokens) + sum(first == second for first, second in pairwise(tokens))


def too_short_for_ctc(
    utterances: Iterable[tuple[str, str, float]],
    tokenizer: Tokenizer,
    model: Architecture,
    features: LogMel,
    augment: AugmentConfig | None = None,
) -> list[TooShort]:
    """The utterances that would have too few encoder frames at the highest factors of speed and tempo of `augment`.

    `utterances` are ids, texts and seconds, as `transcripts` gives them. It encodes all texts, so it also finds
    characters outside the alphabet, and raises DataError for these.
    """
    fastest, tempo = augment.fastest if augment is not None else (1.0, 1.0)
    found = []
    for name, text, seconds in utterances:
        samples = math.ceil(round(seconds * features.sampling_rate) / fastest)
        frames = model.encoder_frames(features.num_frames(samples, tempo))
        if frames < (needed := frames_needed(tokenizer.encode(text, name))):
            found.append(TooShort(name, frames, needed))
    return found


def list_too_short(found: Iterable[TooShort], train: SpeechSets, path: Path) -> None:
    """Write the utterances that cannot be aligned to a table, which `kept_utterances` reads."""
    rows = {each.id: each for each in found}
    names = ((number, train.id(number)) for number in range(len(train)))
    write_table(path, _COLUMNS, ((*rows[name], number) for number, name in names if name in rows))


def kept_utterances(train: SpeechSets, path: Path) -> NDArray[np.int32]:
    """The indices of the utterances to train on: all except those listed by `list_too_short`."""
    everything = np.arange(len(train), dtype=np.int32)
    if not path.is_file():
        return everything
    listed = [(row["id"], int(row["number"])) for _, row in read_table(path, _COLUMNS)]
    for name, number in listed:
        if number >= len(train) or train.id(number) != name:
            raise DataError(f"{path}: {name} is not utterance {number} of {train.name}; train again without resume")
    return np.delete(everything, [number for _, number in listed])
