"""Short runs that are measured: what they are, and what each learner notes of them."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch

from benchmarks.workloads import Computing, EmulatedDevice
from starling.budget import Budget, Schedule
from starling.checkpoint.state import LearnerState
from starling.engines.job import EpochReport, Job, StepReport
from starling.engines.stragglers import Stragglers
from starling.strategies import find_strategy
from starling.workload import Workload

Seconds = float
DDP = "ddp"
"""In the place of a strategy: plain DistributedDataParallel."""
SENDING = "sending"
"""In the place of a strategy: learner 0 sends the model to learner 1 again and again."""
WARM_UP = 3
"""Gradients of each learner that are not timed: the first ones prepare."""
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Run:
    """A run of some learners, equally long for all who are told about it."""

    strategy: str
    world: int
    num_parameters: int = 0
    """Of the emulated device's model."""
    gradient_seconds: Seconds = 0.0
    """What a gradient takes on the emulated device; beside a perceptron, what it takes longer."""
    widths: tuple[int, ...] = ()
    """Of a perceptron that is computed for real, in place of the emulated device's model."""
    steps: int | None = None
    """Mini-batches of all learners together."""
    seconds: Seconds | None = None
    last_is_slower: float = 1.0
    """How many times longer the last learner's gradients take."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The strategy's."""
    bytes_per_second: float | None = None
    """Emulates a link of this speed where no real one can be throttled."""

    @classmethod
    def from_json(cls, text: str) -> "list[Run]":
        return [cls(**{**values, "widths": tuple(values["widths"])}) for values in json.loads(text)]

    def job(self) -> Job:
        """This run for an engine; of a run without a strategy, its model and data."""
        workload: Workload[Any] = (
            Computing(self.widths, self.gradient_seconds)
            if self.widths
            else EmulatedDevice(self.num_parameters, self.gradient_seconds)
        )
        strategy = find_strategy("allreduce" if self.strategy in (DDP, SENDING) else self.strategy)
        return Job(
            workload=workload,
            strategy=strategy,
            options=strategy.options.model_validate(self.options),
            budget=Budget(steps=self.steps, minutes=None if self.seconds is None else self.seconds / 60.0),
            make_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=LEARNING_RATE),
            schedule=Schedule(decay="constant"),
            stragglers=Stragglers(slow={self.world - 1: self.last_is_slower} if self.last_is_slower > 1.0 else {}),
        )


@dataclass
class Outcome:
    """What one learner noted of a run."""

    stamps: list[Seconds] = field(default_factory=list)
    """When each gradient was there, on the clock that all processes of a machine share."""
    cpu_seconds: Seconds = 0.0
    """Processor time of the whole process, gloo's threads included, from its first gradient to the run's end."""
    rounds: int = 0
    bytes_sent: int = 0

    @property
    def rate(self) -> float:
        """Gradients per second after the warm-up."""
        timed = self.stamps[WARM_UP:]
        if len(timed) < 2:
            raise ValueError(f"{len(self.stamps)} gradients are too few to time; at least {WARM_UP + 2} are needed")
        return (len(timed) - 1) / (timed[-1] - timed[0])

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Notes:
    """An observer, or the plain loop's, that fills in an outcome."""

    def __init__(self) -> None:
        self.outcome = Outcome()
        self._cpu_begin = 0.0

    def gradient_made(self) -> None:
        """One more gradient is there."""
        if not self.outcome.stamps:
            self._cpu_begin = time.process_time()
        self.outcome.stamps.append(time.monotonic())

    def ended(self) -> None:
        """The run is over."""
        self.outcome.cpu_seconds = time.process_time() - self._cpu_begin

    def on_step(self, report: StepReport) -> None:
        self.gradient_made()

    def on_epoch(self, report: EpochReport, state: LearnerState) -> None:
        self.ended()
        self.outcome.rounds += report.averaging.rounds
        self.outcome.bytes_sent += report.averaging.bytes_sent


def total_rate(outcomes: Sequence[Outcome]) -> float:
    """Gradients per second of all learners together."""
    return sum(outcome.rate for outcome in outcomes)


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """The median over the rounds of numerator / denominator, both of one round."""
    return median(above / below for above, below in zip(numerators, denominators, strict=True))
