"""Significance of differences, against plain formulas, NIST's example and another library."""

import math
import re

import kaldialign
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm

from starling.speech.scoring import (
    NOTHING,
    Alignment,
    align_words,
    error_segments,
    matched_pairs,
    paired_bootstrap,
)

WORDS = st.lists(st.sampled_from("abc"), max_size=12).map(" ".join)


def aligned(reference: str, hypothesis: str) -> Alignment:
    return align_words({"u": reference}, {"u": hypothesis})["u"]


def test_the_segments_of_nists_example() -> None:
    """Its sentence, "It was the best of times", has four segments, with the errors of either system."""
    reference = "it was the best of times it was the worst of times it was"
    first = "ITS the best of times it IS the worst of times OR it was"
    second = "it was the best times it WON the TEST of times it was"
    assert error_segments(aligned(reference, first), aligned(reference, second)) == [(2, 0), (0, 1), (1, 2), (1, 0)]


@given(WORDS, WORDS, WORDS)
def test_segments_lie_between_pairs_of_correct_words(reference: str, first: str, second: str) -> None:
    """A regular expression finds the same: g is a word that both recognise, other letters are errors."""
    ours, theirs = aligned(reference, first), aligned(reference, second)
    signs = ""
    places = iter_places(ours), iter_places(theirs)
    for one, two in zip(*places, strict=True):
        signs += "A" * one[0] + "B" * two[0]  # inserted before a word
        if one[1] is not None and two[1] is not None:
            signs += "A" * one[1] + "B" * two[1] or "g"
    chunks = re.split("g{2,}", signs)
    expected = [(each.count("A"), each.count("B")) for each in chunks if set(each) - {"g"}]
    assert error_segments(ours, theirs) == expected


def iter_places(alignment: Alignment) -> list[tuple[int, int | None]]:
    """Words inserted before each reference word, and whether it is wrong; at the end those after it, and None."""
    found: list[tuple[int, int | None]] = []
    inserted = 0
    for reference, hypothesis in alignment:
        if reference == NOTHING:
            inserted += 1
        else:
            found.append((inserted, int(reference != hypothesis)))
            inserted = 0
    return [*found, (inserted, None)]


def texts_with_errors(seed: int, rate: float, count: int = 150) -> tuple[dict[str, str], dict[str, str]]:
    generator = np.random.default_rng(seed)
    references = {f"u{number}": " ".join(generator.choice(list("abcdefgh"), 10)) for number in range(count)}
    noise = np.random.default_rng(seed + 1000)
    found = {
        name: " ".join("x" if noise.random() < rate else word for word in text.split())
        for name, text in references.items()
    }
    return references, found


def with_rate(references: dict[str, str], seed: int, rate: float) -> dict[str, str]:
    noise = np.random.default_rng(seed)
    return {
        name: " ".join("x" if noise.random() < rate else word for word in text.split())
        for name, text in references.items()
    }


def test_the_statistic_is_the_formula_of_the_paper() -> None:
    """W = mean / (deviation / sqrt(n)) is close to the normal distribution where segments are many."""
    references, first = texts_with_errors(1, 0.15)
    second = with_rate(references, 7, 0.12)
    ours, theirs = align_words(references, first), align_words(references, second)
    pairs = [pair for name in references for pair in error_segments(ours[name], theirs[name])]
    z = np.array([one - two for one, two in pairs])
    w = z.mean() / (z.std(ddof=1) / math.sqrt(len(z)))
    result = matched_pairs(references, first, second)
    assert (result.segments, result.difference) == (len(z), pytest.approx(z.mean()))
    assert result.t == pytest.approx(w)
    assert result.p == pytest.approx(2 * norm.sf(abs(w)), abs=0.01)
    other_way = matched_pairs(references, second, first)
    assert (other_way.t, other_way.p) == (pytest.approx(-w), pytest.approx(result.p))


def test_equal_systems_are_rarely_called_different_and_unequal_ones_often() -> None:
    """At the 5 % level, few of 100 pairs with equal error rates differ, and all of 20 pairs with 20 % and 10 %."""
    false = 0
    for seed in range(100):
        references, first = texts_with_errors(seed, 0.1, 60)
        p = matched_pairs(references, first, with_rate(references, seed + 5000, 0.1)).p
        false += p is not None and p < 0.05
    assert false <= 12
    for seed in range(20):
        references, first = texts_with_errors(seed, 0.2)
        p = matched_pairs(references, first, with_rate(references, seed + 5000, 0.1)).p
        assert p is not None and p < 0.05


def test_the_paired_bootstrap_agrees_with_kaldialign() -> None:
    """They agree on the share of samples in which the second is better; the interval is that of the normal
    distribution."""
    references, first = texts_with_errors(3, 0.15)
    second = with_rate(references, 9, 0.13)
    result = paired_bootstrap(references, first, second)
    assert result is not None
    theirs = kaldialign.bootstrap_wer_ci(
        [text.split() for text in references.values()],
        [first[name].split() for name in references],
        [second[name].split() for name in references],
    )
    assert result.second_better == pytest.approx(theirs["p_s2_improv_over_s1"], abs=0.02)
    errors = np.array(
        [(first[name].count("x") - second[name].count("x")) * 100 / 10 for name in references], dtype=float
    )
    half = 1.96 * errors.std() / math.sqrt(len(errors))
    assert result.difference == pytest.approx(errors.mean())
    assert result.interval == pytest.approx((errors.mean() - half, errors.mean() + half), abs=0.15)


def test_without_differences_there_is_no_test() -> None:
    """There is none with too few utterances, either."""
    references = {"a": "one two", "b": "three"}
    result = matched_pairs(references, references, references)
    assert (result.segments, result.t, result.p) == (0, None, None)
    assert result.verdict.endswith("there is no test, because the segments are too few or all alike")
    same = paired_bootstrap(references, references, references)
    assert same is not None and (same.difference, same.interval, same.second_better) == (0.0, (0.0, 0.0), 0.0)
    assert paired_bootstrap({"a": "one"}, {"a": "two"}, {"a": "one"}) is None
    assert paired_bootstrap({"a": "one", "b": ""}, {}, {}) is None
