"""Which strategy to choose: the one rule of `starling plan` and of `strategy: auto`.

Strategies are compared by progress, mini-batches per second times the worth of a mini-batch. Of those that predictions
cannot tell apart, the one whose mini-batches are worth most is chosen, and of these the plainest (decision 0019).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import log2
from statistics import median
from typing import Any

from starling.configuration import Config
from starling.recipe.run import StrategyChoice
from starling.reporting.lines import mean_staleness
from starling.strategies import Strategy

Seconds = float
WORTH = 0.6
"""What a mini-batch is worth relative to one of `allreduce`, where gradients are stale or learners' models differ.

Measured to one early loss with 16 equal learners: 476 mini-batches under `allreduce`, about 800 under `adpsgd`, which
is 0.60 (docs/results/stragglers.md). The runs that chose the rates there had 0.69 for `delay-by-one`, 0.65 for `dpsgd`
and 0.64 for `adpsgd` (stragglers/rates.md, one seed). A difference between the three was not shown, and nothing like it
has been measured for other strategies: one number serves for all.
"""
WORTH_OF_A_DOUBLING = 0.98
"""The factor of `WORTH` for each doubling of the averaging period. Not measured: of equally fast periods, it takes the
shortest."""
TIE = 0.05
"""Progress within this share of the most counts as equal. In one setting, predictions were 2.9 and 2.5 % off for two of
these strategies (docs/planning.md), so they do not show differences of less than about 5 %."""
PERIODS = (2, 4, 8, 16)
"""Averaging periods beside 1, tried one after the other as long as the progress grows."""


@dataclass(frozen=True)
class Arm:
    """A strategy with its options."""

    strategy: Strategy
    options: Config
    given: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """The options that are named in words."""

    @classmethod
    def of(cls, given: StrategyChoice | Mapping[str, Any]) -> "Arm":
        """The strategy that a recipe names, with the options that it gives."""
        choice = StrategyChoice.model_validate(given)
        return cls(choice.strategy, choice.options, choice.model_extra or {})

    @property
    def name(self) -> str:
        """The strategy's name."""
        return self.strategy.name

    @property
    def words(self) -> str:
        """The options that were given, as `pattern: ring, period: 4`."""
        return ", ".join(f"{key}: {value}" for key, value in self.given.items())

    def __str__(self) -> str:
        return f"{self.name} ({self.words})" if self.given else self.name


@dataclass(frozen=True, eq=False)
class Prediction:
    """What simulations of some learners under a strategy found: the candidates of every choice."""

    arm: Arm
    learners: int
    seconds: tuple[Seconds, ...]
    """By seed: of the run, the time from one gradient of any learner to the next."""
    waiting: float
    """The share of a learner's time in which it waits for data or peers, exchanges included."""
    bytes_sent: float
    """By all learners, for each gradient."""
    staleness: Counter[int]
    caution: float = 1.0
    """The share of the speed that counts, because rounds of averaging may take longer than they did."""

    @property
    def seconds_per_gradient(self) -> Seconds:
        """The median of all seeds."""
        return median(self.seconds)

    @property
    def worth(self) -> float:
        """Of a mini-batch, relative to one of `allreduce`: 1 where all gradients are averaged and none is stale."""
        strategy, options = self.arm.strategy, self.arm.options
        in_parts = 1 < strategy.sync_groups(options, self.learners).size < self.learners
        is_fresh = mean_staleness(self.staleness) == 0.0 and strategy.averages_gradients(options) and not in_parts
        if self.learners == 1 or is_fresh:
            return 1.0
        period = float(getattr(options, "period", 1.0))
        return WORTH * float(WORTH_OF_A_DOUBLING ** max(0.0, log2(period)))

    @property
    def progress(self) -> float:
        """Mini-batches per second, with caution, each counted by its worth: what is compared."""
        return self.caution * self.worth / self.seconds_per_gradient


def is_clearly_ahead(progress: float, of: float) -> bool:
    """Whether predictions tell the first progress from the second."""
    return of < (1.0 - TIE) * progress


def ranked(found: Sequence[Prediction]) -> list[Prediction]:
    """The choice first, then the others, the most progress first. `found` has the plainest strategies first."""
    most = max(each.progress for each in found)
    near = [each for each in found if not is_clearly_ahead(most, each.progress)]
    best = max(near, key=lambda each: each.worth)  # the first of those that are worth as much
    return [best, *sorted((each for each in found if each is not best), key=lambda each: -each.progress)]


def tried(
    name: str, per_node: int, patterns: Sequence[str], predict: Callable[[Arm], Prediction]
) -> Iterator[Prediction]:
    """A strategy with each set of options that is worth a try.

    Args:
        name: The strategy's.
        per_node: Learners of a node, or of a super-learner.
        patterns: Of `adpsgd`, that with the fewest messages first.
        predict: What is predicted for a strategy with options.
    """
    fields = StrategyChoice(name=name).strategy.options.model_fields
    sets: list[dict[str, Any]] = [{"per_node": per_node}] if "per_node" in fields else [{}]
    if {"pattern", "period"} <= fields.keys() and "per_node" not in fields:
        sets = [{"pattern": pattern} for pattern in patterns]
    for options in sets:
        last = predict(Arm.of({"name": name, **options}))
        yield last
        for period in PERIODS if "period" in fields else ():
            longer = predict(Arm.of({"name": name, **options, "period": period}))
            yield longer
            if longer.progress < last.progress:
                break
            last = longer
