"""Tells the loud frames of a recording, which are speech, from its pauses."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

_SMOOTHED = 5  # frames
_QUIET, _LOUD = 0.10, 0.95
_SPEECH = 0.4


def loud_frames(levels: NDArray[np.floating[Any]], least_range: float = 0.0) -> NDArray[np.bool_]:
    """Which frames are loud `[n]`, by their levels `[n]` on a logarithmic scale.

    Levels are averaged over five frames. A frame is loud if its level is at least 40 % of the way from the 10 %
    quantile of all levels to the 95 % quantile. All frames are loud if these are less than `least_range` apart.
    """
    sums, counts = (np.convolve(each, np.ones(_SMOOTHED))[2:-2] for each in (levels, np.ones(len(levels))))
    level = sums / counts
    quiet, loud = np.quantile(level, [_QUIET, _LOUD])
    is_loud: NDArray[np.bool_] = (level >= quiet + _SPEECH * (loud - quiet)) | (loud - quiet < least_range)
    return is_loud
