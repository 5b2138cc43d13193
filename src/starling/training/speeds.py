"""Learners of unequal speed: injected slowness, and batch shares in proportion to speed."""

import random
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from starling.chance import derive_seed
from starling.configuration import Config
from starling.strategies import Strategy
from starling.strategies.islands import Island

Seconds = float
BatchShares = Mapping[int, int] | Literal["auto"]
"""Number of mini-batches in each learner's gradient, by learner; the default is 1. auto: the shares follow from speeds
that are measured when a run begins."""
MOST_OF_SLOWEST, MOST = 3, 16
"""Largest batch share of the slowest learner, and of any learner."""
TOLERANCE, LEAST_GAIN = 1.1, 1.1
"""Speeds within 10 % count as equal, and shares that gain less than 10 % are not worth larger steps."""


def _times(factor: Any) -> Any:
    """Accept `10x` for 10."""
    return factor[:-1] if isinstance(factor, str) and factor.endswith("x") else factor


Factor = Annotated[float, BeforeValidator(_times), Field(ge=1.0)]
Rank = Annotated[int, Field(ge=0)]


class Pause(Config):
    """Makes a learner pause once."""

    learner: Rank
    """Learner that pauses."""
    after: int = Field(ge=1)
    """Number of gradients of this learner before the pause; counting restarts on resume."""
    seconds: float = Field(gt=0.0)
    """Length of the pause."""


class Stragglers(Config):
    """Learners that are slowed down on purpose: the `processes` engine sleeps, `virtual` advances its clock."""

    slow: dict[Rank, Factor] = Field(default_factory=dict)
    """Factors by which the gradients of learners take longer, such as {0: 10x}."""
    jitter: float = Field(default=0.0, ge=0.0)
    """Mean of the random fraction of its time, exponentially distributed, by which each gradient is delayed."""
    pauses: tuple[Pause, ...] = ()
    """Learners that pause once each."""

    def among(self, learners: int) -> "Stragglers":
        """Return the stragglers without those that are not among the first `learners` learners."""
        slow = {rank: factor for rank, factor in self.slow.items() if rank < learners}
        pauses = tuple(pause for pause in self.pauses if pause.learner < learners)
        return self.model_copy(update={"slow": slow, "pauses": pauses})


class Delays:
    """The delays of one learner. Their random numbers depend on the seed and the learner."""

    def __init__(self, stragglers: Stragglers, seed: int, rank: int) -> None:
        self._factor = stragglers.slow.get(rank, 1.0)
        self._jitter = stragglers.jitter
        self._pauses: dict[int, float] = {}
        for pause in stragglers.pauses:
            if pause.learner == rank:
                self._pauses[pause.after] = self._pauses.get(pause.after, 0.0) + pause.seconds
        self._random = random.Random(derive_seed(seed, "stragglers", rank))
        self._num_gradients = 0

    def after(self, seconds: float) -> float:
        """Return the seconds to wait after a gradient that took `seconds`. Call this method once for each gradient."""
        self._num_gradients += 1
        longer = seconds * (self._factor - 1.0)
        if self._jitter > 0.0:
            longer += self._factor * seconds * self._jitter * self._random.expovariate(1.0)
        return longer + self._pauses.get(self._num_gradients, 0.0)


def shares_problem(shares: BatchShares, strategy: Strategy, options: Config, world: int, island: Island) -> str | None:
    """The reason why `world` learners cannot have these batch shares; None if they can."""
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

    A step takes max_l s_l t_l seconds and sum_l s_l mini-batches. Among the shares that fit into one, two or three
    mini-batches of the slowest learner, the first whose mini-batches per second are within 5 % of the best is chosen.

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
