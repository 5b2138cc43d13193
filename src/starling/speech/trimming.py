"""Trims the pauses before and after the speech of a recording."""

import numpy as np
from numpy.typing import NDArray

from starling.speech.levels import loud_frames

_FRAME = 0.010  # seconds
_PRE_EMPHASIS = 0.97
_LEAST_RANGE = 10.0  # dB


def trimmed(samples: NDArray[np.float32], rate: int, margin: float) -> NDArray[np.float32]:
    """The part of samples `[T]` from `margin` seconds before the first loud frame to `margin` seconds after the last.

    The level of a 10 ms frame is its power in dB after pre-emphasis; `loud_frames` says which are loud. A recording
    whose quantiles are less than 10 dB apart has no pauses, and is returned unchanged.
    """
    size = max(1, round(_FRAME * rate))
    count = len(samples) // size
    if not count:
        return samples
    emphasised = samples - np.float32(_PRE_EMPHASIS) * np.concatenate([samples[:1], samples[:-1]])
    power = np.square(emphasised[: count * size], dtype=np.float64).reshape(count, size).mean(1)
    (places,) = np.nonzero(loud_frames(10 * np.log10(power + 1e-10), _LEAST_RANGE))
    first, last = int(places[0]), int(places[-1])
    kept = round(margin * rate)
    end = (last + 1) * size if last + 1 < count else len(samples)
    return samples[max(0, first * size - kept) : end + kept]
