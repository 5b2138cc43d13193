"""`Strategy`: a strategy's coroutine, and what engines and recipes must know about it."""

from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starling.configuration import Config, accepts, canonical
from starling.errors import ConfigError
from starling.learner import Learner

Run = Callable[..., Coroutine[Any, Any, None]]


class NoOptions(Config):
    """The options of a strategy without options."""


def all_learners(options: Config, world: int) -> int:
    """The sync group size of a strategy in which all learners step together."""
    return world


def one_learner(options: Config, world: int) -> int:
    """The sync group size of a strategy in which each learner steps alone."""
    return 1


def always(options: Config) -> bool:
    """Return True, whatever the options are."""
    return True


def never(options: Config) -> bool:
    """Return False, whatever the options are."""
    return False


@dataclass(frozen=True)
class SyncGroups:
    """Which learners claim mini-batches together: the first `num_workers`, in groups of `size`. The others claim
    none."""

    num_workers: int
    size: int

    def of(self, rank: int) -> range:
        """The sync group of a learner. A learner that claims no mini-batches forms a group of one."""
        if rank >= self.num_workers:
            return range(rank, rank + 1)
        first = rank - rank % self.size
        return range(first, first + self.size)


@dataclass(frozen=True)
class Strategy:
    """A strategy: how learners agree, and what engines and recipes must know about it.

    Most strategies set only `name`, `summary` and `run`. The defaults of the other fields describe a strategy whose
    learners step together, each with its own model. A strategy with learners that serve others, or that cannot continue
    without some of them, is a subclass.
    """

    is_served = False
    """Whether servers keep the model. If not, the model is the mean of all learners' weights."""
    name: str
    """Name of the strategy in a recipe."""
    summary: str
    """Description in one line, for `starling strategies`."""
    run: Run
    """The algorithm, a coroutine function: `run(me)`, or `run(me, options)` if the strategy has options."""
    sync_group_size: Callable[[Any, int], int] = all_learners
    """Number of learners that claim mini-batches together, one each, and compute in step, from the options and the
    number of learners: all by default; 1 if no learner waits for another's gradient."""
    options: type[Config] = NoOptions
    """The strategy's options: a subclass of `starling.Config`."""
    check: Callable[[Any, int], None] | None = None
    """Function that raises ConfigError if the options do not fit this number of learners; `validate` calls it. None
    means that all options fit."""
    averages_gradients: Callable[[Any], bool] = never
    """Whether, with these options, a step uses the mean gradient of a sync group."""
    has_one_model: bool = False
    """Whether all learners have the same weights after each step."""
    keeps_state: bool = False
    """Whether the strategy keeps a common `Learner.strategy_state`."""
    kind: str = "others"
    """The heading under which `starling strategies` lists the strategy, such as `gossip`."""
    adopts_changes: Callable[[Any], bool] = always
    """Whether, with these options, the strategy adopts a change of the weights that is not a step of the learner, such
    as `load_state_dict` between two gradients in a user's loop: the mean of all learners' weights then moves by the
    mean of the learners' changes. If not, the change would be lost or mistaken for progress, so the loop's next step
    refuses it."""
    steps_itself: bool = True
    """Whether each gradient of a learner becomes a step of its own optimizer, in the order of its claims."""

    def __post_init__(self) -> None:
        """Raise ConfigError if a field that must be a function is none, or if the coroutine takes other arguments."""
        for name in ("sync_group_size", "averages_gradients", "adopts_changes"):
            if not callable(given := getattr(self, name)):
                raise ConfigError(
                    f"strategy {self.name!r}: {name} is {given!r}, but must be a function of the options, such as "
                    f"`lambda options{', world: 1' if name == 'sync_group_size' else ': True'}`"
                )
        takes, has = ("me", "no") if self.options is NoOptions else ("me, options", "the field")
        if not accepts(self.run, *takes.split(", ")):
            raise ConfigError(
                f"strategy {self.name!r}: its coroutine must take ({takes}), because the strategy has {has} `options`"
            )

    def described(self, options: Config) -> str:
        """The strategy's name and all its options as JSON. The text is the same for equal options; checkpoints contain
        it."""
        return canonical({"name": self.name, "options": options.model_dump(mode="json")})

    def begins_equal(self, options: Config, has_common: bool) -> bool:
        """Whether all learners must begin with the same weights: because they have one model, or because they have no
        common state yet (`has_common` is False) and will initialise it with their weights."""
        return self.has_one_model or (self.has_common_state(options) and not has_common)

    def validate(self, options: Any, world: int) -> None:
        """Check that `options` fit `world` learners.

        Raises:
            ConfigError: The options do not fit; the message says what to change.
        """
        if self.check is not None:
            self.check(options, world)

    def sync_groups(self, options: Any, world: int) -> SyncGroups:
        """Which of `world` learners claim mini-batches together. It never raises: `validate` reports problems."""
        return SyncGroups(world, self.sync_group_size(options, world))

    def size_of_unit(self, options: Any) -> int:
        """Number of learners with successive ranks that join, leave and are lost together."""
        return 1

    def survivors(self, options: Any, world: int, lost: Collection[int]) -> Sequence[int]:
        """The ranks of those of `world` learners that can continue without the lost learners. Raises PeerLost if none
        can."""
        size = self.size_of_unit(options)
        broken = {rank // size for rank in lost}
        return [rank for rank in range(world) if rank // size not in broken]

    def has_common_state(self, options: Config) -> bool:
        """Whether the strategy keeps a common `Learner.strategy_state` with these options."""
        return self.keeps_state or self.compresses_gradients(options)

    def compresses_gradients(self, options: Config) -> bool:
        """Whether gradients are sent encoded with these options, so that a parameter may have no gradient in the mean
        although every learner had one."""
        return False

    def successors(
        self, options: Config, members: Sequence[int], lost: Collection[int], joined: Sequence[int] = ()
    ) -> tuple[int, ...]:
        """The learners of the next membership, in the order of their ranks: `members` without `lost`, plus `joined`.

        Joiners rank after the remaining workers and before the servers, so that each server keeps its model shard and
        each super-learner its learners.

        Raises:
            PeerLost: The strategy cannot continue without the lost learners.
            ConfigError: The options do not fit the new number of learners.
        """
        ranks = self.survivors(options, len(members), [members.index(name) for name in lost])
        left = [members[rank] for rank in ranks]
        num_workers = self.sync_groups(options, len(left)).num_workers
        following = (*left[:num_workers], *joined, *left[num_workers:])
        self.validate(options, len(following))
        return following

    def weighting_problem(self, options: Config, weighting: str) -> str | None:
        """The reason why mini-batches cannot be weighted by `weighting`; None if they can."""
        if weighting == "batches" or self.averages_gradients(options):
            return None
        return (
            f"{weighting!r} weights the gradients that learners average, but {self.name} with these options averages "
            "no gradients; leave it out, or choose allreduce, hadpsgd with per_node above 1, or parameter-server with "
            "update: hybrid"
        )

    def start(self, learner: Learner, options: Config) -> Coroutine[Any, Any, None]:
        """The coroutine of one learner, not yet started."""
        return self.run(learner) if self.options is NoOptions else self.run(learner, options)


REGISTERED: dict[str, Strategy] = {}
"""Starling's own strategies that have been imported, by name."""


def registered(
    name: str, summary: str, options: type[Config] = NoOptions, of: type[Strategy] = Strategy, **more: Any
) -> Callable[[Run], Run]:
    """Register a coroutine function as a strategy of Starling of the class `of`; `more` are other fields of
    `Strategy`."""

    def register(run: Run) -> Run:
        REGISTERED[name] = of(name, summary, run, options=options, **more)
        return run

    return register


gossip, periodic = partial(registered, kind="gossip"), partial(registered, kind="periodic", keeps_state=True)
"""Variants of `registered` for strategies that average with neighbours, and for those that agree every few steps and
keep common state, as `parts.local_steps` does."""
