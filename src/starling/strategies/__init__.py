"""The strategies: one algorithm, one file, all listed here."""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from starling.configuration import Config
from starling.errors import ConfigError
from starling.learner import Learner
from starling.strategies.adpsgd import AsynchronousOptions, adpsgd
from starling.strategies.allreduce import allreduce
from starling.strategies.delay_by_one import delay_by_one
from starling.strategies.dpsgd import dpsgd
from starling.strategies.hadpsgd import HierarchicalOptions, hadpsgd
from starling.strategies.mixing import MixingOptions
from starling.topology import find_topology

TeamSize = Callable[[Any, int], int]
"""From a strategy's options and the number of learners to the number of those that claim together; ConfigError when the
two do not fit."""


class NoOptions(Config):
    """The options of a strategy that has none."""


def _everybody(options: NoOptions, world: int) -> int:
    return world


def _everybody_mixing(options: MixingOptions, world: int) -> int:
    find_topology(options.pattern, world, seed=0)
    return world


def _alone(options: MixingOptions, world: int) -> int:
    find_topology(options.pattern, world, seed=0)
    return 1


def _node(options: HierarchicalOptions, world: int) -> int:
    if world % options.per_node:
        raise ConfigError(
            f"strategy.per_node: {options.per_node} learners to a super-learner do not divide {world} learners"
        )
    find_topology(options.pattern, world // options.per_node, seed=0)
    return options.per_node


@dataclass(frozen=True)
class Strategy:
    """A strategy as the engines and the recipes see it."""

    name: str
    summary: str
    run: Callable[..., Coroutine[Any, Any, None]]
    """`run(learner)`, or `run(learner, options)` of a strategy that has options: its text, as a coroutine."""
    team_size: TeamSize = _everybody
    """A team claims a mini-batch for each of its learners at once, and they compute in step. All learners are the team
    of a synchronous strategy; each learner is its own where nobody waits for anybody."""
    options: type[Config] = NoOptions

    def start(self, learner: Learner, options: Config) -> Coroutine[Any, Any, None]:
        """The coroutine of one learner, not yet begun."""
        return self.run(learner) if self.options is NoOptions else self.run(learner, options)


STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        Strategy("allreduce", "step together with the mean of all gradients", allreduce),
        Strategy("delay-by-one", "average weights behind the computation, one step late", delay_by_one),
        Strategy("dpsgd", "average with neighbours at each step", dpsgd, _everybody_mixing, MixingOptions),
        Strategy("adpsgd", "average with neighbours in the background", adpsgd, _alone, AsynchronousOptions),
        Strategy("hadpsgd", "nodes in step inside, adpsgd between them", hadpsgd, _node, HierarchicalOptions),
    )
}


def find_strategy(name: str) -> Strategy:
    """The strategy of that name; an unknown name is a `ConfigError` that suggests the nearest."""
    if name in STRATEGIES:
        return STRATEGIES[name]
    near = get_close_matches(name, STRATEGIES, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ConfigError(f"strategy: {name!r} is unknown; {hint}known are {', '.join(STRATEGIES)}")
