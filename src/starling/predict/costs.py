"""What a plan rests on: the costs of a job on some machines, measured (a profile) or from data sheets (a preset).

Simulations draw from the distributions and lines that fit the measured times best.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray
from pydantic import Field

from starling.configuration import Config, ConfigT
from starling.engines.virtual.cluster import ComputeModel, LinkModel
from starling.errors import ConfigError, did_you_mean
from starling.problems import checked
from starling.recipe.file import parse_yaml

Seconds = float
SHORTEST: Seconds = 1e-6
"""The least that a mean of gradients or a round of averaging is taken to last, even where it overlaps completely."""
PASSES_OF_A_CHANGE = 3
"""Changing weights reads them, reads the change, and writes them."""
RESAMPLES = 2000
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
HARDLY_ANY = 0.002
"""Standard deviation / mean below which gradient times are taken to be constant."""
PRESETS = Path(__file__).parent / "presets"


class JobFacts(Config):
    """What a plan needs to know of a job."""

    trains: str
    """What it trains, for people."""
    model_bytes: int = Field(ge=1)
    """Of the weights that learners exchange."""
    batches_per_epoch: int = Field(ge=1)
    flops_per_gradient: float | None = Field(default=None, gt=0.0)
    """Floating-point operations of forward and backward of one mini-batch; only presets need them."""


class Validation(Config):
    """How far predictions were from measurements when they were last compared."""

    error: float = Field(ge=0.0)
    """The largest |predicted / measured - 1|."""
    against: str
    """What was measured, and when."""


class GradientTimes(Config):
    """How long one gradient takes on a learner: loading, forward and backward."""

    num_measured: int = Field(ge=2)
    seconds: Seconds = Field(gt=0.0)
    """The mean."""
    low: Seconds = Field(gt=0.0)
    """95 % interval of the mean, by bootstrap."""
    high: Seconds = Field(gt=0.0)
    jitter: float = Field(ge=0.0)
    """Standard deviation / mean."""
    quantiles: dict[str, Seconds]
    fitted: ComputeModel
    """The distribution that simulations draw from."""


class MeasuredLink(Config):
    """What messages of several sizes took between two learners, and the line through them."""

    seconds_by_bytes: dict[int, Seconds]
    """Medians."""
    fitted: LinkModel


class MachineFacts(Config):
    """The machine that was measured."""

    processor: str
    cores: int = Field(ge=1)
    memory_bytes: int = Field(ge=0)
    device: str
    torch: str
    starling: str


class Profile(Config):
    """The costs of a job as measured on a machine: what `starling profile` writes."""

    format: int = 1
    """The format of the file."""
    date: str
    """When it was measured."""
    command: str
    """The command that measured it."""
    machine: MachineFacts
    """Where it was measured."""
    job: JobFacts
    """What was measured."""
    gradient: GradientTimes
    """What a gradient takes."""
    step_seconds: Seconds = Field(ge=0.0)
    """What each gradient costs besides: the copy of the weights, and the optimizer's step."""
    mixing_bandwidth: float = Field(gt=0.0)
    """Bytes of weights that a learner changes per second by `apply`."""
    exchange: MeasuredLink
    """A model to a neighbour and one from it, both ways at once, copied and applied."""
    mean: MeasuredLink
    """A mean of two learners, as two messages of half the size."""
    gradient_mean: MeasuredLink
    """What the mean of two learners' gradients takes beyond the gradient, which may hide a part of it."""
    memory_per_learner_bytes: int = Field(ge=0)
    """Resident memory of a learner process at its peak, on the accelerator where there is one."""
    validation: Validation | None = None
    """How good earlier predictions were; None: never compared."""

    @property
    def costs(self) -> "Costs":
        """What simulations need of it."""
        return Costs(
            job=self.job,
            compute=with_step(self.gradient.fitted, self.step_seconds),
            uncertainty=(self.gradient.low / self.gradient.seconds, self.gradient.high / self.gradient.seconds),
            messages=self.exchange.fitted,
            means=self.mean.fitted,
            gradient_means=self.gradient_mean.fitted,
            memory_bandwidth=PASSES_OF_A_CHANGE * self.mixing_bandwidth,
            memory_bytes=self.memory_per_learner_bytes,
            source=f"a profile of {self.date} on {self.machine.device}",
            validation=self.validation,
        )


class Preset(Config):
    """Machines as their data sheets describe them, with one fitted number: the share of the peak that is reached."""

    summary: str
    device: str
    peak_flops: float = Field(gt=0.0)
    """Floating-point operations per second of one device, in the precision of training."""
    efficiency: float = Field(gt=0.0, le=1.0)
    """The share of `peak_flops` that a gradient reaches."""
    devices_per_node: int = Field(ge=1)
    inside: LinkModel
    """Between two devices of a node."""
    uplink: LinkModel
    """Of a node, shared by its devices."""
    memory_bandwidth: float = Field(gt=0.0)
    memory_bytes: int = Field(ge=0)
    validation: Validation | None = None

    def costs(self, job: JobFacts, name: str) -> "Costs":
        """What simulations need of it, for a job. ConfigError where the job's operations are unknown."""
        if job.flops_per_gradient is None:
            raise ConfigError(
                f"preset {name}: the operations of {job.trains} are unknown, so that data sheets cannot tell its "
                "gradient time; measure them with `starling profile`, and give the profile"
            )
        return Costs(
            job=job,
            compute=ComputeModel(seconds=job.flops_per_gradient / (self.peak_flops * self.efficiency)),
            messages=self.uplink,
            means=self.uplink,
            inside=self.inside,
            devices_per_node=self.devices_per_node,
            source=f"the preset {name} ({self.summary})",
            validation=self.validation,
        )


class Costs(Config):
    """What simulations of a job need to know."""

    job: JobFacts
    compute: ComputeModel
    uncertainty: tuple[float, float] = (1.0, 1.0)
    """The 95 % interval of the mean gradient time, as factors of it."""
    messages: LinkModel
    """Between learners on different nodes; of a node's uplink where several learners share a node."""
    means: LinkModel
    gradient_means: LinkModel | None = None
    """The same for means of gradients; None: as other means have it."""
    inside: LinkModel | None = None
    """Between learners of one node; None: the same as between nodes."""
    devices_per_node: int = 1
    holds_contention: bool = False
    """Whether the links were measured while all learners sent at once, so that waiting for a node's link is in them."""
    memory_bandwidth: float | None = None
    """Bytes per second of the memory in which a server keeps the model."""
    memory_bytes: int | None = None
    source: str
    validation: Validation | None = None


def read_profile(path: Path) -> Profile:
    """The profile in a file that `starling profile` wrote. ConfigError for anything else."""
    return loaded(Profile, path, "profile", "make one with `starling profile RECIPE --output profile.yaml`")


def find_preset(name: str) -> Preset:
    """A preset by its name, or in a file of one's own. ConfigError if there is none."""
    known = {path.stem: path for path in sorted(PRESETS.glob("*.yaml"))}
    path = known.get(name, Path(name))
    if name not in known and path.suffix not in (".yaml", ".yml"):
        raise ConfigError(
            f"preset {name!r} is unknown; {did_you_mean(name, known)}known are {', '.join(known)}, or the "
            "path of a YAML file"
        )
    return loaded(Preset, path, "preset", "copy one of Starling's presets, and change it")


def loaded(kind: type[ConfigT], given: Path | Mapping[str, Any], what: str, advice: str) -> ConfigT:
    """A configuration from a YAML file or a mapping, perhaps below the key `what`. ConfigError with all problems, or
    with advice if it is no mapping."""
    where, tree = what, given
    if isinstance(given, Path):
        where = f"{what} {given}"
        try:
            tree = parse_yaml(given.read_text(encoding="utf-8"), where)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{where}: cannot be read ({error}); {advice}") from None
    if isinstance(tree, Mapping) and set(tree) == {what}:
        tree = tree[what]
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{where}: must be a YAML mapping of keys to values; {advice}")
    return checked(kind, tree, where)


def dump(config: Config, comment: str) -> str:
    """A configuration as YAML, below a comment."""
    tree: dict[str, Any] = config.model_dump(mode="json")
    return f"# {comment}\n" + yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=120)


def gradient_times(seconds: Sequence[float]) -> GradientTimes:
    """Mean, interval, quantiles and the distribution that fits best."""
    times = np.asarray(seconds, dtype=np.float64)
    generator = np.random.default_rng(0)
    means = generator.choice(times, (RESAMPLES, len(times))).mean(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return GradientTimes(
        num_measured=len(times),
        seconds=float(times.mean()),
        low=float(low),
        high=float(high),
        jitter=float(times.std() / times.mean()),
        quantiles={f"{share:g}": float(np.quantile(times, share)) for share in QUANTILES},
        fitted=fit_compute(times),
    )


def fit_compute(times: NDArray[np.float64]) -> ComputeModel:
    """The best-fitting distribution with the mean and deviation of `times`: its distribution function is nearest to
    theirs."""
    mean, relative = float(times.mean()), float(times.std() / times.mean())
    if relative < HARDLY_ANY:
        return ComputeModel(seconds=mean)
    spread = math.sqrt(math.log1p(relative**2))
    candidates = [ComputeModel(distribution="log-normal", seconds=mean, spread=spread)]
    if (half_width := math.sqrt(3.0) * relative) < 1.0:
        candidates.append(ComputeModel(distribution="uniform", seconds=mean, spread=half_width))
    return min(candidates, key=lambda model: _distance(np.sort(times), model))


def with_step(gradient: ComputeModel, seconds: Seconds) -> ComputeModel:
    """What a gradient takes with the rest of its step, which does not vary."""
    total = gradient.seconds + seconds
    return gradient.model_copy(update={"seconds": total, "spread": gradient.spread * gradient.seconds / total})


def _distance(times: NDArray[np.float64], model: ComputeModel) -> float:
    """The Kolmogorov distance between a distribution and the empirical one of `times`, which must be ascending."""
    if model.distribution == "uniform":
        expected = np.clip((times / model.seconds - (1.0 - model.spread)) / (2.0 * model.spread), 0.0, 1.0)
    else:
        normal = NormalDist(math.log(model.seconds) - 0.5 * model.spread**2, model.spread)
        expected = np.array([normal.cdf(math.log(each)) for each in times])
    steps = np.arange(len(times) + 1) / len(times)
    return float(max(np.abs(expected - steps[1:]).max(), np.abs(expected - steps[:-1]).max()))


def fit_link(seconds_by_bytes: Mapping[int, float]) -> LinkModel:
    """The line seconds = latency + bytes / bandwidth that fits best, neither of them below 0.

    Each squared error is weighted by 1 / seconds, a compromise: with equal weights, the largest message would decide,
    and with 1 / seconds**2, a few slow small messages would spoil the bandwidth.
    """
    sizes, seconds = (np.array(list(each), dtype=np.float64) for each in (seconds_by_bytes, seconds_by_bytes.values()))
    if len(sizes) > 1:
        per_byte, latency = np.polyfit(sizes, seconds, 1, w=seconds**-0.5)
        if latency < 0.0 < per_byte:
            latency, per_byte = 0.0, float(sizes.sum() / (sizes**2 / seconds).sum())
        if per_byte > 0.0:
            return LinkModel(latency=float(latency), bandwidth=float(1.0 / per_byte))
    return LinkModel(latency=float(seconds.min()), bandwidth=1e15)
