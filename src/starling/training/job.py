"""The inputs and reports of engines: the job that an engine runs, the counters of each learner, and the reports to
observers."""

import threading
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import astuple, dataclass, field
from operator import add
from typing import Any

from torch import nn
from torch.optim import Optimizer

from starling.budget import Budget, Schedule
from starling.checkpoint.state import LearnerState
from starling.configuration import Config
from starling.errors import ConfigError
from starling.strategies import Strategy, SyncGroups, find_strategy
from starling.strategies.islands import NO_ISLANDS, Island, between_islands
from starling.training.faults import Fault
from starling.training.freezing import Freeze
from starling.training.speeds import BatchShares, Stragglers, shares_problem
from starling.workload import Examples, Ticket, Weighting, Workload


@dataclass(frozen=True)
class Job:
    """A training run, the same on every learner and on both engines."""

    workload: Workload[Any]
    """Workload to train: a model, its loss and its data."""
    strategy: Strategy
    """How learners agree. A name or `module:name` is looked up with `find_strategy`. With `island` it applies between
    islands."""
    budget: Budget
    """When training ends."""
    make_optimizer: Callable[[list[nn.Parameter]], Optimizer]
    """Function that creates the local optimizer of one learner, at the peak learning rate."""
    schedule: Schedule = field(default_factory=lambda: Schedule(decay="constant"))
    """How the learning rate follows the budget; constant by default."""
    options: Config = None  # type: ignore[assignment]
    """Options of the strategy; None uses its defaults."""
    clip_norm: float | None = None
    """Largest 2-norm of gradients: those with a larger norm are scaled down to it before the optimizer sees them."""
    autocast: bool = False
    """Whether losses are computed in bfloat16 where torch considers it safe; weights and gradients stay float32."""
    num_workers: int = 0
    """Number of loading processes for each learner, which load mini-batches ahead; with 0, the learner loads them
    itself."""
    stragglers: Stragglers = field(default_factory=Stragglers)
    """Injected delays."""
    faults: tuple[Fault, ...] = ()
    """Injected faults."""
    checkpoint_every: int | None = None
    """Number of mini-batches, of all learners together, between two checkpoint barriers within an epoch; None means
    barriers only at epoch ends."""
    most_not_finite: int = 10
    """Number of consecutive non-finite gradients of one learner with which the run fails; fewer are skipped."""
    weighting: Weighting = "batches"
    """How mini-batches are weighted when learners average gradients: equally, or in proportion to their planned size.
    The latter raises ConfigError if the strategy averages no gradients."""
    batch_shares: BatchShares = field(default_factory=dict)
    """Number of mini-batches in each learner's gradient of a step, such as {0: 2}; 1 unless given. auto: as many as its
    speed allows, measured when the run begins. Every mini-batch counts alike. For strategies under which all learners
    step together."""
    freeze: tuple[Freeze, ...] = ()
    """Parameters that are frozen until they are thawed. Freeze parameters that are never thawed in the workload's
    `make_model`."""
    island: Island = NO_ISLANDS
    """How learners form islands, which hold one model together."""
    seed: int = 0
    """Seed of everything random."""

    def __post_init__(self) -> None:
        if isinstance(self.strategy, str):
            object.__setattr__(self, "strategy", find_strategy(self.strategy))
        object.__setattr__(self, "strategy", between_islands(self.strategy, self.island))
        if self.options is None:
            object.__setattr__(self, "options", self.strategy.options())
        if problem := self.strategy.weighting_problem(self.options, self.weighting):
            raise ConfigError(f"weighting: {problem}")
        if self.freeze and self.island.size > 1:
            raise ConfigError(
                "freeze: the parameters of an island cannot be thawed during a run; leave out `until`, or island"
            )
        for each in self.freeze:
            if each.until is None:
                raise ConfigError(
                    f"freeze: {', '.join(each.parameters)} have no `until`; freeze what is never thawed in make_model, "
                    "with requires_grad_(False)"
                )

    def validate(self, world: int) -> None:
        """Raise ConfigError if the strategy's options, or the batch shares, do not fit `world` learners."""
        self.strategy.validate(self.options, world)
        if problem := shares_problem(self.batch_shares, self.strategy, self.options, world, self.island):
            raise ConfigError(problem)

    def sync_groups(self, world: int) -> SyncGroups:
        """Which of `world` learners claim mini-batches together."""
        return self.strategy.sync_groups(self.options, world)


@dataclass
class Spent:
    """The times that one learner spent, in seconds on the engine's clock."""

    computing: float = 0.0
    waiting_for_data: float = 0.0
    waiting_for_peers: float = 0.0


@dataclass(frozen=True)
class ClaimReport:
    """A mini-batch whose gradient a learner is about to compute."""

    rank: int
    ticket: Ticket
    ids: tuple[str, ...] = ()
    """Names of the examples, if the mini-batch has an attribute `ids`."""
    skipped: tuple[tuple[str, str], ...] = ()
    """Name and reason of each example that could not be used, if the mini-batch has an attribute `skipped`."""
    minutes: float | None = None
    """The training time of the claim, if the budget depends on time."""

    @staticmethod
    def of(rank: int, ticket: Ticket, batch: Collection[Examples], minutes: float | None = None) -> "ClaimReport":
        """The report of a mini-batch in micro-batches."""
        return ClaimReport(
            rank,
            ticket,
            ids=tuple(name for examples in batch for name in getattr(examples, "ids", ())),
            skipped=tuple(each for examples in batch for each in getattr(examples, "skipped", ())),
            minutes=minutes,
        )


@dataclass(frozen=True)
class StepReport:
    """One gradient of one learner."""

    rank: int
    ticket: Ticket
    num_batches: int
    """Number of mini-batches in the ticket's epoch."""
    fraction: float
    """Share of the run's budget that was spent when the ticket was claimed."""
    minutes: float
    """Time since the beginning of the run, on the engine's clock."""
    loss: float
    learning_rate: float
    num_examples: int
    num_frames: int
    audio_seconds: float
    spent: Spent = field(default_factory=Spent)
    """Times that the learner spent since its epoch began, up to the end of this gradient."""


@dataclass
class Averaging:
    """One learner's averaging rounds, communication and staleness."""

    rounds: int = 0
    """Number of averaging rounds completed in the learner's background."""
    bytes_sent: int = 0
    """Number of bytes sent to other learners; collectives are counted as ring algorithms."""
    staleness: Counter[int] = field(default_factory=Counter)
    """Number of gradients by staleness: the changes to the weights between reading them and applying the gradient. With
    servers, each server counts for its own shard."""


class Statistics:
    """One learner's counters of time, communication and staleness since its last epoch ended, across memberships."""

    def __init__(self) -> None:
        self.num_claimed = 0
        """Number of portions of tickets that the learner's sync group has claimed in this membership."""
        self.num_steps = 0
        """Number of mini-batches since the learner's epoch began; for a loop, calls of `step`."""
        self.seconds = 0.0
        """Duration of the learner's epoch in earlier memberships."""
        self.num_not_finite = 0
        """Number of non-finite gradients, which made no optimizer step: in the learner's epoch or, for a loop, in the
        run."""
        self.not_finite_in_a_row = 0
        self.spent = Spent()
        self.averaging = Averaging()
        self.lock = threading.Lock()
        """Guards `averaging`, which the background may change while an epoch ends."""
        self.under_way: Callable[[], Spent] = Spent
        """Time that a wait under way adds to `spent`, which includes only waits that are over."""

    def spent_now(self) -> Spent:
        """A copy of `spent` as of this moment."""
        return Spent(*map(add, astuple(self.spent), astuple(self.under_way())))


@dataclass(frozen=True)
class EpochReport:
    """One learner's part of an epoch that has ended, or that the end of the budget cut short."""

    rank: int
    epoch: int
    num_steps: int
    seconds: float
    spent: Spent
    averaging: Averaging = field(default_factory=Averaging)
    consensus_distance: float | None = None
    """(1/L) sum_l |w_l - mean|^2 at the end of the epoch; only the virtual engine knows it."""
    num_not_finite: int = 0
    """Number of non-finite gradients, which were skipped."""
    is_last: bool = False
    """Whether the run ends with this epoch."""


class Observer:
    """An observer of a run; this one does nothing. Each learner calls it between two mini-batches."""

    @property
    def saves(self) -> bool:
        """Whether the observer needs the states at checkpoint barriers, as an observer does that saves them; otherwise
        learners make no copies of them."""
        return type(self).on_barrier is not Observer.on_barrier

    @property
    def records(self) -> bool:
        """Whether the observer records what a replay of the run needs."""
        return False

    def on_event(self, rank: int, kind: str, **fields: Any) -> None:
        """Called, in any thread, with what a replay needs of a learner beyond its mini-batches, if the observer
        `records`. docs/events.md lists the kinds."""

    def on_claim(self, report: ClaimReport) -> None:
        """Called before each gradient. Once its computation has begun, the gradient may be in the weights of others,
        even if this learner is lost during it: their mean may be complete."""

    def on_step(self, report: StepReport) -> None:
        """Called after each gradient."""

    def on_epoch(self, report: EpochReport, state: LearnerState) -> None:
        """Called after each epoch and after the last mini-batch of the run. `state` shares memory with the learner:
        copy or write it before returning. Unless it `is_complete`, `on_barrier` gets the complete one later."""

    def on_barrier(self, state: LearnerState) -> None:
        """Called after a checkpoint barrier within an epoch, with the state there; for learners that average in the
        background also after an epoch. `state` shares memory with the learner, as in `on_epoch`."""
