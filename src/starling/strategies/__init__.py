"""The strategies: one algorithm, one file, all listed here."""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from starling.configuration import Config
from starling.errors import ConfigError
from starling.learner import Learner
from starling.strategies.allreduce import allreduce
from starling.strategies.delay_by_one import delay_by_one


class NoOptions(Config):
    """The options of a strategy that has none."""


@dataclass(frozen=True)
class Strategy:
    """A strategy as the engines and the recipes see it."""

    name: str
    summary: str
    run: Callable[..., Coroutine[Any, Any, None]]
    """`run(learner, **options)`: the text of the strategy, as a coroutine."""
    synchronous: bool
    """All learners take the same number of steps: mini-batches are then claimed in rounds of one for each learner."""
    options: type[Config] = NoOptions

    def start(self, learner: Learner, options: Config) -> Coroutine[Any, Any, None]:
        """The coroutine of one learner, not yet begun."""
        return self.run(learner, **{name: getattr(options, name) for name in type(options).model_fields})


STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        Strategy("allreduce", "step together with the mean of all gradients", allreduce, synchronous=True),
        Strategy(
            "delay-by-one", "average weights behind the computation, one step late", delay_by_one, synchronous=True
        ),
    )
}


def find_strategy(name: str) -> Strategy:
    """The strategy of that name; an unknown name is a `ConfigError` that suggests the nearest."""
    if name in STRATEGIES:
        return STRATEGIES[name]
    near = get_close_matches(name, STRATEGIES, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ConfigError(f"strategy: {name!r} is unknown; {hint}known are {', '.join(STRATEGIES)}")
