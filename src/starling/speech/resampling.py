"""Changes the sampling rate of a waveform, which is given as a whole or arrives in pieces."""

import math
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

_ZEROS = 6  # zero crossings of the sinc on either side
_ROLLOFF = 0.99
_LARGEST = 1 << 22  # maximum number of weights in a kernel: 16 MiB
_COARSE = 16_000
"""Largest term in the approximation of a ratio of rates. A ratio whose kernel would be too large, such as 44,099 to
8,000 Hz, is approximated to keep the kernel small. The error is 2.3e-7 in this example, and at most 1.3e-4 (8,001 to
48,000 Hz, whose nearest simple ratio is 1 to 6)."""


class _Kernel(NamedTuple):
    """Windowed sincs that convert every `before` samples to `after` samples."""

    weights: torch.Tensor  # [after, 1, width + before + width]
    width: int
    before: int
    after: int


@lru_cache(maxsize=32)
def _kernel(rate: int, wanted: int) -> _Kernel:
    """A kernel that is bit-identical to that of torchaudio and lhotse (sinc_interp_hann). Importing lhotse, which takes
    0.2 s, is not necessary. For equal rates, the kernel changes nothing."""
    if rate == wanted:
        return _Kernel(torch.ones(1, 1, 1), 0, 1, 1)
    ratio = exact = Fraction(min(rate, wanted), max(rate, wanted))
    most = _COARSE
    while ratio.numerator * ratio.denominator > _LARGEST:
        ratio = exact.limit_denominator(most) or Fraction(1, most)
        most //= 2
    after, before = (ratio if rate > wanted else 1 / ratio).as_integer_ratio()
    base = min(before, after) * _ROLLOFF
    width = math.ceil(_ZEROS * before / base)
    places = torch.arange(-width, width + before, dtype=torch.float64)[None, None] / before
    times = ((torch.arange(0, -after, -1)[:, None, None] / after + places) * base).clamp_(-_ZEROS, _ZEROS)
    window = torch.cos(times * math.pi / _ZEROS / 2) ** 2
    weights = torch.sinc(times) * window * (base / before)
    return _Kernel(weights.float(), width, before, after)


def resampled(waveform: torch.Tensor, rate: int, wanted: int) -> torch.Tensor:
    """Resample `waveform` `[..., T]` from `rate` Hz to `wanted` Hz. The result is `[..., ceil(T * wanted / rate)]`."""
    if rate == wanted:
        return waveform
    kernel = _kernel(rate, wanted)
    length = math.ceil(kernel.after * waveform.shape[-1] / kernel.before)
    rows = waveform.reshape(-1, waveform.shape[-1])
    rows = torch.nn.functional.pad(rows, (kernel.width, kernel.width + kernel.before))
    found = torch.nn.functional.conv1d(rows[:, None], kernel.weights, stride=kernel.before)
    return found.transpose(1, 2).reshape(*waveform.shape[:-1], -1)[..., :length]


class Resampler:
    """Changes the sampling rate of a waveform that arrives in pieces of any length. The result is the same as for the
    whole waveform."""

    def __init__(self, rate: int, wanted: int) -> None:
        self._kernel = _kernel(rate, wanted)
        self._kept = np.zeros(self._kernel.width, np.float32)
        self._taken = self._given = 0

    def feed(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """Add the next samples `[T]`, and return the next resampled samples `[T']`."""
        self._taken += len(samples)
        return self._steps(samples)

    def end(self) -> NDArray[np.float32]:
        """End the waveform, and return the last resampled samples `[T']`."""
        _, width, before, after = self._kernel
        missing = math.ceil(after * self._taken / before) - self._given
        return self._steps(np.zeros(width + before, np.float32))[:missing]

    def _steps(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        weights, width, before, after = self._kernel
        kept = np.concatenate([self._kept, samples])
        steps = max(0, (len(kept) - 2 * width) // before)
        self._kept = kept[steps * before :]
        self._given += steps * after
        if not steps:
            return np.zeros(0, np.float32)
        used = torch.from_numpy(kept[: steps * before + 2 * width])[None, None]
        found = torch.nn.functional.conv1d(used, weights, stride=before)
        return np.asarray(found[0].T.reshape(-1).numpy())
