"""Decides which utterances are used: checks ids, transcripts and audio, reads lists of utterances to leave out, and
finds those that CTC cannot align because they have too few encoder frames."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, field, fields, replace
from functools import partial
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from starling.configuration import Config
from starling.errors import DataError
from starling.speech.audio import Audio, noting_short
from starling.speech.augmentation import AugmentConfig
from starling.speech.corpora import StringsConfig, Utterance
from starling.speech.corpora.lines import read_table, write_table
from starling.speech.features import LogMel
from starling.speech.levels import loud_frames
from starling.speech.models import Architecture
from starling.speech.store import SpeechSets
from starling.speech.tokens import Tokenizer


@dataclass(frozen=True)
class LeftOut:
    """One utterance to leave out."""

    set: str
    id: str
    seconds: float
    reason: str


_HEADER = tuple(each.name for each in fields(LeftOut))


def read_left_out(path: Path) -> list[LeftOut]:
    """Read a list of utterances to leave out.

    Raises:
        DataError: The list is missing or invalid.
    """
    items = []
    for line, row in read_table(path, _HEADER):
        try:
            items.append(LeftOut(row["set"], row["id"], float(row["seconds"]), row["reason"]))
        except ValueError:
            raise DataError(f"{path}:{line}: {row['seconds']!r} is not a number of seconds") from None
    return items


def write_left_out(path: Path, items: Iterable[LeftOut]) -> None:
    """Write a list for `data.filter.leave_out`, atomically."""
    write_table(path, _HEADER, map(astuple, items))


def left_out_of(path: Path | None, set_name: str) -> dict[str, LeftOut]:
    """The entries of a list for one set, by utterance id; empty if `path` is None.

    Raises:
        DataError: The list is missing or invalid.
    """
    if path is None:
        return {}
    try:
        return {item.id: item for item in read_left_out(path) if item.set == set_name}
    except DataError as error:
        raise DataError(f"data.filter.leave_out: {error}") from error


_FRAME = 0.010  # seconds
_PRE_EMPHASIS = 0.97
_LEAST_RANGE = 10.0  # dB


def trimmed(samples: NDArray[np.float32], rate: int, margin: float | None) -> NDArray[np.float32]:
    """The part of samples `[T]` from `margin` seconds before the first loud frame to `margin` seconds after the last;
    all samples if `margin` is None.

    The level of a 10 ms frame is its power in dB after pre-emphasis; `loud_frames` says which are loud. A recording
    whose quantiles are less than 10 dB apart has no pauses, and is returned unchanged.
    """
    size = max(1, round(_FRAME * rate))
    count = len(samples) // size
    if margin is None or not count:
        return samples
    emphasised = samples - np.float32(_PRE_EMPHASIS) * np.concatenate([samples[:1], samples[:-1]])
    power = np.square(emphasised[: count * size], dtype=np.float64).reshape(count, size).mean(1)
    (places,) = np.nonzero(loud_frames(10 * np.log10(power + 1e-10), _LEAST_RANGE))
    first, last = int(places[0]), int(places[-1])
    kept = round(margin * rate)
    end = (last + 1) * size if last + 1 < count else len(samples)
    return samples[max(0, first * size - kept) : end + kept]


TextStyle = Literal["upper", "lower", "as-is"]
DropKind = Literal["left out", "id", "speaker", "transcript", "audio", "silence", "length"]
"""The reason why an utterance is not used."""
MAX_PEAK = 4.0
"""Largest peak with which audio counts as scaled to -1..1; samples slightly beyond this range are only clipped."""
MAX_ID_BYTES = 200
_SURROGATE = re.compile("[\ud800-\udfff]")
"""Code points in text that is not valid Unicode, which cannot be encoded as UTF-8."""
NO_SPEAKER = "unknown"
"""The speaker of utterances for which a corpus names none."""
MAX_RESAMPLER = 2_000_000
"""Maximum size of a resampling filter bank; converting 44.1 kHz to 16 kHz needs 70,560."""


class FilterConfig(Config):
    """The rules for keeping and trimming utterances. Dropped utterances are counted and listed in dropped.tsv."""

    min_seconds: float = Field(default=0.1, ge=0)
    """Minimum length of an utterance; shorter utterances are dropped."""
    max_seconds: float = Field(default=20.0, gt=0)
    """Maximum length of an utterance; longer utterances are dropped."""
    trim: float | None = Field(default=None, ge=0, le=10)
    """Seconds of pause to keep before and after the speech of each recording; the rest of the pause is cut off. With
    null, recordings are not trimmed."""
    on_bad: Literal["fail", "skip"] = "skip"
    """What happens to unusable utterances: `skip` leaves them out, and counts, names and lists them; `fail` ends the
    command at the first unusable utterance. The key applies to preparation, to the set-up of training (utterances that
    are too short for CTC), and to training."""
    max_skipped: float = Field(default=0.01, ge=0, le=1)
    """Maximum fraction of a set that may be left out as unusable. One utterance may always be left out, unless the
    fraction is 0."""
    leave_out: Path | None = None
    """A list of utterances to leave out, as written by `starling check --drop`."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.max_seconds <= self.min_seconds:
            raise ValueError(f"max_seconds ({self.max_seconds}) must be greater than min_seconds ({self.min_seconds})")
        return self

    def skippable(self, total: int) -> int:
        """The number of utterances, out of `total`, that may be left out as unusable."""
        return max(1, math.floor(self.max_skipped * total)) if self.max_skipped else 0


@dataclass(frozen=True)
class Dropped:
    """An utterance that is not used. Only `bad` utterances, which are unusable, count towards `max_skipped`; filtered
    ones do not."""

    id: str
    seconds: float
    reason: str
    bad: bool
    kind: DropKind


@dataclass(frozen=True)
class Checking:
    """The checks of a set's utterances."""

    set_name: str
    sampling_rate: int
    """Sampling rate in Hz."""
    style: TextStyle
    limits: FilterConfig
    left_out: Mapping[str, LeftOut] = field(default_factory=dict)
    """Utterances to leave out, by id."""

    def narrowed(self, utterances: Iterable[Utterance]) -> "Checking":
        """A copy for some utterances only. It omits the other utterances to leave out, and is therefore small to
        send."""
        left_out = {each.id: self.left_out[each.id] for each in utterances if each.id in self.left_out}
        return replace(self, left_out=left_out)


@dataclass(frozen=True)
class Source:
    """The source of a set."""

    checking: Checking
    utterances: Callable[[], Iterable[Utterance]]
    strings: StringsConfig | None = None
    digest: str = ""
    """The digest of `settings`, or of the settings with which a prepared set was made."""
    settings: dict[str, Any] = field(default_factory=dict)
    shard_size: int = 1000

    @property
    def name(self) -> str:
        return self.checking.set_name


class Checked(NamedTuple):
    """A usable utterance with a normalised transcript, and its audio."""

    place: int
    """The utterance's index among the checked utterances."""
    utterance: Utterance
    samples: NDArray[np.float32]
    """The samples [T] at the set's sampling rate."""
    decoded: Audio
    """The audio as the corpus provides it."""


class _Unusable(Exception):  # noqa: N818 - never leaves this module
    def __init__(self, reason: str, kind: DropKind, seconds: float = 0.0, bad: bool = True) -> None:
        self.reason, self.kind, self.seconds, self.bad = reason, kind, seconds, bad


class _Silent(DataError):  # noqa: N818 - other modules see only a DataError
    """All samples are zero."""


class Checker:
    """Checks the utterances of one set, and records which are dropped."""

    def __init__(self, checking: Checking, seen: Iterable[str] = ()) -> None:
        """Start with `seen`, ids that other utterances of the set already have."""
        self._name, self._rate, self._limits = checking.set_name, checking.sampling_rate, checking.limits
        self._checking, self._total = checking, 0
        self.dropped: list[Dropped] = []
        self.short: list[str] = []
        """The usable utterances whose files have slightly less audio than their headers declare."""
        self.seen = set(seen)

    def usable(self, utterances: Iterable[Utterance]) -> Iterator[Checked]:
        """Yield each usable utterance.

        Raises:
            DataError: An utterance is unusable, and `on_bad` is `fail`.
        """
        for place, utterance in enumerate(utterances):
            self._total += 1
            try:
                clean = self._checked_words(utterance)
                with noting_short() as short:
                    decoded, samples = self._checked_audio(utterance)
            except _Unusable as problem:
                if problem.bad and self._limits.on_bad == "fail":
                    raise DataError(
                        f"set {self._name}: utterance {utterance.id!r} ({utterance.origin}): {problem.reason}; "
                        f"correct it, or set data.filter.on_bad=skip"
                    ) from problem
                self.dropped.append(Dropped(utterance.id, problem.seconds, problem.reason, problem.bad, problem.kind))
                continue
            self.seen.add(utterance.id)
            self.short += [utterance.id] if short else []
            yield Checked(place, clean, samples, decoded)

    def reread(self, utterance: Utterance) -> Utterance:
        """A copy of the utterance whose audio is read at the set's sampling rate, and trimmed."""
        return replace(utterance, read=partial(_read_at, self._rate, self._limits.trim, utterance))

    def count(self, total: int, dropped: Iterable[Dropped], short: Iterable[str]) -> None:
        """Add the counts of another checker, which checked `total` other utterances of the set."""
        self._total += total
        self.dropped += dropped
        self.short += short

    def finish(self) -> list[Dropped]:
        """The dropped utterances.

        Raises:
            DataError: Too many utterances were skipped, or none is left.
        """
        bad = [each for each in self.dropped if each.bad]
        first = [f"\n  {each.id!r}: {each.reason}" for each in (bad or self.dropped)[:5]]
        if len(bad) > self._limits.skippable(self._total):
            raise DataError(
                f"set {self._name}: {len(bad)} of {self._total} utterances are unusable, more than "
                f"data.filter.max_skipped = {self._limits.max_skipped:.2%}; correct them, or raise that limit. "
                f"The first {len(first)}:{''.join(first)}"
            )
        if self._total == 0:
            raise DataError(
                f"set {self._name}: the corpus has no utterances for this set; correct data.corpus.sets.{self._name}"
            )
        if self._total == len(self.dropped):
            raise DataError(
                f"set {self._name}: all {self._total} utterances were dropped. The first {len(first)}:{''.join(first)}"
            )
        return self.dropped

    def _checked_words(self, utterance: Utterance) -> Utterance:
        """The utterance with a normalised transcript, and a speaker."""
        if (item := self._checking.left_out.get(utterance.id)) is not None:
            raise _Unusable(f"left out: {item.reason}", "left out", item.seconds, bad=False)
        if utterance.wordless:
            raise _Unusable(f"no words, only {utterance.wordless}", "transcript", bad=False)
        _check_id(utterance.id)
        if utterance.id in self.seen:
            raise _Unusable("an earlier utterance has the same id", "id")
        text, speaker = " ".join(utterance.text.split()), "_".join(utterance.speaker.split())
        text = {"upper": text.upper(), "lower": text.lower(), "as-is": text}[self._checking.style]
        if not text:
            raise _Unusable("its transcript is empty", "transcript")
        if _SURROGATE.search(text):
            raise _Unusable("its transcript is not valid Unicode", "transcript")
        if _SURROGATE.search(speaker):
            raise _Unusable("its speaker is not valid Unicode", "speaker")
        return replace(utterance, text=text, speaker=speaker or NO_SPEAKER)

    def _checked_audio(self, utterance: Utterance) -> tuple[Audio, NDArray[np.float32]]:
        """The audio as the corpus provides it, and the samples to use."""
        try:
            decoded = utterance.read()
            check_samples(decoded[0])
            samples = resampled(*decoded, self._rate)
        except DataError as error:
            raise _Unusable(str(error), "silence" if isinstance(error, _Silent) else "audio") from error
        seconds = len(samples) / self._rate
        if not self._limits.min_seconds <= seconds <= self._limits.max_seconds:
            limits = f"{self._limits.min_seconds:g} to {self._limits.max_seconds:g} s"
            raise _Unusable(f"lasts {seconds:.3f} s, limits are {limits}", "length", seconds, bad=False)
        return decoded, trimmed(samples, self._rate, self._limits.trim)


def _read_at(rate: int, trim: float | None, utterance: Utterance) -> Audio:
    return trimmed(resampled(*utterance.read(), rate), rate, trim), rate


def check_samples(samples: NDArray[np.float32]) -> None:
    """Check that samples `[T]` are valid for a recording.

    Raises:
        DataError: There are no samples, or some are not finite, or they are far outside -1..1 or all zero.
    """
    if not len(samples):
        raise DataError("the audio has no samples")
    bad = int(np.count_nonzero(~np.isfinite(samples)))
    if bad:
        raise DataError(f"{bad} of {len(samples)} samples of the audio are not finite")
    peak = float(np.abs(samples).max())
    if peak > MAX_PEAK:
        raise DataError(f"the audio has a peak of {peak:g}, but full scale is -1 to 1; rescale it")
    if peak == 0:
        raise _Silent(f"the audio is silent: all {len(samples)} samples are 0")


def resampled(samples: NDArray[np.float32], rate: int, wanted: int) -> NDArray[np.float32]:
    """Resample samples `[T]` from `rate` Hz to `wanted` Hz.

    Raises:
        DataError: `rate` differs from `wanted` and is below 1 kHz or above 768 kHz, or the filter bank for the two
            rates would be larger than `MAX_RESAMPLER`.
    """
    if rate == wanted:
        return samples
    divisor = math.gcd(rate, wanted)
    if not 1000 <= rate <= 768_000 or (rate // divisor) * (wanted // divisor) > MAX_RESAMPLER:
        raise DataError(f"the audio has {rate} Hz, which cannot be resampled to {wanted} Hz; convert it first")
    import torch

    from starling.speech.resampling import resampled

    return resampled(torch.from_numpy(samples), rate, wanted).numpy()


def _check_id(name: str) -> None:
    parts = PurePosixPath(name).parts
    if (
        not name.isprintable()  # also ensures that the id can be encoded as UTF-8
        or any(map(str.isspace, name))
        or not 1 <= len(name.encode()) <= MAX_ID_BYTES
        or str(PurePosixPath(name)) != name
        or name.startswith("/")
        or not {".", ".."}.isdisjoint(parts)
    ):
        raise _Unusable(
            f"its id is invalid: 1 to {MAX_ID_BYTES} bytes, no spaces, control characters, '..' or leading '/'", "id"
        )


class TooShort(NamedTuple):
    """An utterance that has fewer frames than its transcript needs, which is a row of `too_short.tsv`."""

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
    """The utterances to train on. These are all utterances except those that are listed in a table with rows of
    `TooShort`."""
    if not path.is_file():
        return train
    listed = [(row["id"], int(row["number"])) for _, row in read_table(path, TooShort._fields)]
    for name, number in listed:
        if number >= len(train) or train.id(number) != name:
            raise DataError(f"{path}: {name} is not utterance {number} of {train.name}; train again without resume")
    return train.only(np.delete(np.arange(len(train)), [number for _, number in listed]))
