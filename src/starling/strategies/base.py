"""What a strategy is to the engines and to recipes: its text, and a few facts about it."""

from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from starling.configuration import Config
from starling.learner import Learner

Count = Callable[[Any, int], int]
"""From a strategy's options and the number of learners to a number of learners. It never raises: see `validate`."""


class NoOptions(Config):
    """The options of a strategy that has none."""


def all_learners(options: Config, world: int) -> int:
    """All of them."""
    return world


def one_learner(options: Config, world: int) -> int:
    """Each for itself."""
    return 1


def fits_any(options: Config, world: int) -> None:
    """These options suit any number of learners."""


def averages_none(options: Config) -> bool:
    """No gradients are averaged."""
    return False


def all_but_the_lost(options: Config, world: int, lost: Collection[int]) -> Sequence[int]:
    """The ranks of the learners that are left."""
    return [rank for rank in range(world) if rank not in lost]


@dataclass(frozen=True)
class SyncGroups:
    """Which learners claim mini-batches together: the first `num_workers`, in groups of `size`. Others claim none."""

    num_workers: int
    size: int

    def of(self, rank: int) -> range:
        """The sync group of a learner; a learner that claims nothing is a group of its own."""
        if rank >= self.num_workers:
            return range(rank, rank + 1)
        first = rank - rank % self.size
        return range(first, first + self.size)


@dataclass(frozen=True)
class Strategy:
    """A strategy: how learners agree, and what engines and recipes must know about it.

    A strategy's file ends with one of these. `name`, `summary` and `run` are all that most need; each other field says
    where a strategy differs from one whose learners step together, each with a model of its own.
    """

    name: str
    summary: str
    """One line, for `starling strategies`."""
    run: Callable[..., Coroutine[Any, Any, None]]
    """`run(learner)`, or `run(learner, options)` if the strategy has options: its text, as a coroutine."""
    sync_group_size: Count = all_learners
    """How many learners claim mini-batches together, one each, and compute in step: all of them by default, one where
    no learner waits for another's gradient."""
    options: type[Config] = NoOptions
    num_workers: Count = all_learners
    """How many learners claim mini-batches: the first ones. The others serve them."""
    check: Callable[[Any, int], None] = fits_any
    """Raises ConfigError if the options do not fit this number of learners; `validate` calls it."""
    survivors: Callable[[Any, int, Collection[int]], Sequence[int]] = all_but_the_lost
    """From the options, the number of learners and the ranks of the lost to the ranks that can continue. PeerLost if
    none can."""
    averages_gradients: Callable[[Any], bool] = averages_none
    """Whether, with these options, a step is made with the mean gradient of a sync group."""
    is_served: bool = False
    """Whether servers keep the model; otherwise it is the mean of all learners' weights."""
    has_one_model: bool = False
    """Whether all learners have the same weights after each step."""
    steps_itself: bool = True
    """Whether each gradient of a learner becomes a step of its own optimizer, in the order of its claims."""

    def validate(self, options: Config, world: int) -> None:
        """Check that `options` fit `world` learners.

        Raises:
            ConfigError: they do not; the message says what to change.
        """
        self.check(options, world)

    def sync_groups(self, options: Config, world: int) -> SyncGroups:
        """Which of `world` learners claim mini-batches together."""
        return SyncGroups(self.num_workers(options, world), self.sync_group_size(options, world))

    def successors(
        self, options: Config, members: Sequence[int], lost: Collection[int], came: Sequence[int] = ()
    ) -> tuple[int, ...]:
        """The learners of the next membership, in the order of their ranks, when some of `members` are lost and others
        come.

        Joiners stand behind the workers and before the servers. So a server keeps its place among the servers, and a
        super-learner keeps its own learners.

        Raises:
            PeerLost: the strategy cannot continue without the lost learners.
            ConfigError: the options do not fit so many learners.
        """
        ranks = self.survivors(options, len(members), [members.index(name) for name in lost])
        left = [members[rank] for rank in ranks]
        num_workers = self.num_workers(options, len(left))
        following = (*left[:num_workers], *came, *left[num_workers:])
        self.validate(options, len(following))
        return following

    def weighting_problem(self, options: Config, weighting: str) -> str | None:
        """Why mini-batches cannot be weighted in this way; None if they can."""
        if weighting == "batches" or self.averages_gradients(options):
            return None
        return (
            f"{weighting!r} weighs gradients that learners average, and under {self.name} with these options they "
            "average none; leave it out, or choose allreduce, hadpsgd with per_node above 1, or parameter-server with "
            "update: hybrid"
        )

    def start(self, learner: Learner, options: Config) -> Coroutine[Any, Any, None]:
        """The coroutine of one learner, not started yet."""
        return self.run(learner) if self.options is NoOptions else self.run(learner, options)
