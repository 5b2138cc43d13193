"""Data divided among learners: every utterance in one part, no part empty, as unequal as requested."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planned import planner_of

from starling.errors import ConfigError
from starling.speech.batch_plan import BatchConfig, DirichletConfig, divide

SEEDS = st.integers(0, 2**32)
LABELS = st.lists(st.integers(0, 12), min_size=1, max_size=150).map(lambda values: np.array(values, np.int32))
CONFIGS = st.one_of(
    st.sampled_from(["speaker", "domain"]),
    st.builds(DirichletConfig, kind=st.just("dirichlet"), alpha=st.sampled_from([1e-3, 0.1, 1.0, 1e4])),
)


def lengths(count: int) -> np.ndarray:
    return np.random.default_rng(3).uniform(1, 20, count).astype(np.float32)


def dirichlet(alpha: float) -> DirichletConfig:
    return DirichletConfig(kind="dirichlet", alpha=alpha)


def concentration(labels: np.ndarray, parts: np.ndarray) -> float:
    """The mean over parts of the share of their most frequent label."""
    return float(
        np.mean(
            [
                max(Counter(labels[parts == part].tolist()).values()) / (parts == part).sum()
                for part in range(parts.max() + 1)
            ]
        )
    )


@settings(max_examples=60, deadline=None)
@given(LABELS, CONFIGS, st.integers(1, 9), SEEDS)
def test_every_utterance_is_in_one_part_and_no_part_is_empty(labels, config, num_parts, seed):
    """Otherwise, the error says that there are too few for so many parts."""
    enough = len(labels) if config != "speaker" else len(set(labels.tolist()))
    if enough < num_parts:
        with pytest.raises(ConfigError, match=rf"cannot be divided (into|among) {num_parts}"):
            divide(labels, lengths(len(labels)), num_parts, config, seed)
        return
    parts = divide(labels, lengths(len(labels)), num_parts, config, seed)
    assert parts.shape == labels.shape
    assert set(parts.tolist()) == set(range(num_parts))
    assert np.array_equal(parts, divide(labels, lengths(len(labels)), num_parts, config, seed))


@settings(max_examples=60, deadline=None)
@given(LABELS, st.integers(1, 9), SEEDS)
def test_speakers_stay_whole_and_parts_are_balanced(labels, num_parts, seed):
    """The heaviest part is heavier than the lightest by at most one speaker."""
    seconds = lengths(len(labels))
    speakers = len(set(labels.tolist()))
    if speakers < num_parts:
        return
    parts = divide(labels, seconds, num_parts, "speaker", seed)
    assert len(set(zip(labels.tolist(), parts.tolist(), strict=True))) == speakers
    loads, own = np.bincount(parts, weights=seconds), np.bincount(labels, weights=seconds)
    assert loads.max() - loads.min() <= own.max() + 1e-3


def test_domains_go_to_one_part_each_or_have_several():
    """With as many parts as domains, each has one. With twice as many, three of four go to three quarters of the
    audio."""
    labels = np.repeat([0, 1], [300, 100]).astype(np.int32)
    seconds = np.ones(400, np.float32)
    assert sorted(np.bincount(divide(labels, seconds, 2, "domain", 1)).tolist()) == [100, 300]
    parts = divide(labels, seconds, 4, "domain", 1)
    assert [len(set(parts[labels == domain].tolist())) for domain in (0, 1)] == [3, 1]
    assert np.bincount(parts).tolist() == [100] * 4


def test_a_large_alpha_makes_all_parts_like_the_whole():
    """Every label is in every part, in its overall proportion."""
    labels = np.repeat(np.arange(5), [4000, 2000, 2000, 1000, 1000]).astype(np.int32)
    parts = divide(labels, lengths(10_000), 8, dirichlet(1e5), 1)
    assert np.bincount(parts).tolist() == [1250] * 8
    for part in range(8):
        found = np.bincount(labels[parts == part], minlength=5) / 1250
        assert np.allclose(found, [0.4, 0.2, 0.2, 0.1, 0.1], atol=0.06)


def test_a_small_alpha_gives_each_part_few_labels():
    """The smaller alpha is, the fewer labels a part has."""
    labels = np.repeat(np.arange(20), 500).astype(np.int32)
    shares = [concentration(labels, divide(labels, lengths(10_000), 8, dirichlet(a), 1)) for a in (0.1, 10.0, 1e4)]
    assert shares[0] > 0.3 and shares[0] > shares[1] > shares[2]
    assert shares[2] < 0.1


def test_a_small_alpha_gives_each_part_few_speakers_even_if_one_does_not_fill_it():
    """500 speakers of 20 utterances: a part of 1,250 needs 63, and has hardly more; near the whole it has 450."""
    labels = np.repeat(np.arange(500), 20).astype(np.int32)
    numbers = []
    for alpha in (0.01, 1e6):
        parts = divide(labels, lengths(10_000), 8, dirichlet(alpha), 1)
        numbers.append(max(len(set(labels[parts == part].tolist())) for part in range(8)))
    assert numbers[0] < 80 and numbers[1] > 400


def test_the_first_part_has_the_proportions_that_dirichlet_gives():
    """E[q] = p and Var[q_l] = p_l (1 - p_l) / (alpha + 1), over 400 seeds of the part that is filled first."""
    labels = np.repeat(np.arange(4), [4000, 3000, 2000, 1000]).astype(np.int32)
    seconds, p, alpha = np.ones(10_000, np.float32), np.array([0.4, 0.3, 0.2, 0.1]), 2.0
    found = []
    for seed in range(400):
        parts = divide(labels, seconds, 20, dirichlet(alpha), seed)
        found.append(np.bincount(labels[parts == 0], minlength=4) / 500)
    assert np.allclose(np.mean(found, axis=0), p, atol=0.05)
    assert np.allclose(np.var(found, axis=0), p * (1 - p) / (alpha + 1), atol=0.02)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 2), SEEDS, st.integers(1, 3))
def test_a_draw_is_a_pure_function_and_stays_in_its_part(step, part, seed, accumulate):
    """A draw stays within max_duration, repeats nothing, and is the same in any process and order."""
    durations = lengths(300)
    parts = np.arange(300, dtype=np.int32) % 3
    config = BatchConfig(max_duration=40, accumulate=accumulate)
    first, second = (planner_of(durations, np.zeros(300, np.int32), config, seed) for _ in range(2))
    second.draw((part + 1) % 3, step, parts)
    second.draw(part, step + 1, parts)
    mini = first.draw(part, step, parts)
    assert [micro.tolist() for micro in mini] == [micro.tolist() for micro in second.draw(part, step, parts)]
    drawn = np.concatenate(mini)
    assert len(mini) == accumulate and len(set(drawn.tolist())) == len(drawn)
    assert set(parts[drawn].tolist()) == {part}
    assert all(len(micro) * durations[micro].max() <= 40 * (1 + 1e-6) for micro in mini)


def test_all_utterances_of_a_part_are_drawn_equally_often():
    """Long and short utterances have equal chances: in 3,000 draws, each is within four standard deviations of the
    mean."""
    durations, parts = lengths(200), np.zeros(200, np.int32)
    planner = planner_of(durations, parts, BatchConfig(max_duration=60), 1)
    drawn = np.concatenate([micro for step in range(3000) for micro in planner.draw(0, step, parts)])
    counts = np.bincount(drawn, minlength=200)
    assert np.abs(counts - counts.mean()).max() < 4.5 * np.sqrt(counts.mean())
