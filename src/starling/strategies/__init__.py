"""The strategies: one algorithm, one file, all listed here."""

from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from starling.configuration import Config
from starling.errors import ConfigError, PeerLost
from starling.learner import Learner
from starling.strategies.adpsgd import AsynchronousOptions, adpsgd
from starling.strategies.allreduce import allreduce
from starling.strategies.delay_by_one import delay_by_one
from starling.strategies.delayed import DelayOptions, delayed
from starling.strategies.dpsgd import dpsgd
from starling.strategies.hadpsgd import HierarchicalOptions, hadpsgd
from starling.strategies.hogwild import HogwildOptions, hogwild
from starling.strategies.mixing import MixingOptions
from starling.strategies.parameter_server import parameter_server
from starling.strategies.server import ServerOptions
from starling.topology import find_topology
from starling.workload import Weighting

TeamSize = Callable[[Any, int], int]
"""From a strategy's options and the number of learners to the number of those that claim together, or that claim at
all; ConfigError when the two do not fit."""


Survivors = Callable[[Any, int, Collection[int]], Sequence[int]]
"""From a strategy's options, the number of learners and the ranks of those lost to the ranks that go on; PeerLost when
nobody can."""


class NoOptions(Config):
    """The options of a strategy that has none."""


def _everybody(options: Config, world: int) -> int:
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


def _each(options: Config, world: int) -> int:
    return 1


def _workers(options: ServerOptions, world: int) -> int:
    """How many workers there are; ConfigError when there are too few learners for the servers."""
    if options.servers == "own" and world <= options.shards:
        raise ConfigError(
            f"strategy.shards: {options.shards} servers as learners of their own leave no worker among {world} "
            "learners; start more learners, or choose servers: beside"
        )
    if options.shards > world:
        raise ConfigError(
            f"strategy.shards: {options.shards} servers do not fit beside {world} learners; at most {world}"
        )
    return len(options.workers(world))


def _served(options: ServerOptions, world: int) -> int:
    workers = _workers(options, world)
    return workers if options.update == "hybrid" else 1


def _others(options: Config, world: int, lost: Collection[int]) -> Sequence[int]:
    return [rank for rank in range(world) if rank not in lost]


def _whole_nodes(options: HierarchicalOptions, world: int, lost: Collection[int]) -> Sequence[int]:
    """A super-learner that has lost one of its learners leaves whole."""
    broken = {rank // options.per_node for rank in lost}
    return [rank for rank in range(world) if rank // options.per_node not in broken]


def _others_with_servers(options: ServerOptions, world: int, lost: Collection[int]) -> Sequence[int]:
    for shard in range(options.shards):
        if (server := options.server(shard, world)) in lost:
            raise PeerLost(
                f"learner {server} of {world} was a server, and the part of the model that it kept is lost with it"
            )
    return _others(options, world, lost)


def _never(options: Config) -> bool:
    return False


def _always(options: Config) -> bool:
    return True


def _inside_a_node(options: HierarchicalOptions) -> bool:
    return options.per_node > 1


def _under_hybrid(options: ServerOptions) -> bool:
    return options.update == "hybrid"


@dataclass(frozen=True)
class SyncGroups:
    """Who claims together: the first `num_workers` learners, in teams of `size`. The others claim nothing."""

    num_workers: int
    size: int

    def of(self, rank: int) -> range:
        """The team of a learner; who claims nothing is alone."""
        if rank >= self.num_workers:
            return range(rank, rank + 1)
        first = rank - rank % self.size
        return range(first, first + self.size)


@dataclass(frozen=True)
class Strategy:
    """A strategy as the engines and the recipes see it."""

    name: str
    summary: str
    run: Callable[..., Coroutine[Any, Any, None]]
    """`run(learner)`, or `run(learner, options)` of a strategy that has options: its text, as a coroutine."""
    sync_group_size: TeamSize = _everybody
    """A team claims a mini-batch for each of its learners at once, and they compute in step. All learners are the team
    of a synchronous strategy; each learner is its own where nobody waits for anybody."""
    options: type[Config] = NoOptions
    num_workers: TeamSize = _everybody
    """How many learners claim mini-batches: the first ones. The others serve them."""
    is_served: bool = False
    """Whether the model is what servers keep, rather than the mean of all learners' weights."""
    has_one_model: bool = False
    """Whether all learners have the same weights after each step of theirs."""
    steps_itself: bool = True
    """Whether each of a learner's gradients becomes a step of its own optimizer, in the order of its claims."""
    survivors: Survivors = _others
    """Who goes on when some were lost."""
    averages_gradients: Callable[[Any], bool] = _never
    """From the options to whether a step is made with the mean gradient of a team."""

    def sync_groups(self, options: Config, world: int) -> SyncGroups:
        """Which of `world` learners claim together; ConfigError when the options do not fit so many."""
        return SyncGroups(self.num_workers(options, world), self.sync_group_size(options, world))

    def successors(
        self, options: Config, members: Sequence[int], lost: Collection[int], came: Sequence[int] = ()
    ) -> tuple[int, ...]:
        """The names of those who go on when some of `members` were lost and others came, in the order of their ranks.

        Who came stands behind those who compute, and before those who serve them: nobody's place among servers changes,
        nor, inside of a super-learner, who is beside whom. Raises PeerLost when nobody can go on, ConfigError when the
        options do not fit so many.
        """
        ranks = self.survivors(options, len(members), [members.index(name) for name in lost])
        going_on = [members[rank] for rank in ranks]
        num_workers = self.num_workers(options, len(going_on))
        following = (*going_on[:num_workers], *came, *going_on[num_workers:])
        self.sync_groups(options, len(following))
        return following

    def weighting_problem(self, options: Config, weighting: Weighting) -> str | None:
        """Why learners cannot weigh their mini-batches so; None if they can."""
        if weighting == "batches" or self.averages_gradients(options):
            return None
        return (
            f"{weighting!r} weighs gradients that learners average, and under {self.name} with these options they "
            "average none; leave it out, or choose allreduce, hadpsgd with per_node above 1, or parameter-server with "
            "update: hybrid"
        )

    def start(self, learner: Learner, options: Config) -> Coroutine[Any, Any, None]:
        """The coroutine of one learner, not yet begun."""
        return self.run(learner) if self.options is NoOptions else self.run(learner, options)


STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        Strategy(
            "allreduce",
            "step together with the mean of all gradients",
            allreduce,
            has_one_model=True,
            averages_gradients=_always,
        ),
        Strategy("delay-by-one", "average weights behind the computation, one step late", delay_by_one),
        Strategy("dpsgd", "average with neighbours at each step", dpsgd, _everybody_mixing, MixingOptions),
        Strategy("adpsgd", "average with neighbours in the background", adpsgd, _alone, AsynchronousOptions),
        Strategy(
            "hadpsgd",
            "nodes in step inside, adpsgd between them",
            hadpsgd,
            _node,
            HierarchicalOptions,
            survivors=_whole_nodes,
            averages_gradients=_inside_a_node,
        ),
        Strategy(
            "parameter-server",
            "workers push gradients to servers, which keep the model",
            parameter_server,
            _served,
            ServerOptions,
            _workers,
            is_served=True,
            steps_itself=False,
            survivors=_others_with_servers,
            averages_gradients=_under_hybrid,
        ),
        Strategy(
            "hogwild", "change one shared model without a lock", hogwild, _each, HogwildOptions, steps_itself=False
        ),
        Strategy(
            "delayed",
            "step with the mean gradient of some steps ago, for studies",
            delayed,
            _everybody,
            DelayOptions,
            has_one_model=True,
            averages_gradients=_always,
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
