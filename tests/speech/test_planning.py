"""The plan of an epoch: every utterance exactly once, in windows of shards, batches within their limit."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planned import epoch_of, planner_of

from starling.errors import DataError
from starling.speech.batch_plan import BatchConfig, MiniBatch, in_similar_groups
from starling.speech.training.plan import Planner

SEEDS = st.integers(0, 2**63 - 1)
CONFIGS = st.builds(
    BatchConfig,
    max_duration=st.floats(1, 100),
    accumulate=st.integers(1, 4),
    num_buckets=st.integers(1, 30),
    window=st.integers(1, 6),
    similar=st.integers(1, 9),
)


@st.composite
def sets(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Durations and shards of up to 200 utterances; shards have any size, and some numbers are not used."""
    durations = draw(st.lists(st.floats(0.1, 20), min_size=1, max_size=200))
    steps = draw(st.lists(st.sampled_from([0, 0, 0, 1, 1, 2]), min_size=len(durations), max_size=len(durations)))
    return np.array(durations, np.float32), np.cumsum(steps).astype(np.int32)


def corpus(count: int, shard_size: int = 1000) -> tuple[np.ndarray, np.ndarray]:
    """Utterances of 1 to 20 s in shards of one size."""
    durations = np.random.default_rng(0).uniform(1, 20, count).astype(np.float32)
    return durations, (np.arange(count) // shard_size).astype(np.int32)


def lists(planner: Planner, epoch: int = 0) -> list[list[list[int]]]:
    return [plain(mini) for mini in epoch_of(planner, epoch)]


def plain(mini: MiniBatch) -> list[list[int]]:
    return [micro.tolist() for micro in mini]


@settings(max_examples=60, deadline=None)
@given(sets(), CONFIGS, SEEDS, st.integers(0, 5))
def test_every_utterance_is_in_exactly_one_micro_batch(utterances, config, seed, epoch):
    """For any durations, shards and options, an epoch deals out each utterance once."""
    durations, shards = utterances
    planner = planner_of(durations, shards, config, seed)
    minis = list(epoch_of(planner, epoch))
    assert len(minis) == planner.num_batches(epoch)
    dealt = np.concatenate([micro for mini in minis for micro in mini])
    assert sorted(dealt.tolist()) == list(range(len(durations)))
    assert all(len(mini) <= config.accumulate and all(len(micro) for micro in mini) for mini in minis)
    if len(np.unique(shards)) <= config.window:
        assert {len(mini) for mini in minis} == {min(config.accumulate, len(durations))}


@settings(max_examples=60, deadline=None)
@given(sets(), CONFIGS)
def test_a_micro_batch_stays_within_max_duration(utterances, config):
    """The limit includes padding, unless it is one long utterance or the window leaves no choice but to merge."""
    durations, shards = utterances
    planner = planner_of(durations, shards, config, 1)
    for number in range(planner.windows.num_windows):
        micro_batches = [micro for mini in planner.window(0, number) for micro in mini]
        in_window = sum(map(len, micro_batches))
        merged = len(micro_batches) + config.accumulate > in_window
        for micro in micro_batches:
            padded = len(micro) * float(durations[micro].max())
            assert padded <= config.max_duration * (1 + 1e-6) or len(micro) == 1 or merged


@settings(max_examples=60, deadline=None)
@given(sets(), CONFIGS, SEEDS)
def test_a_mini_batch_is_a_pure_function_whatever_the_order_of_requests(utterances, config, seed):
    """Backwards, among other epochs or alone, by any planner, it is the same; global generators do not change."""
    durations, shards = utterances
    before = np.random.get_state()[1].copy()
    whole = lists(planner_of(durations, shards, config, seed), 3)
    other = planner_of(durations.copy(), shards.copy(), config, seed)
    for index in reversed(range(len(whole))):
        other.batch(index % 4, 0)
        assert plain(other.batch(3, index)) == whole[index]
    with pytest.raises(IndexError, match=f"mini-batch {len(whole)} of epoch 3, which has {len(whole)}"):
        other.batch(3, len(whole))
    assert np.array_equal(before, np.random.get_state()[1])


@settings(max_examples=60, deadline=None)
@given(sets(), CONFIGS, SEEDS)
def test_a_window_is_a_few_whole_shards(utterances, config, seed):
    """No more than `window` shards are in a window, and no shard is in two windows: as many files are open at a
    time."""
    durations, shards = utterances
    planner = planner_of(durations, shards, config, seed)
    seen: set[int] = set()
    for number in range(planner.windows.num_windows):
        members = np.concatenate([micro for mini in planner.window(0, number) for micro in mini])
        own = set(shards[members].tolist())
        assert len(own) <= config.window and not own & seen
        seen |= own
    assert seen == set(shards.tolist())


def test_windows_are_about_equal_and_come_in_a_different_order_each_epoch():
    """25 shards in windows of 10 make 8, 8 and 9, not 10, 10 and 5; which are together is random."""
    durations, shards = corpus(25_000)
    planner = planner_of(durations, shards, BatchConfig(), 1)
    together = []
    for epoch in (0, 1):
        windows = [np.concatenate([m for mini in planner.window(epoch, number) for m in mini]) for number in range(3)]
        together.append([frozenset(shards[members].tolist()) for members in windows])
        assert sorted(map(len, windows)) == [8000, 8000, 9000]
    assert set(together[0]).isdisjoint(together[1])


def test_a_small_set_is_shuffled_as_one():
    """Up to `window` shards are one window: any two utterances may meet."""
    durations, shards = corpus(5000, shard_size=500)
    planner = planner_of(durations, shards, BatchConfig(), 1)
    assert planner.windows.num_windows == 1
    met = {len(set(shards[micro].tolist())) for mini in epoch_of(planner) for micro in mini}
    assert max(met) >= 5


def test_consecutive_mini_batches_have_similar_durations():
    """Eight learners that step together wait for the slowest: the padded sizes of each eight are close."""
    durations, shards = corpus(20_000)
    plan = list(epoch_of(planner_of(durations, shards, BatchConfig(max_duration=120), 1)))
    assert len(plan) % 8 == 0
    longest = np.array([max(durations[micro].max() for micro in mini) for mini in plan]).reshape(-1, 8)
    assert np.median(longest.max(1) / longest.min(1)) < 1.1


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 300), st.integers(1, 9), SEEDS)
def test_every_whole_group_is_a_run_of_the_sorted_mini_batches(count, similar, seed):
    """The remainder comes last, and is a run as well; nothing is lost."""
    order = in_similar_groups(count, similar, np.random.default_rng(seed))
    for first in range(0, count, similar):
        group = order[first : first + similar]
        assert max(group) - min(group) == len(group) - 1
    assert sorted(order) == list(range(count))


def test_epochs_differ_and_groups_are_shuffled():
    """Each epoch groups and orders differently, and short batches do not come first."""
    durations, shards = corpus(10_000)
    planner = planner_of(durations, shards, BatchConfig(similar=2), 1)
    first, second = (list(epoch_of(planner, epoch)) for epoch in (0, 1))
    assert first[0][0].tolist() != second[0][0].tolist()
    means = [durations[mini[0]].mean() for mini in first]
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.2


def test_shortest_first_orders_only_the_first_epoch_and_changes_nothing_else():
    """The mini-batches are the same, from the shortest to the longest utterances; later epochs are unchanged."""
    durations, shards = corpus(5000, shard_size=500)
    sorted_first, usual = (
        planner_of(durations, shards, BatchConfig(shortest_first=given), 1) for given in (True, False)
    )
    found, expected = ([mini[0].tolist() for mini in epoch_of(each)] for each in (sorted_first, usual))
    longest = [durations[mini].max() for mini in found]
    assert found != expected
    assert sorted(found) == sorted(expected)
    assert np.corrcoef(longest, np.arange(len(longest)))[0, 1] > 0.9
    second, its_usual = ([mini[0].tolist() for mini in epoch_of(each, 1)] for each in (sorted_first, usual))
    assert second == its_usual


def test_batches_are_well_filled():
    """Dynamic bucketing wastes little: the mean padded micro-batch is near max_duration."""
    durations = np.random.default_rng(0).lognormal(1.5, 0.5, 20_000).clip(0.5, 20).astype(np.float32)
    config = BatchConfig(max_duration=100, num_buckets=30)
    planner = planner_of(durations, (np.arange(20_000) // 1000).astype(np.int32), config, 1)
    assert np.mean([durations[mini[0]].sum() for mini in epoch_of(planner)]) > 80


def test_a_small_set_is_not_split_for_the_sake_of_whole_groups():
    """9 mini-batches stay 9 although groups of 8 would need 16; 60 become 64, less than a tenth more."""
    config = BatchConfig(max_duration=10, num_buckets=1)
    for count, expected in ((90, 9), (600, 64)):
        planner = planner_of(np.ones(count, np.float32), np.zeros(count, np.int32), config, seed=1)
        assert planner.num_batches(0) == expected


@settings(max_examples=20, deadline=None)
@given(SEEDS)
def test_two_seeds_make_two_plans(seed):
    """The seed changes the order of shards and of utterances."""
    durations, shards = corpus(300, shard_size=30)
    plans = [lists(planner_of(durations, shards, BatchConfig(window=2), each)) for each in (seed, seed ^ 1)]
    assert plans[0] != plans[1]


def test_a_million_utterances_are_planned_at_once():
    """Counting the mini-batches of 1,000 shards takes less than half a second; after that, one window is planned."""
    durations, shards = corpus(1_000_000)
    taken = []
    for _ in range(3):
        start = time.thread_time()
        planner = planner_of(durations, shards, BatchConfig(), 1)
        planner.batch(0, planner.num_batches(0) // 2)
        taken.append(time.thread_time() - start)
    assert min(taken) < 0.5


def test_utterances_out_of_the_order_of_their_shards_are_refused():
    """Windows rely on the order."""
    with pytest.raises(DataError, match="not in the order of their shards"):
        planner_of(np.ones(3, np.float32), np.array([0, 1, 0], np.int32), BatchConfig(), 1)


def test_nothing_to_plan_is_an_error():
    """Otherwise, the epoch would never end."""
    with pytest.raises(DataError, match="no utterances"):
        planner_of(np.empty(0, np.float32), np.empty(0, np.int32), BatchConfig(), 1)


def test_an_epoch_keeps_few_windows():
    """The whole plan of an epoch is never in memory: going through it keeps only the last windows."""
    durations, shards = corpus(20_000, shard_size=100)
    planner = planner_of(durations, shards, BatchConfig(window=5), 1)
    for _ in epoch_of(planner):
        pass
    made = planner.window.cache_info()
    assert (made.misses, made.currsize) == (40, 3)
    planner.batch(0, 0)
    assert planner.window.cache_info().misses == 41
