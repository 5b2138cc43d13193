"""The inputs and outputs of engines: the job that an engine runs, the counters of each learner, and the reports that
observers receive."""

import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import add
from typing import Any

from torch import nn
from torch.optim import Optimizer

from starling.budget import Budget, Schedule
from starling.checkpoint.state import LearnerState
from starling.configuration import Config, checked
from starling.errors import ConfigError
from starling.strategies import Strategy, SyncGroups, find_strategy
from starling.strategies.islands import NO_ISLANDS, Island, between_islands
from starling.training.faults import Fault
from starling.training.freezing import Freeze
from starling.training.speeds import BatchShares, Stragglers, shares_problem
from starling.workload import Ticket, Weighting, Workload


@dataclass(frozen=True)
class Job:
    """The definition of a training run. It is the same on every learner and engine.

    Args:
        workload: The model, its loss and its data, such as a `starling.DataWorkload`.
        strategy: A strategy, its name, or `module:name`.
        budget: When training ends, such as `starling.Budget(epochs=2)`.
        make_optimizer: A function from a list of parameters to their optimizer.
        schedule: How the learning rate follows the budget; by default it is constant.
        options: The options of the strategy, such as `{"pattern": "ring"}`; None uses its defaults.
        stragglers: Delays of learners, such as `{"slow": {3: "4x"}}`; by default there are none.
        seed: The seed of everything random, 0 by default.

    The Python reference describes the other fields; their defaults change nothing.

    Raises:
        ConfigError: Some fields do not fit together.

    Example:
        >>> from dataclasses import replace
        >>> from starling.toy import regression
        >>> job = replace(regression("allreduce"), strategy="adpsgd", options=None, stragglers={"slow": {3: "4x"}})
        >>> starling.simulate(job, learners=4).loss()
        0.01
    """

    workload: Workload[Any]
    """The workload to train: a model, its loss and its data."""
    strategy: Strategy
    """The strategy by which learners agree. A name or `module:name` is looked up with `find_strategy`. If learners form
    islands, the strategy applies between islands."""
    budget: Budget
    """Budget after which training ends."""
    make_optimizer: Callable[[list[nn.Parameter]], Optimizer]
    """Function that creates the local optimizer of one learner, at the peak learning rate."""
    schedule: Schedule = field(default_factory=lambda: Schedule(decay="constant"))
    """Schedule by which the learning rate follows the budget; constant by default."""
    options: Config = None  # type: ignore[assignment]
    """Options of the strategy; None uses its defaults. A mapping is checked and converted."""
    clip_norm: float | None = None
    """Maximum 2-norm of a gradient. A gradient with a larger norm is scaled down to it before the optimizer's step."""
    autocast: bool = False
    """Whether losses are computed in bfloat16 where torch considers it safe; weights and gradients stay float32."""
    num_workers: int = 0
    """Number of loading processes of each learner, which load mini-batches ahead of time. With 0, the learner itself
    loads them."""
    stragglers: Stragglers = field(default_factory=Stragglers)
    """Delays that are injected into learners. A mapping with the keys of a recipe's section, such as
    `{"slow": {3: "4x"}}`, is checked and converted."""
    faults: tuple[Fault, ...] = ()
    """Faults that are injected into learners."""
    checkpoint_every: int | None = None
    """Number of mini-batches, of all learners together, between two checkpoint barriers within an epoch; None means
    barriers only at epoch ends."""
    most_not_finite: int = 10
    """Number of consecutive non-finite gradients of one learner at which the run fails. Until then, they are
    skipped."""
    weighting: Weighting = "batches"
    """How mini-batches are weighted when learners average gradients: equally, or in proportion to their planned size.
    Weighting in proportion raises ConfigError if the strategy does not average gradients."""
    batch_shares: BatchShares = field(default_factory=dict)
    """Number of mini-batches in each learner's gradient of a step, by rank, such as {0: 2}; 1 for ranks that are not
    named. With "auto", each learner computes as many as its speed allows, which is measured when the run begins. Every
    mini-batch has the same weight. Only strategies under which all learners step together support this."""
    freeze: tuple[Freeze, ...] = ()
    """Parameters that are frozen until they are thawed. Freeze parameters that are never thawed in the workload's
    `make_model`."""
    island: Island = NO_ISLANDS
    """Size and kind of the islands that learners form. The learners of an island share one model."""
    seed: int = 0
    """Seed of everything random."""

    def __post_init__(self) -> None:
        if isinstance(self.strategy, str):
            object.__setattr__(self, "strategy", find_strategy(self.strategy))
        object.__setattr__(self, "strategy", between_islands(self.strategy, self.island))
        if not isinstance(self.stragglers, Stragglers):
            object.__setattr__(self, "stragglers", checked(Stragglers, self.stragglers, "job", "stragglers."))
        if self.options is None or isinstance(self.options, Mapping):
            options = checked(self.strategy.options, self.options or {}, self.strategy.name)
            object.__setattr__(self, "options", options)
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
        """Return the groups of learners, out of `world` learners, that claim mini-batches together."""
        return self.strategy.sync_groups(self.options, world)


@dataclass
class Spent:
    """The times that one learner spent, in seconds on the engine's clock."""

    computing: float = 0.0
    waiting_for_data: float = 0.0
    waiting_for_peers: float = 0.0
    stopped: float = 0.0
    """Time for which the process was stopped, as by SIGSTOP; it is in none of the other times."""


class Unshared:
    """Counts the steps of a learner that no other learner has received, as a mean over the learner's weights.

    A message that contains a part of the weights, or of their change, shares the steps of as large a part of them; each
    part is assumed to be sent in turn.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        """Number of steps of the learner."""
        self._parts = deque([(1.0, 0)])  # parts of the weights, with the number of steps when they were sent last
        self._lock = threading.Lock()  # foreground and background send

    def send(self, part: float, num_ahead: int = 0) -> None:
        """Count a message with a `part` of the weights, between 0 and 1. The next `num_ahead` steps are shared, too."""
        with self._lock:
            self._parts.append((part, self.num_steps + num_ahead))
            while part > 0.0:
                oldest, at = self._parts.popleft()
                if oldest > part:
                    self._parts.appendleft((oldest - part, at))
                part -= oldest

    @property
    def count(self) -> float:
        """The number of steps that would be lost with the learner."""
        with self._lock:
            return sum(part * max(0, self.num_steps - at) for part, at in self._parts)


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


@dataclass(frozen=True)
class StepReport:
    """A report of one gradient that a learner has computed."""

    rank: int
    ticket: Ticket
    num_batches: int
    """Number of mini-batches in the ticket's epoch."""
    fraction: float
    """Fraction of the run's budget that was spent when the ticket was claimed."""
    minutes: float
    """Time since the beginning of the run, on the engine's clock."""
    loss: float
    learning_rate: float
    num_examples: int
    num_frames: int
    audio_seconds: float
    spent: Spent = field(default_factory=Spent)
    """Times that the learner spent from the beginning of its epoch to the end of this gradient."""
    unshared: Unshared | None = None
    """The learner's counter of steps that would be lost with it; None if all learners have the same weights."""


@dataclass
class Averaging:
    """One learner's averaging rounds, communication and staleness."""

    rounds: int = 0
    """Number of averaging rounds completed in the learner's background."""
    bytes_sent: int = 0
    """Number of bytes sent to other learners; collectives are counted as ring algorithms."""
    staleness: Counter[int] = field(default_factory=Counter)
    """Number of gradients with each staleness, which is the number of changes to the weights between reading them and
    applying the gradient. If there are servers, each server counts for its own model shard."""


class Statistics:
    """One learner's counters of time, communication and staleness since its last epoch ended, across memberships."""

    def __init__(self) -> None:
        self.num_claimed = 0
        """Number of claims of tickets that the learner's sync group has made in this membership."""
        self.num_steps = 0
        """Number of mini-batches since the learner's epoch began. For a user's own loop, the number of calls of
        `step`."""
        self.seconds = 0.0
        """Duration of the learner's epoch in earlier memberships."""
        self.num_not_finite = 0
        """Number of non-finite gradients, which are skipped, since the learner's epoch began. For a user's own loop,
        their number since the run began."""
        self.not_finite_in_a_row = 0
        self.spent = Spent()
        self.averaging = Averaging()
        self.unshared = Unshared()
        self.lock = threading.Lock()
        """Lock for `averaging`, because the background may change it while an epoch ends."""
        self.under_way: Callable[[], Spent] = Spent
        """Function that returns the times that the present wait adds to `spent`, which includes only finished waits."""

    def spent_now(self) -> Spent:
        """Return a copy of `spent` that includes the present wait."""
        return Spent(*map(add, vars(self.spent).values(), vars(self.under_way()).values()))


@dataclass(frozen=True)
class EpochReport:
    """A report of one learner's part of an epoch. The epoch has ended, or the end of the budget has cut it short."""

    rank: int
    epoch: int
    num_steps: int
    seconds: float
    spent: Spent
    averaging: Averaging = field(default_factory=Averaging)
    consensus_distance: float | None = None
    """(1/L) sum_l |w_l - mean|^2 over the weights w_l of the L learners at the end of the epoch. Only the virtual
    engine reports it."""
    num_not_finite: int = 0
    """Number of non-finite gradients, which were skipped."""
    is_last: bool = False
    """Whether the run ends with this epoch."""


class Observer:
    """The base class of observers of a run; its methods do nothing. Each learner calls its observer between two
    mini-batches."""

    @property
    def saves(self) -> bool:
        """Whether the observer needs the learners' states at checkpoint barriers, for example to save them. If not,
        learners do not copy their states."""
        return type(self).on_barrier is not Observer.on_barrier

    @property
    def records(self) -> bool:
        """Whether the observer records the events that a replay of the run needs."""
        return False

    def on_event(self, rank: int, kind: str, **fields: Any) -> None:
        """Called in any thread, if the observer `records`, with each event of a learner that a replay needs in addition
        to the learner's mini-batches. docs/events.md lists the kinds of events."""

    def on_claim(self, report: ClaimReport) -> None:
        """Called before each gradient. After this call, the gradient may reach the weights of other learners even if
        this learner is lost while computing it, because their mean may already be complete."""

    def on_step(self, report: StepReport) -> None:
        """Called after each gradient."""

    def on_epoch(self, report: EpochReport, state: LearnerState) -> None:
        """Called after each epoch and after the last mini-batch of the run. `state` shares memory with the learner, so
        copy or write it before returning. If the state is not complete (`is_complete`), `on_barrier` receives the
        complete state later."""

    def on_barrier(self, state: LearnerState) -> None:
        """Called after each checkpoint barrier within an epoch, with the learner's state at the barrier. It is also
        called after an epoch if learners average in the background. As in `on_epoch`, `state` shares memory with the
        learner."""
