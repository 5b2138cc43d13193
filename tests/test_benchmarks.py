"""The arithmetic of the benchmarks; the measurements themselves are `make bench`."""

import pytest

from benchmarks.measuring import Bar, median_speed_up


def test_who_is_measured_first_does_not_matter() -> None:
    """Whoever is first pays a tenth more; equals come out equal, and twice as fast comes out as 2."""
    equals = [(1.1, 1.0), (1.0, 1.1)] * 20
    assert median_speed_up(equals) == pytest.approx(1.0)
    twice_as_fast = [(1.1, 2.0), (1.0, 2.2)] * 20
    assert median_speed_up(twice_as_fast) == pytest.approx(2.0)


def test_a_bar_is_held_or_missed_at_its_own_value() -> None:
    """`holds` is the comparison and nothing else, and the JSON has exactly the four keys."""
    assert Bar.at_least("a", 0.97, 0.97).holds and not Bar.at_least("a", 0.9699, 0.97).holds
    assert Bar.at_most("a", 0.2, 0.2).holds and not Bar.at_most("a", 0.2001, 0.2).holds
    assert Bar.at_most("a", 0.1, 0.2).as_json() == {"name": "a", "ratio": 0.1, "bar": 0.2, "holds": True}
