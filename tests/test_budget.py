"""The shared budget and the learning rate that follows it."""

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

import starling
from starling.budget import Budget, Progress, Schedule
from starling.errors import ConfigError


def test_a_budget_without_a_limit_is_refused() -> None:
    """A run must end."""
    with pytest.raises(ConfigError, match="at least one of epochs, steps, minutes"):
        Budget()


def test_the_first_limit_reached_ends_the_run() -> None:
    """The fraction spent is that of the limit closest to its end."""
    budget = Budget(epochs=10, steps=100, minutes=5.0)
    assert budget.fraction(Progress(steps=20, epochs=1.0, minutes=2.0)) == pytest.approx(0.4)
    assert not budget.is_spent(Progress(99, 9.9, 4.9))
    for progress in (Progress(100, 0.0, 0.0), Progress(0, 10.0, 0.0), Progress(0, 0.0, 5.0)):
        assert budget.is_spent(progress)


def factor_of(schedule: Schedule, fraction: float, epochs: float, after: float) -> float:
    """The factor at a fraction of the budget, for mini-batches until another fraction of it."""
    return schedule.at(Progress(0, epochs, fraction), Budget(minutes=1.0), Progress(0, epochs, after))


def test_the_learning_rate_warms_up_then_follows_a_cosine() -> None:
    """Closed form at the beginning, the peak, the middle of the fall and the end."""
    schedule = Schedule(warmup=0.2, decay="cosine", floor=0.1)
    for fraction, after, factor in (
        (0.0, 0.02, 0.1),
        (0.08, 0.1, 0.5),
        (0.2, 0.22, 1.0),
        (0.6, 0.7, 0.55),
        (1.0, 1.0, 0.1),
    ):
        assert factor_of(schedule, fraction, 0.0, after) == pytest.approx(factor)


@pytest.mark.parametrize(("steps", "sync_group", "peak_at"), [(100, 1, 9), (100, 4, 2), (7, 2, 0)])
def test_a_warm_up_of_n_steps_rises_from_one_nth_to_the_peak(steps: int, sync_group: int, peak_at: int) -> None:
    """Step k of n has (k + 1) / n of it; no learning rate is 0, and none is higher behind the end of the rise."""
    budget, schedule = Budget(steps=steps), Schedule(warmup=0.1, decay="cosine")
    shares = [budget.fraction(Progress(done, 0.0, 0.0)) for done in range(0, steps + sync_group, sync_group)]
    factors = [factor_of(schedule, now, 0.0, then) for now, then in pairwise(shares)]
    rise = factors[: peak_at + 1]
    assert rise == pytest.approx([min(1.0, (k + 1) * sync_group / (0.1 * steps)) for k in range(peak_at + 1)])
    assert rise[-1] == pytest.approx(1.0)
    assert factors[peak_at + 1 :] == sorted(factors[peak_at + 1 :], reverse=True)
    assert min(factors) > 0.0


def test_the_first_mini_batch_of_a_budget_in_minutes_has_a_learning_rate() -> None:
    """How much of the budget it takes is not known before it is computed."""
    assert factor_of(Schedule(warmup=0.1), 0.0, 0.0, 0.0) == pytest.approx(0.001)


def test_the_papers_schedule_divides_by_the_root_of_two_each_epoch() -> None:
    """The peak is held for `hold_epochs` epochs, then lost by 1/sqrt(2) an epoch."""
    schedule = Schedule(decay="sqrt2-per-epoch", hold_epochs=2)
    for epochs, factor in ((0.0, 1.0), (1.99, 1.0), (2.0, 0.5**0.5), (3.5, 0.5), (5.0, 0.25)):
        assert factor_of(schedule, 0.5, epochs, 0.5) == pytest.approx(factor)


def test_the_papers_schedule_rises_for_ten_epochs_then_falls_for_six() -> None:
    """From the rate of a single learner, here a 32nd of the peak, in a straight line; in a run of 16 epochs."""
    schedule = Schedule(warmup_epochs=10, warmup_from=1 / 32, decay="sqrt2-per-epoch", hold_epochs=10)
    run, batches = Budget(epochs=16), 200
    factors = [
        schedule.at(Progress(done, done / batches, 0.0), run, following=Progress(done + 1, (done + 1) / batches, 0.0))
        for done in range(16 * batches)
    ]
    for done in (0, 1, 5 * batches, 10 * batches - 1):
        assert factors[done] == pytest.approx(1 / 32 + 31 / 32 * (done + 1) / (10 * batches))
    assert factors[10 * batches - 1] == pytest.approx(1.0)
    for epoch in range(10, 16):
        for done in (epoch * batches, (epoch + 1) * batches - 1):
            assert factors[done] == pytest.approx(2.0 ** (-0.5 * (epoch - 9)))


def test_two_warm_ups_and_one_that_a_cosine_would_not_follow_are_refused() -> None:
    """The message says which to leave out."""
    with pytest.raises(ConfigError, match="leave one of them out"):
        Schedule(warmup=0.1, warmup_epochs=2, decay="constant")
    with pytest.raises(ConfigError, match="give warmup in place of warmup_epochs"):
        Schedule(warmup_epochs=2)


@given(
    st.floats(0.0, 1.0),
    st.floats(0.0, 1.0),
    st.sampled_from(["constant", "cosine", "sqrt2-per-epoch"]),
    st.floats(0, 99),
)
def test_the_factor_is_always_between_zero_and_one(fraction: float, warmup: float, decay: str, epochs: float) -> None:
    """No schedule leaves [0, 1], at any warm-up."""
    factor = factor_of(Schedule(warmup=warmup, decay=decay), fraction, epochs, fraction)  # type: ignore[arg-type]
    assert 0.0 <= factor <= 1.0 + 1e-12
    assert math.isfinite(factor)


def test_a_schedule_with_a_budget_of_its_own_ends_there() -> None:
    """In a longer run it goes on at its final value; without one it follows the run's."""
    run, own = Budget(epochs=8), Budget(epochs=4)
    kept, stretched = Schedule(floor=0.1, budget=own), Schedule(floor=0.1)
    for epochs in (0, 1, 2, 3, 4):
        progress = Progress(0, epochs, 0.0)
        assert kept.at(progress, run) == stretched.at(progress, own)
        assert kept.at(progress, run) == stretched.at(Progress(0, 2 * epochs, 0.0), run)
    assert kept.at(Progress(0, 7, 0.0), run) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("make", "problems"),
    [
        (lambda: starling.Budget(stpes=3), ["stpes: unknown key; did you mean steps?"]),
        (
            lambda: starling.Cluster(link={"bandwith": 1}, compute={"seconds": -1}),
            [
                "compute.seconds: input should be greater than 0",
                "link.bandwith: unknown key; did you mean link.bandwidth?",
            ],
        ),
    ],
)
def test_wrong_arguments_of_a_public_section_are_listed(make: Callable[[], object], problems: list[str]) -> None:
    """In one error of this package, which has an exit code; as for recipes."""
    with pytest.raises(ConfigError) as raised:
        make()
    assert all(each in str(raised.value) for each in problems)
    assert raised.value.exit_code == 2
