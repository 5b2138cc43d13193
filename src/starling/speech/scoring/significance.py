"""Whether two recognisers differ on the same utterances."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from starling.speech.scoring.error_rates import NOTHING, Alignment, align_words, num_errors

_BUFFER = 2
"""Consecutive words that both recognise, which end a segment."""
_REPLICATIONS = 10_000
_AT_A_TIME = 200  # of the replications, to limit memory


@dataclass(frozen=True)
class MatchedPairs:
    """The test of matched pairs of sentence segments (MAPSSWE)."""

    segments: int
    difference: float  # mean errors of the first minus those of the second, per segment
    t: float | None  # the statistic, with segments - 1 degrees of freedom; None: it cannot be computed
    p: float | None  # probability, if they do not differ, of a difference this large in either direction


@dataclass(frozen=True)
class PairedBootstrap:
    """The difference of two word error rates, first minus second, in per cent of the reference words."""

    difference: float
    interval: tuple[float, float]  # 95 %
    second_better: float  # share of the samples in which the second has fewer errors


def matched_pairs(references: Mapping[str, str], first: Mapping[str, str], second: Mapping[str, str]) -> MatchedPairs:
    """Whether two recognisers differ in errors per segment.

    A segment is a stretch of an utterance in which either of them errs; two consecutive words that both recognise, with
    nothing inserted between them, end it. Errors in different segments are taken to be independent. The mean
    difference is tested by Student's t, which is the normal distribution of the original where segments are many.

    References:
        Gillick and Cox, "Some statistical issues in the comparison of speech recognition algorithms", ICASSP 1989.
        Pallett, Fisher and Fiscus, "Tools for the analysis of benchmark speech recognition tests", ICASSP 1990.
    """
    from scipy.stats import ttest_1samp

    ours, theirs = align_words(references, first), align_words(references, second)
    pairs = [pair for name in references for pair in error_segments(ours[name], theirs[name])]
    differences = np.array([one - two for one, two in pairs], dtype=np.float64)
    mean = float(differences.mean()) if pairs else 0.0
    if len(pairs) < 2 or not differences.std():
        return MatchedPairs(len(pairs), mean, None, None)
    result = ttest_1samp(differences, 0.0)
    return MatchedPairs(len(pairs), mean, float(result.statistic), float(result.pvalue))


def error_segments(first: Alignment, second: Alignment) -> list[tuple[int, int]]:
    """The errors of both in each segment of an utterance, from their alignments with the same reference."""
    wrong, inserted = zip(_by_place(first), _by_place(second), strict=True)
    found: list[tuple[int, int]] = []
    errors = [0, 0]
    good = 0

    def end() -> None:
        if any(errors):
            found.append((errors[0], errors[1]))
        errors[:] = [0, 0]

    for place in range(len(inserted[0])):
        steps = [[each[place] for each in inserted]]
        if place < len(wrong[0]):
            steps.append([each[place] for each in wrong])
        for number, step in enumerate(steps):
            if any(step):
                errors = [before + more for before, more in zip(errors, step, strict=True)]
                good = 0
            elif number == 1:
                good += 1
                if good == _BUFFER:
                    end()
    end()
    return found


def _by_place(alignment: Alignment) -> tuple[list[int], list[int]]:
    """Whether each reference word is wrong, and how many words are inserted before each and after the last one."""
    wrong: list[int] = []
    inserted = [0]
    for reference, hypothesis in alignment:
        if reference == NOTHING:
            inserted[-1] += 1
        else:
            wrong.append(int(reference != hypothesis))
            inserted.append(0)
    return wrong, inserted


def paired_bootstrap(
    references: Mapping[str, str], first: Mapping[str, str], second: Mapping[str, str], seed: int = 0
) -> PairedBootstrap | None:
    """The difference of two word error rates over samples of the utterances, drawn with replacement; None where it
    cannot be estimated: of less than two utterances, or where a reference is empty.

    References:
        Bisani and Ney, "Bootstrap estimates for confidence intervals in ASR performance evaluation", ICASSP 2004.
    """
    words = np.array([len(text.split()) for text in references.values()], dtype=np.int64)
    if len(words) < 2 or not words.all():
        return None
    first_errors, second_errors = (
        np.array([num_errors(each) for each in align_words(references, texts).values()]) for texts in (first, second)
    )
    errors = first_errors - second_errors
    generator = np.random.default_rng(seed)
    sums = []
    for _ in range(_REPLICATIONS // _AT_A_TIME):
        drawn = generator.integers(len(words), size=(_AT_A_TIME, len(words)))
        sums.append(100.0 * errors[drawn].sum(1) / words[drawn].sum(1))
    differences = np.concatenate(sums)
    low, high = np.percentile(differences, [2.5, 97.5])
    return PairedBootstrap(
        100.0 * float(errors.sum()) / float(words.sum()),
        (float(low), float(high)),
        float((differences > 0).mean()),
    )


def verdict_of(pairs: MatchedPairs, level: float = 0.05) -> str:
    """The result of the test as a sentence."""
    told = f"matched pairs (MAPSSWE): {pairs.segments} segments, mean difference {pairs.difference:+.3f} errors"
    if pairs.p is None or pairs.t is None:
        return f"{told}; too few or all alike, so that there is no test"
    verdict = "significant" if pairs.p < level else "not significant"
    p = f"p = {pairs.p:.3g}" if pairs.p >= 1e-4 else f"p = {max(pairs.p, math.ulp(0.0)):.1e}"
    return f"{told}, t = {pairs.t:.2f}, {p}: {verdict} at {level:.0%}"
