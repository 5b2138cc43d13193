"""Which utterances may be used: every check of ids, transcripts and audio, in one place."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from starling.configuration import Config
from starling.errors import DataError
from starling.speech.corpora import Audio, Utterance
from starling.speech.left_out import LeftOut

TextStyle = Literal["upper", "lower", "as-is"]
Fault = Literal["left out", "id", "speaker", "transcript", "audio", "silence", "length"]
"""What is wrong with an utterance that is not used."""
Checked = tuple[Utterance, NDArray[np.float32]]
LOUDEST = 4.0
"""Samples beyond this are not audio in -1..1 (a little over 1 is clipped)."""
MAX_ID_BYTES = 200
NO_SPEAKER = "unknown"
"""Who speaks where a corpus does not say."""
MAX_RESAMPLER = 2_000_000
"""Largest size of a resampling filter bank; 44.1 kHz to 16 kHz takes 70,560."""


class FilterConfig(Config):
    """Which utterances are kept. What is dropped is counted and listed in dropped.tsv."""

    min_seconds: float = Field(default=0.1, ge=0)
    max_seconds: float = Field(default=20.0, gt=0)
    on_bad: Literal["fail", "skip"] = "fail"
    """What an unusable utterance does: end the preparation, or be skipped and counted."""
    max_skipped: float = Field(default=0.01, ge=0, le=1)
    """Largest share of a set that may be skipped as unusable."""
    leave_out: Path | None = None
    """A list of utterances to leave out, as `starling check --drop` writes it."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.max_seconds <= self.min_seconds:
            raise ValueError(f"max_seconds ({self.max_seconds}) is not more than min_seconds ({self.min_seconds})")
        return self


@dataclass(frozen=True)
class Dropped:
    """An utterance that was left out; `bad` ones count against `max_skipped`, filtered ones do not."""

    id: str
    seconds: float
    reason: str
    bad: bool
    fault: Fault


class _Unusable(Exception):  # noqa: N818 - never leaves this module
    def __init__(self, reason: str, fault: Fault, seconds: float = 0.0, bad: bool = True) -> None:
        self.reason, self.fault, self.seconds, self.bad = reason, fault, seconds, bad


class _Silent(DataError):  # noqa: N818 - never leaves this module under its own name
    """All samples are zero."""


class Checker:
    """Checks the utterances of one set, and remembers which were dropped."""

    def __init__(
        self,
        name: str,
        sampling_rate: int,
        style: TextStyle,
        limits: FilterConfig,
        left_out: Mapping[str, LeftOut] | None = None,
    ) -> None:
        """`left_out` gives what is not wanted, by id."""
        self._name, self._rate, self._style, self._limits = name, sampling_rate, style, limits
        self._left_out = left_out or {}
        self._total = 0
        self.dropped: list[Dropped] = []
        self.seen: set[str] = set()

    def usable(self, utterances: Iterable[Utterance]) -> Iterator[Checked]:
        """Every usable utterance, its transcript normalised, with its audio [T] at the set's sampling rate.

        Raises:
            DataError: an utterance is unusable and the user has not chosen to skip.
        """
        for utterance in utterances:
            self._total += 1
            try:
                self._check_wanted(utterance)
                clean = replace(utterance, text=self._checked_text(utterance), speaker=_speaker(utterance))
                audio = self._checked_audio(utterance)
            except _Unusable as problem:
                if problem.bad and self._limits.on_bad == "fail":
                    raise DataError(
                        f"set {self._name}: utterance {utterance.id!r} ({utterance.origin}): {problem.reason}; "
                        f"correct it, or set data.filter.on_bad=skip"
                    ) from problem
                self.dropped.append(_dropped(utterance, problem))
                continue
            self.seen.add(utterance.id)
            yield clean, audio

    def reread(self, utterance: Utterance) -> Utterance:
        """The same utterance with audio that comes at the set's sampling rate."""
        return replace(utterance, read=partial(_read_at, self._rate, utterance))

    def count(self, total: int, dropped: Iterable[Dropped]) -> None:
        """Take in what another checker has found in `total` other utterances of the set."""
        self._total += total
        self.dropped += dropped

    def finish(self) -> list[Dropped]:
        """What was dropped.

        Raises:
            DataError: too much was skipped, or nothing is left.
        """
        bad = [each for each in self.dropped if each.bad]
        examples = "; ".join(f"{each.id!r}: {each.reason}" for each in (bad or self.dropped)[:5])
        if len(bad) > self._limits.max_skipped * self._total:
            raise DataError(
                f"set {self._name}: {len(bad)} of {self._total} utterances are unusable, more than "
                f"data.filter.max_skipped = {self._limits.max_skipped:.2%}; the first: {examples}"
            )
        if self._total == 0:
            raise DataError(
                f"set {self._name}: the corpus has no utterance for it; correct data.corpus.sets.{self._name}"
            )
        if self._total == len(self.dropped):
            raise DataError(f"set {self._name}: no utterance is left of {self._total}; the first dropped: {examples}")
        return self.dropped

    def _check_wanted(self, utterance: Utterance) -> None:
        if (item := self._left_out.get(utterance.id)) is not None:
            raise _Unusable(f"left out: {item.reason}", "left out", item.seconds, bad=False)

    def _checked_text(self, utterance: Utterance) -> str:
        name = utterance.id
        _check_id(name)
        if name in self.seen:
            raise _Unusable("its id is used twice", "id")
        text = " ".join(utterance.text.split())
        text = {"upper": text.upper(), "lower": text.lower(), "as-is": text}[self._style]
        if not text:
            raise _Unusable("its transcript is empty", "transcript")
        if not _encodes(text):
            raise _Unusable("its transcript is not valid Unicode", "transcript")
        return text

    def _checked_audio(self, utterance: Utterance) -> NDArray[np.float32]:
        try:
            samples, rate = utterance.read()
            check_samples(samples)
            samples = resampled(samples, rate, self._rate)
        except DataError as error:
            raise _Unusable(str(error), "silence" if isinstance(error, _Silent) else "audio") from error
        seconds = len(samples) / self._rate
        if not self._limits.min_seconds <= seconds <= self._limits.max_seconds:
            limits = f"{self._limits.min_seconds:g} to {self._limits.max_seconds:g} s"
            raise _Unusable(f"lasts {seconds:.3f} s, kept are {limits}", "length", seconds, bad=False)
        return samples


def _read_at(rate: int, utterance: Utterance) -> Audio:
    return resampled(*utterance.read(), rate), rate


def _dropped(utterance: Utterance, problem: _Unusable) -> Dropped:
    return Dropped(utterance.id, problem.seconds, problem.reason, problem.bad, problem.fault)


def check_samples(samples: NDArray[np.float32]) -> None:
    """Refuse samples [T] that are no recording.

    Raises:
        DataError: none, not finite, far outside of -1..1, or all zero.
    """
    if not len(samples):
        raise DataError("the audio has no samples")
    bad = int(np.count_nonzero(~np.isfinite(samples)))
    if bad:
        raise DataError(f"{bad} of {len(samples)} samples of the audio are not finite")
    peak = float(np.abs(samples).max())
    if peak > LOUDEST:
        raise DataError(f"the audio reaches {peak:g}, where -1 to 1 is full scale; rescale it")
    if peak == 0:
        raise _Silent(f"the audio is silent: all {len(samples)} samples are 0")


def resampled(samples: NDArray[np.float32], rate: int, wanted: int) -> NDArray[np.float32]:
    """Samples [T] of `rate` Hz at `wanted` Hz.

    Raises:
        DataError: the two rates have no common factor that makes resampling practical.
    """
    if rate == wanted:
        return samples
    divisor = math.gcd(rate, wanted)
    if not 1000 <= rate <= 768_000 or (rate // divisor) * (wanted // divisor) > MAX_RESAMPLER:
        raise DataError(f"the audio has {rate} Hz, which cannot be resampled to {wanted} Hz; convert it first")
    import torch
    from lhotse.augmentation import get_or_create_resampler

    result: NDArray[np.float32] = get_or_create_resampler(rate, wanted)(torch.from_numpy(samples)[None])[0].numpy()
    return result


def _check_id(name: str) -> None:
    parts = PurePosixPath(name).parts
    if (
        not name
        or not _encodes(name)
        or len(name.encode()) > MAX_ID_BYTES
        or any(character.isspace() or not character.isprintable() for character in name)
        or str(PurePosixPath(name)) != name
        or name.startswith("/")
        or not {".", ".."}.isdisjoint(parts)
    ):
        raise _Unusable(
            f"its id is not usable: 1 to {MAX_ID_BYTES} bytes, no spaces, control characters, '..' or leading '/'", "id"
        )


def _speaker(utterance: Utterance) -> str:
    speaker = "_".join(utterance.speaker.split())
    if not _encodes(speaker):
        raise _Unusable("its speaker is not valid Unicode", "speaker")
    return speaker or NO_SPEAKER


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
