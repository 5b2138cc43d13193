"""Uses the levels of a recording's frames to find the level of its speech and its pauses, and to compute features that
depend on neither.

This module imports only NumPy, because exported models contain this file.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Levels = NDArray[np.floating[Any]]

_QUIET, _LOUD, _SPEECH = 0.10, 0.95, 0.4
SCALE = 3.0
"""Approximate standard deviation of log-mel energies in speech, in nats."""
_MARGIN = 10 ** (15.9 / 10)
"""Ratio of powers. By ITU-T P.56, frames more than 15.9 dB below the level of speech are not active."""
_SMOOTHED = 5
"""Number of frames over which powers are averaged before the search for pauses."""
_GROUPS = 4
"""Number of groups of bands that are searched for sound."""
_RANGE = 10 ** (30 / 10)
"""Ratio of powers. Frames more than 30 dB below the level of speech are silence."""
_FLOOR = -math.log(_RANGE)
_EVEN, _RISE = 35, 10 ** (6 / 10)
"""Number of frames, and ratio of powers. If no group of bands rises by 6 dB in this many frames, the frames are noise,
because no vowel or fricative is as long and as even."""
_BELOW = 10 ** (8 / 10)
"""Ratio of powers. Noise is recognised only if it is at least 8 dB below the level of speech."""
_AT_ENDS = 1
"""Number of frames kept of a pause at either end of a recording."""


def loud_frames(levels: Levels, least_range: float = 0.0) -> NDArray[np.bool_]:
    """Whether each frame is loud, `[n]`, given the levels `[n]` of frames on a logarithmic scale.

    Levels are averaged over five frames. A frame is loud if its level is at least 40 % of the way from the 10 %
    quantile of all levels to the 95 % quantile. All frames are loud if the quantiles are less than `least_range` apart.
    """
    level = _smoothed(levels)
    quiet, loud = np.quantile(level, [_QUIET, _LOUD])
    is_loud: NDArray[np.bool_] = (level >= quiet + _SPEECH * (loud - quiet)) | (loud - quiet < least_range)
    return is_loud


def active(power: Levels) -> NDArray[np.bool_]:
    """Whether each frame is active, `[n]`, given the powers `[n]` of frames. The active frames are the largest set of
    loudest frames in which no frame is more than 15.9 dB below the mean power of the set.

    The method is that of ITU-T P.56 (2011), "Objective measurement of active speech level", applied to the powers of
    frames in place of an envelope. Silence is never active, however long it is, unless there is nothing else.
    """
    ordered = np.sort(power)[::-1]
    means = np.cumsum(ordered, dtype=np.float64) / np.arange(1, len(power) + 1)
    last = int(np.flatnonzero(ordered * _MARGIN >= means)[-1])
    found: NDArray[np.bool_] = power >= ordered[last]
    return found


def normalised(energies: Iterable[Levels]) -> list[Levels]:
    """Normalise the log-mel energies e `[n, bands]` of each utterance. The results depend neither on the level of the
    utterance nor on the amount of silence in it:

        x = log(exp(e - l) + 0.001) - m,  divided by 3

    where l is the level of speech, and m is the mean of each band over the active frames.
    """
    scaled = []
    for each in energies:
        power = np.exp(each).mean(1)
        is_active = active(power)
        floored = np.logaddexp(each - np.log(power[is_active].mean()), each.dtype.type(_FLOOR))
        scaled.append((floored - floored[is_active].mean(0)) / each.dtype.type(SCALE))
    return scaled


def without_long_pauses(powers: Sequence[Levels], longest: int) -> list[NDArray[np.int64]]:
    """For each recording, the indices `[m]` of the frames that remain when long pauses are shortened, given powers
    `[n, bands]`. The middle of each pause of more than `longest` frames is dropped, and all frames but one of a pause
    at an end of the recording.

    In a pause, each group of bands is 30 dB below the level of speech, or within 6 dB of a noise that lasts for 0.35 s
    somewhere in the recording. Levels are averaged over five frames.
    """
    return [_without_long_pauses(each, longest) for each in powers]


def _without_long_pauses(powers: Levels, longest: int) -> NDArray[np.int64]:
    total, count = powers.mean(1), len(powers)
    speech = float(total[active(total)].mean())
    groups = np.array_split(powers, min(_GROUPS, powers.shape[1]), axis=1)
    level = np.stack([_smoothed(each.mean(1)) for each in groups], axis=1)
    highest = np.full(level.shape[1], speech / _RANGE)
    is_noise = np.zeros(count, bool)
    if count >= _EVEN:
        windows = np.lib.stride_tricks.sliding_window_view(level, _EVEN, axis=0)
        is_even = (windows.max(2) < windows.min(2) * _RISE).all(1) & (windows.mean((1, 2)) < speech / _BELOW)
        is_noise = np.convolve(is_even, np.ones(_EVEN)) > 0.5
        if is_noise.any():
            highest = np.maximum(highest, level[is_noise].min(0) * _RISE)
    is_quiet = is_noise | (level < highest).all(1)
    kept = np.ones(count, bool)
    for first, end in np.flatnonzero(np.diff(is_quiet, prepend=False, append=False)).reshape(-1, 2).tolist():
        is_first, is_last = first == 0, end == count
        before = longest if is_first and is_last else 0 if is_first else _AT_ENDS if is_last else longest // 2
        after = 0 if is_last else _AT_ENDS if is_first else longest // 2
        if first + before < end - after:
            kept[first + before : end - after] = False
    return np.flatnonzero(kept)


def _smoothed(power: Levels) -> Levels:
    """The mean of each power in `[n]` and its neighbours, up to two on either side."""
    sums, counts = (np.convolve(each, np.ones(_SMOOTHED))[2:-2] for each in (power, np.ones(len(power))))
    smooth: Levels = sums / counts
    return smooth
