"""Texts that are nearly the same: candidates by MinHash, each verified exactly."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

from rensa import RMinHash, RMinHashLSH

NUM_HASHES = 120
_MISSED = 1e-4
_BLOCK = 1000
_CACHED = 5000  # texts whose pieces are kept, about 10 kB each
_DOUBT = 0.25  # how far below the truth 120 hashes never estimate: over five standard deviations
Near = list[tuple[int, float]]
"""Places of other texts, and the similarity to each."""


def pieces(text: str, ngram: int) -> frozenset[str]:
    """The runs of `ngram` characters in a text between two spaces, each numbered by how often it was there before.

    Numbered, so that `ONE ONE ONE` is not `ONE`: the similarity below is then that of multisets.
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
    """Jaccard's: |A and B| / |A or B|."""
    shared = len(first & second)
    return shared / (len(first) + len(second) - shared)


def num_bands(threshold: float) -> int:
    """Bands into which the hashes are split, so that near-duplicates are missed once in 10,000 times at most.

    Two texts of similarity s meet in one of b bands of r hashes with probability 1 - (1 - s^r)^b (Leskovec,
    Rajaraman & Ullman, Mining of Massive Datasets, section 3.4); the fewest bands that keep the promise leave the
    fewest candidates to verify.
    """
    fitting = [bands for bands in range(1, NUM_HASHES + 1) if NUM_HASHES % bands == 0]
    return next(bands for bands in fitting if (1 - threshold ** (NUM_HASHES // bands)) ** bands <= _MISSED)


def near_texts(
    texts: Sequence[str], threshold: float, ngram: int, progress: Callable[[int, int], None] | None = None
) -> Iterator[Near]:
    """For each of some different texts, the others whose similarity is `threshold` or more.

    Memory: about 3 kB a text. Time: in texts of few words, such as digits, the candidates grow faster than the texts.
    `progress` is called with texts done and in all.
    """
    cached = lru_cache(maxsize=_CACHED)(pieces)
    sketches: list[RMinHash] = []
    for start in range(0, len(texts), _BLOCK):
        block = [list(pieces(text, ngram)) for text in texts[start : start + _BLOCK]]
        sketches += RMinHash.from_token_sets(block, NUM_HASHES, 1)
    index = RMinHashLSH(threshold=threshold, num_perm=NUM_HASHES, num_bands=num_bands(threshold))
    index.insert_many(sketches, 0)
    promising = threshold - _DOUBT
    for start in range(0, len(texts), _BLOCK):
        for place, candidates in enumerate(index.query_all(sketches[start : start + _BLOCK]), start):
            sketch, own = sketches[place], cached(texts[place], ngram)
            others = sorted(other for other in set(candidates) if sketch.jaccard(sketches[other]) >= promising)
            near = ((other, similarity(own, cached(texts[other], ngram))) for other in others if other != place)
            yield [(other, value) for other, value in near if value >= threshold]
        if progress is not None:
            progress(min(start + _BLOCK, len(texts)), len(texts))
