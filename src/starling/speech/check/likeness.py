"""How alike two recordings are, by measurements and waveforms, and which texts are alike, by MinHash."""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from rensa import RMinHash, RMinHashLSH

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


NUM_HASHES = 120
_MAX_MISS_RATE = 1e-4
_BLOCK = 1000
_CACHED = 5000  # texts whose n-grams are kept, about 10 kB each
_MARGIN = 0.25  # how much lower than the truth an estimate by 120 hashes may be: over five standard deviations
Near = list[tuple[int, float]]
"""Indices of other texts, each with its similarity."""


def pieces(text: str, ngram: int) -> frozenset[str]:
    """The n-grams of `ngram` characters in a text with a space at each end; repeated ones are numbered.

    The numbers make the similarity below that of multisets, so that `ONE ONE ONE` differs from `ONE`.
    """
    padded = f" {text} "
    seen = Counter[str]()
    found = set()
    for start in range(max(1, len(padded) - ngram + 1)):
        piece = padded[start : start + ngram]
        found.add(f"{piece}\0{seen[piece]}" if seen[piece] else piece)
        seen[piece] += 1
    return frozenset(found)


def similarity(first: frozenset[str], second: frozenset[str]) -> float:
    """Jaccard similarity: |A and B| / |A or B|."""
    shared = len(first & second)
    return shared / (len(first) + len(second) - shared)


def num_bands(threshold: float) -> int:
    """The number of bands of hashes, such that at most one near-duplicate in 10,000 is missed.

    Two texts of similarity s agree in at least one of b bands of r hashes with probability 1 - (1 - s^r)^b (Leskovec,
    Rajaraman & Ullman, Mining of Massive Datasets, section 3.4). The smallest such number gives the fewest candidates.
    """
    fitting = [bands for bands in range(1, NUM_HASHES + 1) if NUM_HASHES % bands == 0]
    return next(bands for bands in fitting if (1 - threshold ** (NUM_HASHES // bands)) ** bands <= _MAX_MISS_RATE)


def near_texts(
    texts: Sequence[str], threshold: float, ngram: int, progress: Callable[[int, int], None] | None = None
) -> Iterator[Near]:
    """For each of several distinct texts, the others with a similarity of at least `threshold`.

    Needs about 3 kB per text. With a small vocabulary, such as digits, the number of candidates grows faster than that
    of texts. `progress` is called with the number of texts done and the total.
    """
    cached = lru_cache(maxsize=_CACHED)(pieces)
    sketches: list[RMinHash] = []
    for start in range(0, len(texts), _BLOCK):
        block = [list(pieces(text, ngram)) for text in texts[start : start + _BLOCK]]
        sketches += RMinHash.from_token_sets(block, NUM_HASHES, 1)
    index = RMinHashLSH(threshold=threshold, num_perm=NUM_HASHES, num_bands=num_bands(threshold))
    index.insert_many(sketches, 0)
    promising = threshold - _MARGIN
    for start in range(0, len(texts), _BLOCK):
        for place, candidates in enumerate(index.query_all(sketches[start : start + _BLOCK]), start):
            sketch, own = sketches[place], cached(texts[place], ngram)
            others = sorted(other for other in set(candidates) if sketch.jaccard(sketches[other]) >= promising)
            near = ((other, similarity(own, cached(texts[other], ngram))) for other in others if other != place)
            yield [(other, value) for other, value in near if value >= threshold]
        if progress is not None:
            progress(min(start + _BLOCK, len(texts)), len(texts))
