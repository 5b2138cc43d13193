"""Checks a whole corpus: all kinds of findings, in the order of the kinds."""

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from starling.configuration import Config
from starling.speech.augmentation import AugmentConfig
from starling.speech.check.collect import Line, Record, Source, collect, lines_of
from starling.speech.check.compare import shared_audio, shared_speakers, shared_texts
from starling.speech.check.config import HEARD, KINDS, CheckConfig
from starling.speech.check.findings import Finding, Report, SetSize
from starling.speech.check.transcripts import misfits
from starling.speech.features import FeatureConfig, LogMel
from starling.speech.losses import check_ctc_fits
from starling.speech.models import ModelConfig
from starling.speech.preparing.making import OnProgress
from starling.speech.recogniser import Recogniser
from starling.speech.tokens import TokenConfig, make_tokenizer


class Training(Config):
    """The settings that determine how much audio a transcript needs."""

    tokens: TokenConfig = TokenConfig()
    features: FeatureConfig = FeatureConfig()
    augment: AugmentConfig | None = None
    model: ModelConfig = ModelConfig()


def check_corpus(
    sources: Sequence[Source],
    train: str,
    config: CheckConfig,
    training: Training,
    progress: OnProgress,
    recogniser: Recogniser | None = None,
) -> Report:
    """Check sets for everything in `config`; `train` names the training set, the others are held out.

    Whether transcripts fit is checked only with a `recogniser`.

    Raises:
        DataError: The corpus is missing or its manifest is invalid.
    """
    records: list[Record] = []
    lines: list[Line] = []
    findings: list[Finding] = []
    sizes, heard = [], []
    for source in sources:
        own, faults = collect(source, config, progress)
        records += own
        lines += lines_of(source, own)
        findings += faults
        if recogniser is not None and set(HEARD) & set(config.kinds):
            whole, faults = misfits(source.name, own, recogniser, config, partial(progress, f"hearing {source.name}"))
            heard.append(whole)
            findings += faults
        sizes.append(SetSize(source.name, len(own), sum(each.sound.seconds for each in own), source.digest))
    if "too-short" in config.kinds:
        findings += _too_short(sources, lines, train, training)
    if {"same-audio", "same-text-and-length", "overlap-audio"} & set(config.kinds):
        findings += shared_audio(records, train, config, lambda done, total: progress("audio", done, total))
    if {"near-text", "overlap-text", "overlap-near-text"} & set(config.kinds):
        findings += shared_texts(lines, train, config, lambda done, total: progress("texts", done, total))
    findings += shared_speakers(records, train)
    places = {kind: place for place, kind in enumerate(KINDS)}
    wanted = sorted((each for each in findings if each.kind in config.kinds), key=lambda each: places[each.kind])
    return Report(train, tuple(sizes), tuple(wanted), tuple(heard))


def _too_short(sources: Sequence[Source], lines: Sequence[Line], train: str, training: Training) -> Iterator[Finding]:
    """Transcripts whose audio has too few frames for CTC; in training, at the highest speed factor."""
    if not lines:
        return
    tokens = training.tokens.model_copy(update={"alphabet": None})  # held-out sets may have other characters
    tokenizer = make_tokenizer(tokens, (line.text for line in lines))
    for source in sources:
        own = _Lines([line for line in lines if line.set == source.name], source.sampling_rate)
        features = LogMel(training.features, source.sampling_rate)
        augment = training.augment if source.name == train else None
        for each in check_ctc_fits(own, tokenizer, training.model, features, augment, on_too_short="list"):
            line = own.by_id[each.id]
            detail = f"frames for the {len(line.text)} characters in {line.seconds:.3f} s"
            yield Finding(
                "too-short", line.set, line.id, value=each.frames, limit=each.needed, detail=detail,
                seconds=line.seconds,
            )  # fmt: skip


class _Lines:
    """Transcripts as the `Transcripts` that `check_ctc_fits` expects."""

    def __init__(self, lines: Sequence[Line], sampling_rate: int) -> None:
        self._lines, self.sampling_rate = lines, sampling_rate
        self.by_id = {line.id: line for line in lines}

    @property
    def durations(self) -> NDArray[np.float32]:
        return np.array([line.seconds for line in self._lines], np.float32)

    def __len__(self) -> int:
        return len(self._lines)

    def id(self, index: int) -> str:
        return self._lines[index].id

    def text(self, index: int) -> str:
        return self._lines[index].text
