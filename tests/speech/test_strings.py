"""Strings of recordings: exact use of every recording, one speaker per string, and the resulting audio."""

from collections import Counter

import numpy as np
import pytest
from corpus_builders import RATE, sound
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from starling.speech.corpora import StringsConfig, Utterance, join_strings, plan_strings


@given(
    speakers=st.lists(st.sampled_from("abc"), max_size=60),
    shortest=st.integers(1, 5),
    extra=st.integers(0, 5),
    copies=st.integers(1, 4),
    seed=st.integers(0, 10),
)
def test_every_recording_is_used_exactly_copies_times_with_its_own_speaker(
    speakers: list[str], shortest: int, extra: int, copies: int, seed: int
) -> None:
    """For any sizes, use is exact, each string has one speaker, ids are distinct, and no string is too long."""
    config = StringsConfig(shortest=shortest, longest=shortest + extra, copies=copies, seed=seed)
    plans = plan_strings(speakers, config, "train")
    used = Counter(member for plan in plans for member in plan.members)
    assert used == dict.fromkeys(range(len(speakers)), copies)
    assert all({speakers[i] for i in plan.members} == {plan.speaker} for plan in plans)
    assert len({plan.id for plan in plans}) == len(plans)
    assert all(1 <= len(plan.members) <= config.longest for plan in plans)


@given(st.integers(6, 200), st.integers(0, 5))
def test_lengths_stay_within_their_limits_where_the_numbers_allow(total: int, seed: int) -> None:
    """With 3 to 7 every speaker of 6 recordings or more has strings of 3 to 7 only."""
    plans = plan_strings(["a"] * total, StringsConfig(seed=seed), "train")
    assert {len(plan.members) for plan in plans} <= {3, 4, 5, 6, 7}


def test_a_plan_is_a_function_of_seed_and_set() -> None:
    """The same seed and set give the same plan; another seed or set gives another."""
    speakers = ["a", "b"] * 30
    plan = plan_strings(speakers, StringsConfig(), "train")
    assert plan_strings(speakers, StringsConfig(), "train") == plan
    assert plan_strings(speakers, StringsConfig(), "test") != plan
    assert plan_strings(speakers, StringsConfig(seed=1), "train") != plan


def test_a_string_is_its_recordings_in_order_with_quiet_gaps_between() -> None:
    """Every recording appears unchanged; gaps have the requested length and level."""
    config = StringsConfig(gap_seconds=(0.05, 0.25), gap_level_db=-60)
    recordings = [
        Utterance(f"u{i}", "a", f"W{i}", "", lambda i=i: (sound(0.2, i).astype(np.float32) / 32768, RATE))
        for i in range(9)
    ]
    plans = plan_strings(["a"] * 9, config, "train")
    for plan, joined in zip(plans, join_strings(recordings, plans, config, RATE), strict=True):
        assert joined.text == " ".join(f"W{i}" for i in plan.members)
        samples, rate = joined.read()
        assert rate == RATE
        np.testing.assert_array_equal(samples, joined.read()[0])
        gaps = _remove(samples, [recordings[i].read()[0] for i in plan.members])
        assert len(gaps) == len(plan.members) - 1
        assert all(0.05 * RATE - 1 <= len(gap) <= 0.25 * RATE + 1 for gap in gaps)
        level = 20 * np.log10(np.sqrt(np.mean(np.square(np.concatenate(gaps)))))
        assert level == pytest.approx(-60, abs=1.5)


def _remove(samples: np.ndarray, parts: list[np.ndarray]) -> list[np.ndarray]:
    """The samples between the parts, which must occur in this order and reach from end to end."""
    gaps, position = [], 0
    for part in parts:
        start = next(s for s in range(position, len(samples)) if np.array_equal(samples[s : s + len(part)], part))
        gaps.append(samples[position:start])
        position = start + len(part)
    assert len(gaps[0]) == 0
    assert position == len(samples)
    return gaps[1:]


@pytest.mark.parametrize(
    "settings",
    [
        {"shortest": 5, "longest": 3},
        {"gap_seconds": (0.3, 0.1)},
        {"gap_seconds": (-0.1, 0.1)},
        {"copies": 0},
        {"copies": {"train": 0}},
        {"gap": 1},
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, object]) -> None:
    """Limits in the wrong order, negative gaps, no copies and unknown keys are configuration errors."""
    with pytest.raises(ValidationError):
        StringsConfig.model_validate(settings)


def test_copies_may_differ_from_set_to_set() -> None:
    """A set that is not named is used once."""
    config = StringsConfig(copies={"train": 6})
    assert (config.copies_of("train"), config.copies_of("test")) == (6, 1)
