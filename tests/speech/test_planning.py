"""The plan of an epoch: every utterance exactly once, whole rounds, batches within their limit."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from starling.errors import DataError
from starling.speech.planning import BatchConfig, plan_epoch

DURATIONS = st.lists(st.floats(0.1, 20), min_size=1, max_size=200).map(lambda values: np.array(values, np.float32))
CONFIGS = st.builds(
    BatchConfig,
    max_duration=st.floats(1, 100),
    accumulate=st.integers(1, 4),
    num_buckets=st.integers(1, 30),
)


@given(DURATIONS, CONFIGS, st.integers(0, 2**32), st.integers(0, 5), st.integers(1, 20))
def test_every_utterance_is_in_exactly_one_micro_batch(durations, config, seed, epoch, round_size):
    """Whatever the durations and options, an epoch deals out each utterance once, in whole rounds."""
    if len(durations) < round_size:
        with pytest.raises(DataError, match=f"{len(durations)} utterances cannot be shared by {round_size} learners"):
            plan_epoch(durations, config, seed, epoch, round_size)
        return
    plan = plan_epoch(durations, config, seed, epoch, round_size)
    dealt = np.concatenate([micro for mini in plan for micro in mini])
    assert sorted(dealt.tolist()) == list(range(len(durations)))
    assert len(plan) % round_size == 0
    accumulate = min(config.accumulate, len(durations) // round_size)
    assert all(len(mini) == accumulate and all(len(micro) for micro in mini) for mini in plan)


@given(DURATIONS, CONFIGS, st.integers(1, 20))
def test_a_micro_batch_stays_within_max_duration(durations, config, round_size):
    """Counted with its padding, unless it is one long utterance or the set leaves no choice but to merge."""
    if len(durations) < round_size:
        return
    plan = plan_epoch(durations, config, 1, 0, round_size)
    micro_batches = [micro for mini in plan for micro in mini]
    multiple = min(config.accumulate, len(durations) // round_size) * round_size
    merged = len(micro_batches) + multiple > len(durations)
    for micro in micro_batches:
        padded = len(micro) * float(durations[micro].max())
        assert padded <= config.max_duration * (1 + 1e-6) or len(micro) == 1 or merged


@given(DURATIONS, CONFIGS, st.integers(0, 1000))
def test_a_plan_is_a_pure_function(durations, config, seed):
    """The same arguments give the same plan, and global generators are neither used nor moved."""
    before = np.random.get_state()[1].copy()
    first, second = (plan_epoch(durations, config, seed, 3) for _ in range(2))
    assert [[micro.tolist() for micro in mini] for mini in first] == [
        [micro.tolist() for micro in mini] for mini in second
    ]
    assert np.array_equal(before, np.random.get_state()[1])


def test_the_batches_of_a_round_have_similar_durations():
    """Learners that step together wait for the slowest: within a round the padded sizes are close."""
    durations = np.random.default_rng(0).uniform(1, 20, 20_000).astype(np.float32)
    plan = plan_epoch(durations, BatchConfig(max_duration=120), 1, 0, round_size=8)
    longest = np.array([max(durations[micro].max() for micro in mini) for mini in plan]).reshape(-1, 8)
    assert np.median(longest.max(1) / longest.min(1)) < 1.1


def test_epochs_differ_and_rounds_are_shuffled():
    """Another epoch groups and orders differently, and short batches do not come first."""
    durations = np.random.default_rng(0).uniform(1, 20, 10_000)
    first, second = (plan_epoch(durations, BatchConfig(), 1, epoch, 2) for epoch in (0, 1))
    assert first[0][0].tolist() != second[0][0].tolist()
    means = [durations[mini[0]].mean() for mini in first]
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.2


def test_batches_are_well_filled():
    """Dynamic bucketing wastes little: the mean padded micro-batch is near max_duration."""
    durations = np.random.default_rng(0).lognormal(1.5, 0.5, 20_000).clip(0.5, 20)
    plan = plan_epoch(durations, BatchConfig(max_duration=100, num_buckets=30), 1, 0)
    audio = [durations[mini[0]].sum() for mini in plan]
    assert np.mean(audio) > 80


def test_a_hundred_thousand_utterances_are_planned_at_once():
    """Planning is no pause between epochs: well under half a second, with room for a busy machine."""
    durations = np.random.default_rng(0).uniform(1, 20, 100_000).astype(np.float32)
    taken = []
    for _ in range(3):
        start = time.perf_counter()
        plan_epoch(durations, BatchConfig(max_duration=120), 1, 0, round_size=16)
        taken.append(time.perf_counter() - start)
    assert min(taken) < 0.5
