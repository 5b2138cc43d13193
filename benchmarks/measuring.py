"""A ratio of two things measured alternately in one run, and the bar that it is held to."""

import math
from dataclasses import asdict, dataclass
from statistics import median

Seconds = float


@dataclass(frozen=True)
class Bar:
    """A measured ratio, beside the bar that it is held to."""

    name: str
    ratio: float
    bar: float
    holds: bool
    detail: str = ""
    """The absolute figures behind the ratio, for readers."""

    @classmethod
    def at_least(cls, name: str, ratio: float, bar: float, detail: str = "") -> "Bar":
        return cls(name, ratio, bar, ratio >= bar, detail)

    @classmethod
    def at_most(cls, name: str, ratio: float, bar: float, detail: str = "") -> "Bar":
        return cls(name, ratio, bar, ratio <= bar, detail)

    def as_json(self) -> dict[str, object]:
        values = asdict(self)
        del values["detail"]
        return values


def median_speed_up(pairs: list[tuple[Seconds, Seconds]]) -> float:
    """How many times faster the first of each pair is: the median of second / first.

    The order of measurement alternates from pair to pair: the geometric mean of both orders' medians favours neither.
    """
    ratios = [second / first for first, second in pairs]
    return math.sqrt(median(ratios[0::2]) * median(ratios[1::2]))


def milliseconds_of_both(pairs: list[tuple[Seconds, Seconds]]) -> str:
    """A description of the medians of both."""
    ours, theirs = (1000.0 * median(column) for column in zip(*pairs, strict=True))
    return f"{ours:.2f} and {theirs:.2f} ms a step"
