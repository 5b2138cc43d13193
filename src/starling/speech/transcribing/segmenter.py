"""Cuts audio at pauses, by its energy; it may come in pieces, of which only the last segment is kept in memory."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from starling.speech.resampling import Resampler

Seconds = float

FRAME: Seconds = 0.01
_LOOK_EVERY = 10
"""Frames between two looks for pauses. Segments therefore do not depend on the pieces in which audio comes."""
_SMOOTHED = 5
"""Frames over whose mean energy levels are taken."""
_LOWEST = -70.0
"""The lowest noise floor, dB below full scale: digital silence counts as such a noise."""
_LOUD, _ABOVE = 10.0, 6.0
"""Speech is more than `_ABOVE` dB above the noise floor, and somewhere more than `_LOUD`."""
_SHORTEST = 3
"""Frames of the shortest sound that counts as speech: a click has fewer."""
_FLOOR = 1000
"""Frames, 10 s, within which the noise floor is the lowest level."""
_EVEN = 45
"""Frames in which the level stays within `_ABOVE` dB, also at high frequencies: noise, whatever was quieter before."""
_FAINT = 12.0
"""Noise is at least so many dB below the loudest sound."""
_PATIENCE = 200
"""Frames, 2 s, after which an even level counts as noise. No speech is so long without a change of 10 dB."""


@dataclass(frozen=True)
class Segmentation:
    """Where audio is cut."""

    pause: Seconds = 0.5
    """The shortest pause at which a segment ends."""
    pad: Seconds = 0.05
    """What a segment keeps of the pause before and after it, at most half of `pause`: about as much as the utterances
    that the model was trained on. Less than a pause at the ends of a recording is kept whole."""
    longest: Seconds = 20.0
    """A longer segment is cut at the quietest place in its second half."""


@dataclass(frozen=True)
class Piece:
    """A segment of audio."""

    start: int
    """Samples before it."""
    samples: NDArray[np.float32]
    recording: int = 0
    """The number of the recording that it is of, among several."""


def powers(samples: NDArray[np.float32], hop: int, high: bool = False) -> NDArray[np.float64]:
    """The variance of each whole frame of `hop` samples; `high`: of their differences, where high frequencies count."""
    count = len(samples) // hop
    frames = samples[: count * hop].reshape(count, hop)
    return np.asarray((np.diff(frames, axis=1) if high else frames).var(axis=1, dtype=np.float64))


def levels(power: NDArray[np.float64], width: int = _SMOOTHED) -> NDArray[np.float64]:
    """The level of each frame in dB below full scale, smoothed over `width` frames."""
    sums = np.concatenate([[0.0], np.cumsum(power)])
    places = np.arange(len(power))
    first, last = np.maximum(places - width // 2, 0), np.minimum(places + width // 2 + 1, len(power))
    mean = (sums[last] - sums[first]) / (last - first)
    return np.asarray(10.0 * np.log10(np.maximum(mean, 1e-12)))


def floor_of(level: NDArray[np.float64]) -> float:
    """The noise floor, dB."""
    return max(_LOWEST, float(level.min(initial=0.0)))


def runs(mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """First and last + 1 `[N, 2]` of each stretch that is true."""
    return np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)


def quiet_stretches(samples: NDArray[np.float32], rate: int) -> tuple[NDArray[np.int64], Seconds]:
    """First and last + 1 `[N, 2]` of the frames of each stretch without sound, and the length of a frame."""
    hop = max(1, round(rate * FRAME))
    level = levels(powers(samples, hop), 3)
    return runs(level <= floor_of(level) + _ABOVE), hop / rate


def gathered(pieces: Iterable[Piece], num_samples: float) -> Iterator[list[Piece]]:
    """Pieces in groups, each as soon as it has `num_samples` or there are no more."""
    group: list[Piece] = []
    for piece in pieces:
        group.append(piece)
        if sum(len(each.samples) for each in group) >= num_samples:
            yield group
            group = []
    if group:
        yield group


class Segmenter:
    """Finds the segments of audio that comes in pieces.

    A detector of the energy with hysteresis: speech rises 10 dB above the noise floor, and ends where it stays within
    6 dB of it for the length of a pause. The floor is the level of the last 0.45 s of even noise, or without any in the
    last ten seconds, their lowest level.

    Args:
        rate: The sampling rate of the segments.
        segmentation: Where to cut.
        given_rate: The sampling rate of the audio, which is resampled; None: `rate`.
    """

    def __init__(self, rate: int, segmentation: Segmentation | None = None, given_rate: int | None = None) -> None:
        chosen = segmentation or Segmentation()
        self._resampler = Resampler(given_rate or rate, rate)
        self._hop = max(1, round(rate * FRAME))
        self._pause, self._pad, self._longest = (
            round(each / FRAME) for each in (chosen.pause, min(chosen.pad, chosen.pause / 2), chosen.longest)
        )
        self._start = 0  # of the pending samples
        self._samples = np.zeros(0, np.float32)
        self._power = np.zeros(0)
        self._high = np.zeros(0)  # of the differences of the samples, as many frames
        self._noise: tuple[float, int] | None = None  # the level of the last even noise, dB, and frames since then
        self._loudest = -math.inf  # dB, of all frames that have been looked at
        self._before = np.zeros(0)  # levels of the frames before the pending ones
        self._seen = 0  # pending frames that have been looked at
        self._found = 0

    def feed(self, samples: NDArray[np.float32]) -> list[Piece]:
        """The segments that end in the next samples `[T]`."""
        return self._cut(self._resampler.feed(samples))

    def end(self) -> list[Piece]:
        """The last segments."""
        pieces = self._cut(self._resampler.end())
        if len(self._power) * self._hop < len(self._samples):
            self._power = np.append(self._power, self._samples[-self._hop :].var(dtype=np.float64))
            self._high = np.append(self._high, self._power[-1])
        self._seen = len(self._power)
        pieces += iter(partial(self._look, is_end=True), None)
        is_silent = not len(self._power) or float(levels(self._power).max()) < _LOWEST + _LOUD
        if not self._found and not self._start and not is_silent:
            pieces.append(self._taken(self._seen))  # all there is; too short to tell speech from noise
        return pieces

    def _cut(self, samples: NDArray[np.float32]) -> list[Piece]:
        self._samples = np.concatenate([self._samples, samples])
        known = len(self._power) * self._hop
        self._power = np.concatenate([self._power, powers(self._samples[known:], self._hop)])
        high = powers(self._samples[known:], self._hop, high=True)
        self._high = np.concatenate([self._high, high])
        pieces: list[Piece] = []
        while self._seen + _LOOK_EVERY <= len(self._power):
            self._seen += _LOOK_EVERY
            self._listen_for_noise()
            pieces += iter(self._look, None)
        return pieces

    @property
    def taken(self) -> int:
        """All samples so far."""
        return self._start + len(self._samples)

    @property
    def pending(self) -> Piece | None:
        """The segment that has not ended, so far; None where there is no speech."""
        level = levels(self._power)
        if not len(found := self._speech(level)):
            return None
        begin = self._begin(found) * self._hop
        return Piece(self._start + begin, self._samples[begin:])

    def _speech(self, level: NDArray[np.float64]) -> NDArray[np.int64]:
        """The stretches with speech `[N, 2]` of pending levels, in frames."""
        quietest = min(floor_of(level), floor_of(self._before))
        floor = max(_LOWEST, quietest if self._noise is None else self._noise[0])
        found = runs(level > floor + _ABOVE)
        if not len(found):
            return found
        is_loud = np.maximum.reduceat(level, found[:, 0]) > floor + _LOUD
        return found[is_loud & (found[:, 1] - found[:, 0] >= _SHORTEST)]

    def _listen_for_noise(self) -> None:
        """Whether the newest frames that are looked at are noise."""
        newest = slice(max(0, self._seen - _EVEN), self._seen)
        level = levels(self._power[newest])
        self._loudest = max(self._loudest, float(level[-_LOOK_EVERY:].max()))
        is_even = len(level) == _EVEN and np.ptp(level) < _ABOVE and np.ptp(levels(self._high[newest])) < _ABOVE
        if is_even and level.max() < max(self._loudest - _FAINT, _LOWEST):
            self._noise = float(level.min()), 0
        elif self._noise is not None:
            age = self._noise[1] + _LOOK_EVERY
            self._noise = (self._noise[0], age) if age < _FLOOR else None

    def _look(self, is_end: bool = False) -> Piece | None:
        """The first segment that has ended, if there is one, which is taken away."""
        level = levels(self._power[: self._seen])
        found = self._speech(level)
        if not len(found):
            if self._seen > _PATIENCE:
                self._taken(self._seen - _PATIENCE)
            return None
        gaps = np.flatnonzero(found[1:, 0] - found[:-1, 1] >= self._pause)
        begin = self._begin(found)
        last = int(found[gaps[0] if len(gaps) else -1, 1])
        if last - begin > self._longest or (not len(gaps) and self._seen - begin >= self._longest):
            half = begin + self._longest // 2
            quietest = levels(self._power[half : begin + self._longest], 4 * _SMOOTHED)
            return self._kept(begin, half + int(quietest.argmin()))
        if len(gaps) or is_end or self._seen - last >= self._pause:
            is_whole = is_end and not len(gaps) and self._seen - last < self._pause
            return self._kept(begin, self._seen if is_whole else min(last + self._pad, self._seen))
        return None

    def _begin(self, found: NDArray[np.int64]) -> int:
        """The frame in which the first segment begins."""
        first = int(found[0, 0])
        return 0 if self._start == 0 and first < self._pause else max(0, first - self._pad)

    def _kept(self, begin: int, end: int) -> Piece:
        self._found += 1
        self._taken(begin)
        return self._taken(end - begin)

    def _taken(self, end: int) -> Piece:
        """Take the pending frames up to `end` away."""
        self._before = np.concatenate([self._before, levels(self._power[:end])])[-_FLOOR:]
        cut = end * self._hop
        piece = Piece(self._start, self._samples[:cut])
        self._start += len(piece.samples)
        self._samples, self._power, self._high = self._samples[cut:], self._power[end:], self._high[end:]
        self._seen -= end
        return piece
