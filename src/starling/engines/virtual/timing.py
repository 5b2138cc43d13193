"""Timing-only runs: the strategies' own texts on the simulated clock, with learners that hold no weights.

A learner's replica and its gradients are replaced by ones that only count. Weights are sizes without numbers, so every
message takes the time of its real size. What a run computes has no influence on when it happens, so all times, claims,
bytes, rounds and stalenesses are those of a run with real gradients on the same cluster with the same seed, as long as
every gradient of that run is finite.
"""

import gc
from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from starling.budget import Budget
from starling.checkpoint.state import LearnerState
from starling.configuration import Config
from starling.engines.virtual.cluster import Cluster
from starling.engines.virtual.computation import Buffers, Computing, Loss
from starling.engines.virtual.engine import VirtualEngine
from starling.engines.virtual.sizes import vector
from starling.errors import ConfigError, ProtocolError
from starling.strategies import Strategy
from starling.strategies.islands import NO_ISLANDS, Island
from starling.training.job import Averaging, EpochReport, Job, Silence, Spent
from starling.training.replica import Replica
from starling.training.stragglers import Stragglers
from starling.training.tensor_plan import Traffic
from starling.workload import Examples, Ticket, Workload

BYTES_OF_A_WEIGHT = 4


@dataclass(frozen=True)
class LearnerTiming:
    """What one learner of a timing-only run did, and where its time went."""

    num_gradients: int
    spent: Spent
    averaging: Averaging


@dataclass(frozen=True)
class TimingOutcome:
    """How a timing-only run ended."""

    seconds: float
    """On the simulated clock."""
    num_events: int
    event_hash: str
    """SHA-256 over every event: time, learner and kind. That of a run with real gradients also covers the losses."""
    learners: tuple[LearnerTiming, ...]
    """By rank."""
    gradients_at: Mapping[int, Sequence[float]]
    """By rank of those that computed any: simulated seconds when each gradient was complete."""

    @property
    def num_gradients(self) -> int:
        """Of all learners together."""
        return sum(learner.num_gradients for learner in self.learners)

    @property
    def bytes_sent(self) -> int:
        """By all learners together."""
        return sum(learner.averaging.bytes_sent for learner in self.learners)

    @property
    def staleness(self) -> Counter[int]:
        """Gradients by staleness, of all learners together."""
        return sum((learner.averaging.staleness for learner in self.learners), Counter())


def simulate_timing(
    strategy: Strategy,
    options: Config | None,
    world: int,
    cluster: Cluster,
    num_bytes: int,
    steps: int,
    *,
    seed: int = 0,
    stragglers: Stragglers = Stragglers(),  # noqa: B008 - it is frozen
    optimizer_vectors: int = 0,
    island: Island = NO_ISLANDS,
    traffic: Traffic | None = None,
) -> TimingOutcome:
    """Run a strategy on the simulated cluster without computing gradients or holding weights.

    Args:
        strategy: Its text is driven as it is. It may look at sizes, but not at the weights' values.
        options: The strategy's; None: its defaults.
        world: The number of learners.
        cluster: How long gradients and messages take.
        num_bytes: The size of the model's float32 weights.
        steps: The budget: mini-batches of all learners together.
        seed: Of the compute times, the jitter and the topology.
        stragglers: Injected slowness.
        optimizer_vectors: What the optimizer remembers about each weight: 0 for plain SGD, 1 for momentum, 2 for Adam.
            Only `optimizer_state: averaged` sends it.
        island: How the learners form islands.
        traffic: What the ranks of a tensor island send each other for one mini-batch.

    Raises:
        ConfigError: `num_bytes` is no whole number of weights, or the options do not fit `world` learners.
        Deadlock: nothing is left to happen while a learner waits.

    A strategy that asks for the value of a weight gets torch's error about meta tensors.
    """
    _check(world, num_bytes, island, traffic)
    job = Job(
        _Unloaded(steps, traffic),
        strategy,
        Budget(steps=steps),
        make_optimizer=_NoOptimizer,
        options=options or strategy.options(),
        stragglers=stragglers,
        island=island,
        seed=seed,
    )
    totals = Totals(world)
    counting = _Counting(num_bytes // BYTES_OF_A_WEIGHT, optimizer_vectors)
    with _without_collections():
        outcome = VirtualEngine(job, world, cluster, totals, computation=counting).run()
    return TimingOutcome(
        outcome.seconds, outcome.num_events, outcome.event_hash, totals.learners(), counting.gradients_at
    )


def _check(world: int, num_bytes: int, island: Island, traffic: Traffic | None) -> None:
    """Raise ConfigError for what cannot be simulated."""
    if island.tensor > 1 and traffic is None:
        raise ConfigError(
            "island.tensor: what its ranks send depends on the model, which a simulation of times alone does not have; "
            "give `traffic`"
        )
    if num_bytes <= 0 or num_bytes % BYTES_OF_A_WEIGHT:
        raise ConfigError(
            f"timing: {num_bytes} bytes are no whole number of float32 weights; give {BYTES_OF_A_WEIGHT} bytes for "
            "each parameter of the model"
        )
    if world < 1:
        raise ConfigError(f"timing: {world} learners; it needs at least 1")


@contextmanager
def _without_collections() -> Generator[None, None, None]:
    """Keep the garbage collector from searching thousands of learners for cycles, again and again: events leave none,
    and the search takes a third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Totals(Silence):
    """An observer that sums up each learner's epochs."""

    def __init__(self, world: int) -> None:
        self._of = [_Total() for _ in range(world)]

    def on_epoch(self, report: EpochReport, state: LearnerState) -> None:
        total, spent, averaging = self._of[report.rank], report.spent, report.averaging
        total.num_gradients += report.num_steps
        total.spent.computing += spent.computing
        total.spent.waiting_for_data += spent.waiting_for_data
        total.spent.waiting_for_peers += spent.waiting_for_peers
        total.averaging.rounds += averaging.rounds
        total.averaging.bytes_sent += averaging.bytes_sent
        total.averaging.staleness += averaging.staleness

    def learners(self) -> tuple[LearnerTiming, ...]:
        """What each learner did, by rank."""
        return tuple(LearnerTiming(total.num_gradients, total.spent, total.averaging) for total in self._of)


@dataclass
class _Total:
    num_gradients: int = 0
    spent: Spent = field(default_factory=Spent)
    averaging: Averaging = field(default_factory=Averaging)


class _Unloaded(Workload[Examples]):
    """One epoch of mini-batches that hold nothing."""

    def __init__(self, steps: int, traffic: Traffic | None) -> None:
        self._steps, self.traffic = max(1, steps), traffic

    def make_model(self) -> nn.Module:
        raise ProtocolError("a timing-only run has no model; use VirtualEngine for real gradients")

    def num_batches(self, epoch: int) -> int:
        return self._steps

    def load(self, ticket: Ticket) -> Sequence[Examples]:
        return ()

    def loss(self, model: nn.Module, examples: Examples) -> Tensor:
        raise ProtocolError("a timing-only run has no losses; use VirtualEngine for real gradients")


class _Counting:
    """Replicas that count, and gradients that are only sizes."""

    holds_weights = False

    def __init__(self, num_weights: int, optimizer_vectors: int) -> None:
        self._num_weights, self._optimizer_vectors = num_weights, optimizer_vectors
        self.gradients_at: dict[int, list[float]] = {}
        """By learner: when its gradients were complete."""

    def new_replica(self) -> Replica:
        return _CountingReplica(self._num_weights, self._optimizer_vectors)

    def new_buffers(self, start: LearnerState | None) -> Buffers:
        return []

    def named(self, buffers: Buffers) -> dict[str, Tensor]:
        return {}

    def close(self) -> None: ...

    def gradient(self, learner: Computing, at: Tensor) -> Loss:
        times = self.gradients_at.setdefault(learner.rank, [])
        return lambda: times.append(learner.now())  # returns None, as there is no loss


class _NoOptimizer(Optimizer):
    """It changes nothing."""

    def __init__(self, parameters: Iterable[nn.Parameter] = ()) -> None:
        self.param_groups: list[dict[str, Any]] = []

    def step(self, closure: Any = None) -> Any: ...

    def state_dict(self) -> dict[str, Any]:
        return {}


class _CountingReplica(Replica):
    """A replica that counts the changes made to weights that it does not hold."""

    def __init__(self, num_weights: int, optimizer_vectors: int) -> None:
        super().__init__(vector(num_weights), vector(num_weights), [], _NoOptimizer, None)
        self._optimizer_vectors = optimizer_vectors

    def step(self, gradient: Tensor, learning_rate_factor: float) -> bool:
        self.version += 1
        return True

    def clip(self, gradient: Tensor) -> float:
        return 0.0

    def learning_rate(self, factor: float) -> float:
        return 0.0

    def apply(self, delta: Tensor, piece: slice | None = None, in_round: bool = False) -> None:
        self.version += piece is None or piece.stop == self._size

    def replace(self, weights: Tensor, piece: slice | None = None) -> None:
        self.version += piece is None or piece.stop == self._size

    def snapshot(self, piece: slice | None = None, into: Tensor | None = None) -> Tensor:
        return self.weights.clone() if piece is None else self.weights.new_empty(piece.stop - piece.start)

    def on_host(self) -> Tensor:
        return self.weights

    def pieces(self, largest: int, optimizer_state: bool) -> Sequence[slice]:
        num_vectors = 1 + (self._optimizer_vectors if optimizer_state else 0)
        return [
            slice(number * self._size + start, number * self._size + min(start + largest, self._size))
            for number in range(num_vectors)
            for start in range(0, self._size, largest)
        ]
