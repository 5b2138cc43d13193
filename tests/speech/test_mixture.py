"""Domains in the requested shares, each seen evenly."""

from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planned import epoch_of
from pydantic import ValidationError

from starling.errors import DataError
from starling.speech.batch_plan import BatchConfig, MixedWindows, MixtureConfig, quotas
from starling.speech.training.plan import Planner

NAMES = ("calls", "talks", "books", "noise")


def config(num_domains: int, weights: list[float] | None = None, **options: object) -> MixtureConfig:
    """Domains of one set each."""
    domains = {
        name: {"sets": [name]} | ({"weight": weights[number]} if weights else {})
        for number, name in enumerate(NAMES[:num_domains])
    }
    return MixtureConfig.model_validate({"domains": domains, **options})


@st.composite
def unions(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Durations, shards and bounds of one to four domains, each of one or more shards."""
    durations, shards, bounds = [], [], [0]
    for _ in range(draw(st.integers(1, 4))):
        for _ in range(draw(st.integers(1, 4))):
            own = draw(st.lists(st.floats(1, 20), min_size=1, max_size=12))
            shards += [shards[-1] + 1 if shards else 0] * len(own)
            durations += own
        bounds.append(len(durations))
    return np.array(durations, np.float32), np.array(shards, np.int32), bounds


def drawn(planner: Planner, epoch: int) -> np.ndarray:
    """All utterances of an epoch, as often as they occur."""
    return np.concatenate([micro for mini in epoch_of(planner, epoch) for micro in mini])


def milliseconds(durations: np.ndarray) -> np.ndarray:
    return np.rint(durations.astype(np.float64) * 1000)


TEMPERATURES = st.sampled_from([0.0, 0.3, 0.7, 1.0])
BY = st.sampled_from(["hours", "utterances", "hand"])


def mixture_of(bounds: list[int], by: str, temperature: float, exhausted: str = "repeat") -> MixtureConfig:
    weights = [1.0, 2.0, 0.5, 4.0] if by == "hand" else None
    return config(len(bounds) - 1, weights, by=by, temperature=temperature, exhausted=exhausted)


def mixed(
    durations: np.ndarray, shards: np.ndarray, mixture: MixtureConfig, bounds: list[int], seed: int, window: int = 10
) -> Planner:
    """A planner of domains that begin at `bounds`."""
    union = SimpleNamespace(durations=durations, shards=shards, domain_bounds=bounds)
    return Planner(durations, MixedWindows(mixture, union, window, seed), BatchConfig(), seed, seed)


@settings(max_examples=30, deadline=None)
@given(unions(), BY, TEMPERATURES, st.sampled_from(["repeat", "stop"]), st.integers(1, 5))
def test_each_domain_gives_its_share_of_every_epoch(union, by, temperature, exhausted, window):
    """Utterances follow the closed form p_d W exactly; audio does to one utterance at each end of a segment."""
    durations, shards, bounds = union
    mixture = mixture_of(bounds, by, temperature, exhausted)
    planner = mixed(durations, shards, mixture, bounds, 7, window)
    size = np.ones(len(durations)) if by == "utterances" else milliseconds(durations)
    holds = np.add.reduceat(size, bounds[:-1])
    weights = np.array([1.0, 2.0, 0.5, 4.0])[: len(holds)] if by == "hand" else holds
    expected = weights**temperature / (weights**temperature).sum() * holds.sum()
    if exhausted == "stop":
        expected = expected * min(1.0, (holds / expected).min())
    passes = planner.windows.passes
    for number, name in enumerate(NAMES[: len(holds)]):
        assert passes[name] == pytest.approx(expected[number] / holds[number], abs=1 / holds[number])
    for epoch in range(3):
        seen = drawn(planner, epoch)
        for number, (first, end) in enumerate(pairwise(bounds)):
            amount = size[seen[(first <= seen) & (seen < end)]].sum()
            tolerance = 1 if by == "utterances" else size[first:end].max() + 1
            assert abs(amount - expected[number]) <= tolerance
            assert exhausted == "repeat" or amount <= holds[number] + tolerance


@settings(max_examples=30, deadline=None)
@given(unions(), BY, TEMPERATURES, st.integers(1, 5), st.integers(0, 2**32))
def test_a_domain_is_seen_evenly_whatever_the_temperature(union, by, temperature, window, seed):
    """After any epoch, each utterance of a domain was drawn p or p + 1 times."""
    durations, shards, bounds = union
    planner = mixed(durations, shards, mixture_of(bounds, by, temperature), bounds, seed, window)
    counts = np.zeros(len(durations), np.int64)
    for epoch in range(4):
        counts += np.bincount(drawn(planner, epoch), minlength=len(durations))
        for first, end in pairwise(bounds):
            assert counts[first:end].max() - counts[first:end].min() <= 1


@settings(max_examples=30, deadline=None)
@given(unions(), st.sampled_from(["hours", "utterances"]), st.sampled_from(["repeat", "stop"]), st.integers(0, 2**32))
def test_at_temperature_1_every_utterance_is_seen_once_per_epoch(union, by, exhausted, seed):
    """In proportion to its amounts, a mixture is the union."""
    durations, shards, bounds = union
    planner = mixed(durations, shards, mixture_of(bounds, by, 1.0, exhausted), bounds, seed, 2)
    for epoch in (0, 1, 5):
        assert sorted(drawn(planner, epoch).tolist()) == list(range(len(durations)))


def test_at_temperature_0_shares_are_equal_and_a_small_domain_is_repeated():
    """100 and 900 utterances give 500 of each per epoch, which is five passes and five ninths of one."""
    durations, shards = np.ones(1000, np.float32), np.repeat(np.arange(10, dtype=np.int32), 100)
    planner = mixed(durations, shards, config(2, by="utterances", temperature=0), [0, 100, 1000], 1)
    assert planner.windows.passes == {"calls": 5.0, "talks": pytest.approx(5 / 9)}
    seen = drawn(planner, 3)
    assert set(Counter(seen[seen < 100].tolist()).values()) == {5}
    assert (seen >= 100).sum() == 500


def test_without_repetition_the_smallest_domain_ends_the_epoch():
    """100 and 900 utterances in equal shares give 100 of each; the large domain continues in the next epoch."""
    durations, shards = np.ones(1000, np.float32), np.repeat(np.arange(10, dtype=np.int32), 100)
    mixture = config(2, by="utterances", temperature=0, exhausted="stop")
    planner = mixed(durations, shards, mixture, [0, 100, 1000], 1)
    seen = [drawn(planner, epoch) for epoch in range(9)]
    assert all(sorted(each[each < 100].tolist()) == list(range(100)) for each in seen)
    assert sorted(each for epoch in seen for each in epoch.tolist() if each >= 100) == list(range(100, 1000))


def test_each_window_holds_every_domain_in_its_proportion():
    """No stretch of an epoch has only one domain, and a window stays a few shards, except for those that are cut."""
    durations = np.random.default_rng(0).uniform(1, 20, 20_000).astype(np.float32)
    shards = (np.arange(20_000) // 100).astype(np.int32)
    planner = mixed(durations, shards, config(2), [0, 4000, 20_000], 1)
    assert planner.windows.num_windows == 20
    for number in range(20):
        members = np.concatenate([micro for mini in planner.window(2, number) for micro in mini])
        share = durations[members[members < 4000]].sum() / durations[members].sum()
        assert share == pytest.approx(durations[:4000].sum() / durations.sum(), abs=0.01)
        assert len(set(shards[members].tolist())) <= 10 + 2 * 2


@settings(max_examples=20, deadline=None)
@given(unions(), BY, TEMPERATURES)
def test_a_mixture_is_a_pure_function_whatever_the_order_of_requests(union, by, temperature):
    """A resumed run asks for the middle of a late epoch first."""
    durations, shards, bounds = union
    mixture = mixture_of(bounds, by, temperature)
    planners = [mixed(durations, shards, mixture, bounds, 1, window=1) for _ in range(2)]
    whole = [[micro.tolist() for micro in mini] for epoch in range(3) for mini in epoch_of(planners[0], epoch)]
    num_last = planners[1].num_batches(2)
    backwards = [[micro.tolist() for micro in planners[1].batch(2, index)] for index in reversed(range(num_last))]
    assert backwards[::-1] == whole[len(whole) - num_last :]


def test_a_domain_is_drawn_in_the_same_order_whatever_is_mixed_in():
    """Only the amount that an epoch takes of it depends on the others."""
    durations, shards = np.ones(600, np.float32), np.repeat(np.arange(6, dtype=np.int32), 100)
    orders = []
    for bounds in ([0, 200, 300], [0, 200, 600]):
        count = bounds[-1]
        mixture = config(2, by="utterances")
        windows = mixed(durations[:count], shards[:count], mixture, bounds, 5, window=1).windows
        passes = np.concatenate([windows.members(0, number) for number in range(windows.num_windows)])
        orders.append(shards[passes[passes < 200]])
    assert orders[0].tolist() == orders[1].tolist()


def test_quotas_follow_the_formula():
    """p_d = w_d^t / sum; an epoch is p_d W, shortened where nothing may be repeated."""
    assert quotas(config(2, temperature=0.5), [100, 900]) == [250, 750]
    assert quotas(config(2, temperature=0.5, exhausted="stop"), [100, 900]) == [100, 300]
    assert quotas(config(2, [3, 1], by="hand"), [100, 900]) == [750, 250]


def test_an_empty_domain_is_an_error():
    """All its utterances may be too short for CTC."""
    with pytest.raises(DataError, match="domain talks of the mixture has no utterances"):
        mixed(np.ones(9, np.float32), np.zeros(9, np.int32), config(3), [0, 5, 5, 9], 1)


@pytest.mark.parametrize(
    ("tree", "problem"),
    [
        ({"domains": {}}, "at least 1 item"),
        ({"domains": {"a": {"sets": []}}}, "at least 1 item"),
        ({"domains": {"a": {"sets": "x"}}, "by": "hand"}, r"domains\.a\.weight is missing"),
        ({"domains": {"a": {"sets": "x", "weight": 2}}}, r"domains\.a\.weight is only for by: hand"),
        ({"domains": {"a": {"sets": "x"}, "b": {"sets": ["y", "x"]}}}, "'x' is named more than once"),
        ({"domains": {"a/b": {"sets": "x"}}}, "pattern"),
        ({"domains": {"a": {"sets": "x"}}, "temperature": 2}, "less than or equal to 1"),
    ],
)
def test_a_nonsensical_mixture_is_refused(tree, problem):
    """The error is raised before anything is opened."""
    with pytest.raises(ValidationError, match=problem):
        MixtureConfig.model_validate(tree)
