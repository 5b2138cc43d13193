"""Batch shares: how many mini-batches each learner computes for a step, given or from measured speeds."""

from collections.abc import Mapping, Sequence
from typing import Literal

from starling.configuration import Config
from starling.strategies import Strategy
from starling.strategies.islands import Island

Seconds = float
BatchShares = Mapping[int, int] | Literal["auto"]
"""By learner; 1 unless given. auto: measured when a run begins."""
MOST_OF_SLOWEST, MOST = 3, 16
"""The largest share of the slowest learner, and of any."""
TOLERANCE, LEAST_GAIN = 1.1, 1.1
"""Speeds within 10 % count as equal, and shares that gain less than 10 % are not worth larger steps."""


def shares_problem(shares: BatchShares, strategy: Strategy, options: Config, world: int, island: Island) -> str | None:
    """Why `world` learners cannot have these batch shares; None if they can."""
    if not shares:
        return None
    if shares != "auto" and min(shares.values()) < 1:
        return f"batch_shares: {min(shares.values())} is no number of mini-batches; give each learner at least 1"
    if island.size > 1:
        return "batch_shares: the ranks of an island compute one gradient together; leave out one of both"
    groups = strategy.sync_groups(options, world)
    if (groups.num_workers, groups.size) != (world, world):
        return (
            f"batch_shares: only where all learners step together; under {strategy.name}, a fast learner already takes "
            "more mini-batches than a slow one, or serves others: leave out batch_shares"
        )
    return None


def shares_for(seconds: Sequence[Seconds]) -> tuple[int, ...]:
    """The batch shares of learners that need so many `seconds` for a mini-batch.

    A step takes max_l s_l t_l seconds and sum_l s_l mini-batches. Of the shares that fit into one, two or three
    mini-batches of the slowest learner, the first whose mini-batches per second are within 5 % of the best.

    Example:
        >>> shares_for([0.1, 0.1, 0.2])
        (2, 2, 1)
        >>> shares_for([0.1, 0.15])
        (3, 2)
        >>> shares_for([0.1, 0.105])
        (1, 1)
    """

    def fitting(limit: Seconds) -> tuple[int, ...]:
        return tuple(max(1, min(MOST, int(TOLERANCE * limit / each))) for each in seconds)

    def rate(shares: Sequence[int]) -> float:
        return sum(shares) / max(share * each for share, each in zip(shares, seconds, strict=True))

    equal = (1,) * len(seconds)
    found = [fitting(number * max(seconds)) for number in range(1, MOST_OF_SLOWEST + 1)]
    best = max(map(rate, found))
    if best < LEAST_GAIN * rate(equal):
        return equal
    return next(shares for shares in found if rate(shares) >= 0.95 * best)
