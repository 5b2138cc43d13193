"""Two things measured side by side: alternately, in one run, with the median of the pairwise ratios."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median

Seconds = float


@dataclass(frozen=True)
class Bar:
    """A measured ratio beside the bar it is held to."""

    name: str
    ratio: float
    bar: float
    holds: bool

    @classmethod
    def at_least(cls, name: str, ratio: float, bar: float) -> "Bar":
        return cls(name, ratio, bar, ratio >= bar)

    @classmethod
    def at_most(cls, name: str, ratio: float, bar: float) -> "Bar":
        return cls(name, ratio, bar, ratio <= bar)

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def alternate(
    first: Callable[[], Seconds], second: Callable[[], Seconds], rounds: int
) -> list[tuple[Seconds, Seconds]]:
    """The times of both in each of `rounds` rounds; who goes first changes from round to round."""
    pairs = []
    for number in range(rounds):
        if number % 2 == 0:
            first_time = first()
            pairs.append((first_time, second()))
        else:
            second_time = second()
            pairs.append((first(), second_time))
    return pairs


def median_speed_up(pairs: list[tuple[Seconds, Seconds]]) -> float:
    """How many times faster the first of each pair is: the median of second / first over the rounds."""
    return median(second / first for first, second in pairs)
