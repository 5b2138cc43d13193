"""A scored set, read again from an experiment's `decode` folder, with the audio of some utterances."""

import base64
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import soundfile
from numpy.typing import NDArray

from starling.errors import DataError, StarlingError
from starling.experiment.folder import ExperimentFolder
from starling.reporting.evidence import ScoredSet, Utterance
from starling.speech.codecs import set_of
from starling.speech.recipe import load_resolved
from starling.speech.scoring import NOTHING, Alignment, align_words, error_rates, num_errors, read_texts
from starling.speech.store import SpeechSet

SHOWN = 3
"""Best, median and worst utterances, so many each."""
NUM_CONFUSIONS = 20
MAX_SECONDS = 30.0
"""Longest audio of one utterance; the rest is cut off."""
_MP3_RATES = (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000)


def scored_set(folder: ExperimentFolder, recogs: Path) -> tuple[ScoredSet, str]:
    """The set of a `recogs-` file, scored again, and a sentence if its audio is not there. Raises DataError for a file
    that is damaged."""
    name = recogs.stem.removeprefix("recogs-")
    references, hypotheses = read_texts(recogs)
    rates = error_rates(references, hypotheses)
    alignments = align_words(references, hypotheses)
    counts = Counter(pair for alignment in alignments.values() for pair in alignment if pair[0] != pair[1])
    frequent = sorted(counts.items(), key=lambda each: (-each[1], each[0]))
    utterances = chosen(references, alignments)
    problem = ""
    try:
        audio = _audio(load_resolved(folder.config).data.set_folder(set_of(name)), [each.name for each in utterances])
        utterances = tuple(replace(each, audio=audio.get(each.name)) for each in utterances)
    except (StarlingError, OSError) as error:
        problem = f"No audio of {name}: {error}."
    return ScoredSet(
        name=name,
        wer=rates.wer,
        interval=rates.interval,
        cer=rates.cer,
        words=rates.words.reference,
        insertions=rates.words.insertions,
        deletions=rates.words.deletions,
        substitutions=rates.words.substitutions,
        num_utterances=rates.sentences,
        num_wrong=rates.wrong_sentences,
        utterances=utterances,
        confusions=tuple((_word(one), _word(other), times) for (one, other), times in frequent[:NUM_CONFUSIONS]),
        num_confusions=len(frequent),
    ), problem


def chosen(references: Mapping[str, str], alignments: Mapping[str, Alignment]) -> tuple[Utterance, ...]:
    """The best, median and worst utterances by errors per word, none twice. Of several that are alike, those with most
    words count as best, and those with most errors as worst."""

    def order(name: str) -> tuple[float, float, str]:
        words, errors = len(references[name].split()), num_errors(alignments[name])
        rate = errors / max(1, words)
        return rate, errors if errors else -words, name

    names = sorted(references, key=order)
    shown = min(SHOWN, max(1, len(names) // 3))
    begin = (len(names) - shown) // 2
    starts: dict[Literal["best", "median", "worst"], int] = {"best": 0, "median": begin, "worst": len(names) - shown}
    found: dict[str, Utterance] = {}
    for rank, first in starts.items():
        for name in names[max(0, first) : first + shown]:
            alignment = alignments[name]
            words = tuple((_word(reference), _word(hypothesis)) for reference, hypothesis in alignment)
            given = Utterance(rank, name, num_errors(alignment), len(references[name].split()), words)
            found.setdefault(name, given)
    return tuple(found.values())


def encoded(samples: NDArray[np.float32], rate: int) -> str:
    """Mono samples `[T]` in -1..1 as a `data:` URI: MP3, or FLAC at a rate that MP3 does not have."""
    buffer = io.BytesIO()
    kind, media = ("MP3", "mpeg") if rate in _MP3_RATES else ("FLAC", "flac")
    soundfile.write(buffer, samples[: int(MAX_SECONDS * rate)], rate, format=kind)
    return f"data:audio/{media};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _audio(folder: Path, names: Sequence[str]) -> dict[str, str]:
    speech_set = SpeechSet.open(folder)
    wanted = set(names)
    found = speech_set.read([place for place in range(len(speech_set)) if speech_set.id(place) in wanted])
    speech_set.close()
    return {
        each.id: encoded(each.samples, speech_set.sampling_rate)
        for each in found
        if not isinstance(each.samples, DataError)
    }


def _word(word: str) -> str:
    return "" if word == NOTHING else word
