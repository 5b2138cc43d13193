"""Timing-only runs, which execute the code of strategies on the simulated clock with learners that hold no weights.

A learner's replica and its gradients are replaced by objects that only count. Weights are sizes without values, so
every message takes the time of its real size. The values of weights and gradients have no influence on the times of
events. Therefore all times, claims, bytes, rounds and stalenesses equal those of a run with real gradients on the same
cluster with the same seed, as long as every gradient of that run is finite.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from starling.budget import Budget
from starling.checkpoint.state import LearnerState
from starling.configuration import Config
from starling.engines.virtual.cluster import Cluster
from starling.engines.virtual.computation import Computation, Loss, Member
from starling.engines.virtual.engine import VirtualEngine
from starling.errors import ConfigError, ProtocolError
from starling.strategies import Strategy
from starling.strategies.islands import NO_ISLANDS, Island
from starling.training.job import EpochReport, Job, Observer
from starling.training.replica import OptimizerMemory, Replica
from starling.training.speeds import Stragglers
from starling.training.tensor_plan import Traffic
from starling.workload import Examples, Ticket, Workload

BYTES_OF_A_WEIGHT = 4


@dataclass(frozen=True)
class TimingOutcome:
    """The outcome of a timing-only run."""

    seconds: float
    """Simulated time."""
    num_events: int
    event_hash: str
    """SHA-256 over the time, learner and kind of every event. The hash of a run with real gradients also covers the
    losses."""
    learners: tuple[EpochReport, ...]
    """Report of each learner, by rank. A report contains the learner's work and the use of its time. A timing-only run
    is one epoch."""
    gradients_at: Mapping[int, Sequence[float]]
    """Simulated times, in seconds, at which each gradient was complete, by the rank of each learner that computed
    any."""

    @property
    def num_gradients(self) -> int:
        """Number of gradients that all learners together computed."""
        return sum(learner.num_steps for learner in self.learners)

    @property
    def bytes_sent(self) -> int:
        """Number of bytes that all learners together sent."""
        return sum(learner.averaging.bytes_sent for learner in self.learners)

    @property
    def staleness(self) -> Counter[int]:
        """Number of gradients of all learners together, by staleness."""
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
        strategy: The strategy, whose code runs unchanged. It may use the sizes of weights, but not their values.
        options: The strategy's options. None means the strategy's defaults.
        world: The number of learners.
        cluster: The cluster, which determines the times of gradients and messages.
        num_bytes: The size of the model's float32 weights in bytes.
        steps: The budget, as the number of mini-batches of all learners together.
        seed: The seed of the compute times, the jitter and the topology.
        stragglers: The injected slowness of learners.
        optimizer_vectors: The number of values that the optimizer keeps for each weight: 0 for plain SGD, 1 for
            momentum, 2 for Adam. Only `optimizer_state: averaged` sends them.
        island: The islands that the learners form.
        traffic: The messages that the ranks of a tensor island send each other for one mini-batch.

    Raises:
        ConfigError: `num_bytes` is not a whole number of weights, or the options do not fit `world` learners.
        Deadlock: No event is left while a learner waits.

    If a strategy reads the value of a weight, torch raises its error about meta tensors.
    """
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
    counting = _Counting(num_bytes // BYTES_OF_A_WEIGHT, optimizer_vectors)
    outcome = VirtualEngine(job, world, cluster, counting, computation=counting).run()
    learners = tuple(counting.reports[rank] for rank in range(world))
    return TimingOutcome(outcome.seconds, outcome.num_events, outcome.event_hash, learners, counting.gradients_at)


class _Unloaded(Workload[Examples]):
    """A workload with one epoch of empty mini-batches."""

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


class _Counting(Computation, Observer):
    """A computation and observer with replicas that only count and gradients that are only sizes. It collects the
    reports of learners."""

    holds_weights = False

    def __init__(self, num_weights: int, optimizer_vectors: int) -> None:
        self._num_weights, self._optimizer_vectors = num_weights, optimizer_vectors
        self.gradients_at: dict[int, list[float]] = {}
        """Times at which the gradients of each learner were complete."""
        self.reports: dict[int, EpochReport] = {}
        """Report of each learner."""

    def new_replica(self) -> Replica:
        return _CountingReplica(self._num_weights, self._optimizer_vectors)

    def gradient(self, learner: Member, at: Tensor) -> Loss:
        times = self.gradients_at.setdefault(learner.rank, [])
        return lambda: times.append(learner.now())  # returns None, as there is no loss

    def on_epoch(self, report: EpochReport, state: LearnerState) -> None:
        self.reports[report.rank] = report


class _NoOptimizer(Optimizer):
    """An optimizer that changes nothing."""

    def __init__(self, parameters: Iterable[nn.Parameter] = ()) -> None:
        self.param_groups: list[dict[str, Any]] = [{"lr": 0.0}]
        self.state = defaultdict(dict)

    def step(self, closure: Any = None) -> Any: ...

    def state_dict(self) -> dict[str, Any]:
        return {}


class _CountingReplica(Replica):
    """A replica that holds no weights and only counts changes to them."""

    def __init__(self, num_weights: int, optimizer_vectors: int) -> None:
        super().__init__(vector(num_weights), vector(num_weights), [], _NoOptimizer, None)
        of_optimizer = [self.weights] * optimizer_vectors
        self._memory = cast(
            OptimizerMemory, SimpleNamespace(vectors=of_optimizer, never_negative=[False] * optimizer_vectors)
        )

    def step(self, gradient: Tensor, learning_rate_factor: float) -> bool:
        self.version += 1
        return True

    def clip(self, gradient: Tensor) -> float:
        return 0.0


_META = torch.device("meta")
_IN_PLACE = ("add_", "sub_", "mul_", "div_", "copy_", "zero_", "fill_", "clamp_")
_OF_ONE = ("clone", "detach", "cpu", "contiguous", "__neg__")
_OF_TWO = ("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__")


class Sizes(Tensor):
    """A tensor without values, on any device that a strategy requests.

    The usual operations on vectors are implemented in this class, because torch's own meta tensors, which handle all
    other operations, take a hundred times as long for an addition. The result of an operation may be any vector of the
    right size, because all vectors of one size are equal.
    """

    _shape = cached_property[torch.Size](lambda self: Tensor.shape.__get__(self))  # type: ignore[attr-defined]
    _dtype = cached_property[torch.dtype](lambda self: Tensor.dtype.__get__(self))  # type: ignore[attr-defined]
    _length = cached_property[int](lambda self: self._shape[0] if len(self._shape) == 1 else -1)
    """The length of a vector; -1 for a tensor that is not a vector."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _ELEMENTWISE and isinstance(args[0], Sizes):
            if kwargs and "out" in kwargs:
                return kwargs["out"]
            if not kwargs and (made := args[0]._with(*args[1:])) is not None:
                return made
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    shape = property(lambda self: self._shape)
    dtype = property(lambda self: self._dtype)
    device = property(lambda self: _META)
    nbytes = property(lambda self: self.numel() * self._dtype.itemsize)
    _version = 0  # it never changes

    def __len__(self) -> int:
        return self._shape[0]

    def numel(self) -> int:
        return self._shape.numel()

    def to(self, *args: Any, **kwargs: Any) -> Any:
        dtype = next((each for each in (*args, *kwargs.values()) if isinstance(each, torch.dtype)), self._dtype)
        if dtype is self._dtype:
            return self
        return _vector(self._length, dtype) if self._length >= 0 else super().to(dtype)

    def __getitem__(self, where: Any) -> Any:
        if self._length < 0 or type(where) is not slice:
            return super().__getitem__(where)
        return _vector(len(range(*where.indices(self._length))), self._dtype)

    def __setitem__(self, where: Any, value: Any) -> None: ...

    def _with(self, other: Any = 0.0, *others: Any) -> Any:
        """Return the result of an element-wise operation on this vector and another vector or a number, or None if
        torch must compute the result."""
        fits = isinstance(other, int | float) or (
            isinstance(other, Sizes) and other._length == self._length and other._dtype is self._dtype
        )
        return _vector(self._length, self._dtype) if self._length >= 0 and fits and not others else None


def vector(length: int, dtype: torch.dtype = torch.float32) -> Sizes:
    """Return a new vector, which is a separate object."""
    return torch.empty(length, dtype=dtype, device=_META).as_subclass(Sizes)


@lru_cache(maxsize=4096)
def _vector(length: int, dtype: torch.dtype) -> Sizes:
    return vector(length, dtype)


def _answer(name: str) -> Callable[..., Any]:
    general = getattr(Tensor, name)

    def answer(self: Sizes, *others: Any, **kwargs: Any) -> Any:
        made = self._with(*others)
        return general(self, *others, **kwargs) if made is None else made

    return answer


for _name in (*_OF_ONE, *_OF_TWO):
    setattr(Sizes, _name, _answer(_name))
for _name in _IN_PLACE:
    setattr(Sizes, _name, lambda self, *args, **kwargs: self)
_ELEMENTWISE = frozenset(
    (torch.add, torch.sub, torch.mul, torch.div, torch.empty_like, torch.zeros_like, torch.clone, torch.neg)
)
