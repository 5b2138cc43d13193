"""Measurements of an utterance's audio, and a comparison that detects copies of a recording."""

import hashlib
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from starling.errors import DataError
from starling.speech.corpora import Audio
from starling.speech.usable import resampled

FULL_SCALE = 32767 / 32768
"""The largest positive 16-bit sample; samples of at least this magnitude count as clipped."""
ENVELOPE_LENGTH = 32
"""The number of equally long segments whose level is kept."""
_FLOOR = -40.0  # dB relative to the utterance's level; lower levels are raised to it, to ignore noise and codecs
_COMPARED_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Sound:
    """The measurements of one utterance; about 250 bytes in CPython, whatever its length."""

    digest: bytes
    """Digest of the decoded samples at 16 bits and their rate, the same for all lossless encodings."""
    envelope: bytes
    """[ENVELOPE_LENGTH] of int8: levels in units of 0.5 dB, relative to the utterance's level."""
    level_db: float
    """Root mean square relative to full scale."""
    clipped: float
    """Fraction of the samples at full scale."""
    seconds: float


def measure(samples: NDArray[np.float32], rate: int) -> Sound:
    """The measurements of samples [T] that passed `check_samples`, at `rate` Hz."""
    quantised = np.clip(np.rint(samples * 32768.0), -32768, 32767).astype("<i2")
    digest = hashlib.blake2b(quantised.tobytes(), digest_size=16, key=str(rate).encode()).digest()
    power = float(np.mean(np.square(samples, dtype=np.float64)))
    return Sound(
        digest,
        _envelope(samples, power).tobytes(),
        10 * math.log10(power) if power else -math.inf,
        float(np.mean(np.abs(samples) >= FULL_SCALE)),
        len(samples) / rate,
    )


def likeness(first: Audio, second: Audio, tolerance: float) -> float:
    """Correlation of two waveforms, 0 to 1, at the best shift of up to `tolerance` seconds.

        max_|s| |sum_t a[t] b[t + s]| / (|a| |b|)

    Level and polarity do not matter. At most the first 20 s are compared. 0 if the rates cannot be converted.
    """
    (a, rate), (b, other) = first, second
    try:
        b = resampled(b, other, rate)
    except DataError:
        return 0.0
    end = round(_COMPARED_SECONDS * rate)
    a, b = a[:end], b[:end]
    size = 1 << (len(a) + len(b) - 1).bit_length()
    products = np.fft.irfft(np.fft.rfft(a, size) * np.conj(np.fft.rfft(b, size)), size)
    shift = round(tolerance * rate)
    best = max(np.abs(products[: shift + 1]).max(), np.abs(products[size - shift :]).max(initial=0.0))
    norm = math.sqrt(float(np.sum(np.square(a, dtype=np.float64))) * float(np.sum(np.square(b, dtype=np.float64))))
    return min(1.0, float(best) / norm) if norm else 0.0


def _envelope(samples: NDArray[np.float32], power: float) -> NDArray[np.int8]:
    padded = np.pad(samples, (0, max(0, ENVELOPE_LENGTH - len(samples)))).astype(np.float64)
    edges = np.linspace(0, len(padded), ENVELOPE_LENGTH + 1).astype(int)
    powers = np.add.reduceat(np.square(padded), edges[:-1]) / np.diff(edges)
    relative = 10 * np.log10(np.maximum(powers / max(power, 1e-30), 10 ** (_FLOOR / 10)))
    halves: NDArray[np.int8] = np.clip(np.rint(2 * relative), -128, 127).astype(np.int8)
    return halves
