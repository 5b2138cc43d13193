"""Short runs that are measured: their parameters, and what each learner records."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from benchmarks.workloads import Computing, EmulatedDevice
from starling.budget import Budget, Schedule
from starling.checkpoint.state import LearnerState
from starling.strategies import find_strategy
from starling.training.job import EpochReport, Job, Observer, StepReport
from starling.training.speeds import Stragglers
from starling.workload import Workload

Seconds = float
DDP = "ddp"
"""Stands in for a strategy: DistributedDataParallel. Its one option is `sync_every`, the number of gradients that are
summed (under `no_sync`) before it communicates."""
SENDING = "sending"
"""Stands in for a strategy: learner 0 sends the model to learner 1 repeatedly."""
WARM_UP = 3
"""Number of gradients of each learner that are not timed, because the first ones prepare."""
LEARNING_RATE = 0.05
COMPARED_AT = 0.5
"""Share of the budget after which each learner's weights are kept, for comparison with the others'."""
LEAST_ROUNDS = 0.5
"""Averaging rounds per gradient below which the models of an asynchronous strategy have little influence on each
other."""


@dataclass(frozen=True)
class Run:
    """A run of several learners, which ends at the same time for all learners that are told about it."""

    strategy: str
    world: int
    num_parameters: int = 0
    """Number of parameters of the emulated device's model."""
    gradient_seconds: Seconds = 0.0
    """Seconds of a gradient on the emulated device; with a perceptron, seconds added to each gradient."""
    widths: tuple[int, ...] = ()
    """Widths of a perceptron that is really computed, in place of the emulated device's model."""
    steps: int | None = None
    """Number of mini-batches of all learners together."""
    seconds: Seconds | None = None
    last_is_slower: float = 1.0
    """Factor by which the last learner's gradients take longer."""
    jitter: float = 0.0
    """Mean of an exponentially distributed share of its time by which each gradient takes longer."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the strategy."""
    batch_shares: Mapping[str, int] = field(default_factory=dict)
    """Batch shares by rank, with the ranks as text, as in JSON."""
    bytes_per_second: float | None = None
    """Speed of a link to emulate if no real link can be throttled."""

    @classmethod
    def from_json(cls, text: str) -> "list[Run]":
        return [cls(**{**values, "widths": tuple(values["widths"])}) for values in json.loads(text)]

    def job(self) -> Job:
        """The job of this run, for an engine; for a run without a strategy, its model and data."""
        workload: Workload[Any] = (
            Computing(self.widths, self.gradient_seconds)
            if self.widths
            else EmulatedDevice(self.num_parameters, self.gradient_seconds)
        )
        is_bare = self.strategy in (DDP, SENDING)
        strategy = find_strategy("allreduce" if is_bare else self.strategy)
        return Job(
            workload=workload,
            strategy=strategy,
            options=strategy.options.model_validate({} if is_bare else self.options),
            budget=Budget(steps=self.steps, minutes=None if self.seconds is None else self.seconds / 60.0),
            make_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=LEARNING_RATE),
            schedule=Schedule(decay="constant"),
            stragglers=self.stragglers,
            batch_shares={int(rank): share for rank, share in self.batch_shares.items()},
        )

    @property
    def stragglers(self) -> Stragglers:
        """The injected slowness."""
        slow = {self.world - 1: self.last_is_slower} if self.last_is_slower > 1.0 else {}
        return Stragglers(slow=slow, jitter=self.jitter)


@dataclass
class Outcome:
    """The record of a run by one learner."""

    stamps: list[Seconds] = field(default_factory=list)
    """Times at which each gradient was ready, on the clock that all processes of a machine share."""
    cpu_seconds: Seconds = 0.0
    """Processor time of the whole process, gloo's threads included, from its first gradient to the run's end."""
    rounds: int = 0
    bytes_sent: int = 0
    megabytes: float = 0.0
    """Memory of the process at the run's end, in units of 10^6 bytes. Memory that several processes share is divided
    among them."""
    distance: float | None = None
    """Distance between all learners' models, each taken after `COMPARED_AT` of the budget; see `relative_distance`."""

    @property
    def rate(self) -> float:
        """Gradients per second after the warm-up."""
        timed = self.stamps[WARM_UP:]
        if len(timed) < 2:
            raise ValueError(f"{len(self.stamps)} gradients are too few to time; at least {WARM_UP + 2} are needed")
        return (len(timed) - 1) / (timed[-1] - timed[0])

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Notes(Observer):
    """An observer (also for the plain loop) that fills in an outcome."""

    def __init__(self, run: Run) -> None:
        self.job = run.job()
        self.outcome = Outcome()
        self.weights: Tensor | None = None
        """This learner's weights `[P]` after `COMPARED_AT` of the budget."""
        self._cpu_begin = 0.0

    def gradient_made(self) -> None:
        """Record that another gradient is ready."""
        if not self.outcome.stamps:
            self._cpu_begin = time.process_time()
        self.outcome.stamps.append(time.monotonic())

    def ended(self) -> None:
        """Record that the run is over."""
        self.outcome.cpu_seconds = time.process_time() - self._cpu_begin
        if (memory := Path("/proc/self/smaps_rollup")).exists():  # Linux only
            (kilobytes,) = (line.split()[1] for line in memory.read_text().splitlines() if line.startswith("Pss:"))
            self.outcome.megabytes = int(kilobytes) * 1024 / 1e6

    def on_step(self, report: StepReport) -> None:
        self.gradient_made()
        if self.weights is None and report.fraction >= COMPARED_AT:
            self.weights = parameters_to_vector(self.job.workload.model.parameters()).detach()

    def on_epoch(self, report: EpochReport, state: LearnerState) -> None:
        self.ended()
        self.outcome.rounds += report.averaging.rounds
        self.outcome.bytes_sent += report.averaging.bytes_sent


def weights_file(folder: Path, number: int, rank: int) -> Path:
    """The file to which learner `rank` writes its weights of a run."""
    return folder / f"weights-{number}-{rank}.bin"


def read_weights(file: Path) -> Tensor:
    """Read weights `[P]` that a process wrote."""
    return torch.from_file(str(file), size=file.stat().st_size // 4, dtype=torch.float32)


def relative_distance(models: Sequence[Tensor]) -> float:
    """Distance of models `[P]` from their mean, as a share of its norm: sqrt(mean_l |w_l - mean|^2) / |mean|."""
    every = torch.stack([model.double() for model in models])
    mean = every.mean(dim=0)
    return float((every - mean).norm() / len(models) ** 0.5 / mean.norm())


def averaging_in_words(runs: Sequence[Sequence[Outcome]]) -> str:
    """A description of how often learners averaged, and how far apart their models were: the medians over runs of one
    kind."""
    rounds = f"{median(rounds_per_gradient(outcomes) for outcomes in runs):.2f} rounds per gradient"
    distances = [outcomes[0].distance for outcomes in runs if outcomes[0].distance is not None]
    return f"{rounds}, distance between models {median(distances):.1e}" if distances else rounds


def rounds_per_gradient(outcomes: Sequence[Outcome]) -> float:
    """The mean over learners of their averaging rounds per gradient."""
    return fmean(outcome.rounds / len(outcome.stamps) for outcome in outcomes)


def total_rate(outcomes: Sequence[Outcome]) -> float:
    """Gradients per second of all learners together."""
    return sum(outcome.rate for outcome in outcomes)


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """The median over rounds of numerator / denominator, both from the same round."""
    return median(above / below for above, below in zip(numerators, denominators, strict=True))
