"""Finds similar texts: candidates by MinHash, each verified exactly."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

from rensa import RMinHash, RMinHashLSH

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
