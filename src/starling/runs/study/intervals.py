"""Means over seeds, with the interval that so few seeds allow."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_QUANTILES = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281,
    2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860,
)  # fmt: skip
"""Of Student's t at 0.975, for 1, 2, … degrees of freedom."""
_NORMAL = 1.959964


@dataclass(frozen=True)
class Estimate:
    """A mean with a 95 % interval: mean - half to mean + half."""

    mean: float
    half: float | None
    """None where one value allows no interval."""
    count: int

    @property
    def low(self) -> float:
        return self.mean - (self.half or 0.0)

    @property
    def high(self) -> float:
        return self.mean + (self.half or 0.0)

    @property
    def sign(self) -> int:
        """1 or -1 where the whole interval is above or below 0, else 0; 0 without an interval."""
        if self.half is None:
            return 0
        return 1 if self.low > 0.0 else -1 if self.high < 0.0 else 0


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of values that were drawn independently, with Student's interval

        mean +- t_{0.975, n - 1} s / sqrt(n),    s^2 = sum (x - mean)^2 / (n - 1)

    Raises ValueError without values.
    """
    if not values:
        raise ValueError("no values, no mean")
    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return Estimate(mean, None, 1)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    return Estimate(mean, t_quantile(count - 1) * deviation / math.sqrt(count), count)


def difference(first: Mapping[int, float], second: Mapping[int, float]) -> Estimate | None:
    """`second` less `first`, paired by seed: chance that both share is not counted. None without a common seed."""
    common = sorted(first.keys() & second.keys())
    return estimate([second[seed] - first[seed] for seed in common]) if common else None


def t_quantile(freedom: int) -> float:
    """Student's t at 0.975 for so many degrees of freedom, to 0.001.

    Beyond the table the first terms of the expansion in 1 / freedom (Cornish & Fisher 1938).
    """
    if freedom <= len(_QUANTILES):
        return _QUANTILES[freedom - 1]
    z = _NORMAL
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
