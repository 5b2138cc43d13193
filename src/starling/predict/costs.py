"""The costs of a job on some machines, which are the basis of predictions, and the facts about the job for a plan.

Costs come from a profile or from the data sheets of a preset, or are measured by the learners of a run. The memory of
weights, gradients and optimizer is computed from the model; activations and operations are measured on one mini-batch.
"""

import math
import warnings
from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import torch
import yaml
from pydantic import Field, PlainSerializer
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from starling.checkpoint.cut import Cut
from starling.configuration import Config, ConfigT, checked
from starling.engines.processes.island import blocks_of
from starling.engines.virtual.cluster import ComputeModel, LinkModel
from starling.errors import ConfigError, did_you_mean
from starling.recipe import parse_yaml
from starling.training.flat import trainable
from starling.training.job import Job
from starling.training.tensor_plan import cut_dims
from starling.workload import Ticket

Seconds = float
SHORTEST: Seconds = 1e-6
"""Shortest time that a mean of gradients or an averaging round is assumed to last, even if it overlaps completely."""
PASSES_OF_A_CHANGE = 3
"""Number of passes over memory in a change of weights, which reads the weights and the change, and writes the
weights."""
PRESETS = Path(__file__).parent / "presets"
Rounded = Annotated[Seconds, PlainSerializer(lambda seconds: round(seconds, 6))]
"""Seconds, rounded to microseconds in files."""


class JobFacts(Config):
    """The facts that a plan needs about a job."""

    trains: str
    """Name of the workload, for display."""
    model_bytes: int = Field(ge=1)
    """Size of the weights that learners exchange."""
    batches_per_epoch: int = Field(ge=1)
    flops_per_gradient: float | None = Field(default=None, gt=0.0)
    """Number of floating-point operations of forward and backward of one mini-batch; only presets need it."""


class Validation(Config):
    """The difference between predictions and measurements when they were last compared."""

    error: float = Field(ge=0.0)
    """Largest |predicted / measured - 1|."""
    against: str
    """Description of the measurement, with its date."""


class GradientTimes(Config):
    """Times of one gradient on a learner: loading, forward and backward."""

    num_measured: int = Field(ge=2)
    seconds: Seconds = Field(gt=0.0)
    """Mean time of a gradient."""
    low: Seconds = Field(gt=0.0)
    """Lower end of the 95 % interval of the mean, by bootstrap; `high` is the upper end."""
    high: Seconds = Field(gt=0.0)
    jitter: float = Field(ge=0.0)
    """Standard deviation divided by the mean."""
    quantiles: dict[str, Seconds]
    fitted: ComputeModel
    """Distribution from which simulations draw."""


class MeasuredLink(Config):
    """Times of messages of several sizes between two learners, and the line through them."""

    seconds_by_bytes: dict[int, Seconds]
    """Median times by message size."""
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
    """The costs of a job as measured on a machine: the content of a file that `starling profile` writes."""

    format: int = 1
    """Format of the file."""
    date: str
    """Date of the measurement."""
    command: str
    """Command that measured the profile."""
    machine: MachineFacts
    """Machine on which the profile was measured."""
    job: JobFacts
    """Job that was measured."""
    gradient: GradientTimes
    """Times of a gradient."""
    step_seconds: Seconds = Field(ge=0.0)
    """Time that each gradient costs in addition: the copy of the weights, and the optimizer's step."""
    mixing_bandwidth: float = Field(gt=0.0)
    """Number of bytes of weights per second that a learner changes by `apply`."""
    exchange: MeasuredLink
    """Times of an exchange, in which a model is sent to a neighbour while the neighbour's model is received, copied and
    applied."""
    mean: MeasuredLink
    """Times of a mean of two learners, as two messages of half the size."""
    gradient_mean: MeasuredLink
    """Time that the mean of two learners' gradients adds to the gradient, which may hide a part of it."""
    memory_per_learner_bytes: int = Field(ge=0)
    """Peak resident memory of a learner process, on the accelerator if there is one."""
    validation: Validation | None = None
    """Accuracy of earlier predictions; None if they were never compared."""

    @property
    def costs(self) -> "Costs":
        """The costs that simulations need from the profile."""
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
    """Machines as their data sheets describe them. One number is fitted: the fraction of the peak that gradients
    reach."""

    summary: str
    device: str
    peak_flops: float = Field(gt=0.0)
    """Floating-point operations per second of one device, in the precision of training."""
    efficiency: float = Field(gt=0.0, le=1.0)
    """Fraction of `peak_flops` that a gradient reaches."""
    devices_per_node: int = Field(ge=1)
    kept_per_doubling: float = Field(default=1.0, gt=0.0, le=1.0)
    """Share of its speed that a device keeps when twice as many devices of its node compute: they share the host's
    processors, its memory and its disks."""
    inside: LinkModel
    """The link between two devices of a node."""
    uplink: LinkModel
    """The link of a node to others, shared by its devices."""
    memory_bandwidth: float = Field(gt=0.0)
    memory_bytes: int = Field(ge=0)
    validation: Validation | None = None

    def costs(self, job: JobFacts, name: str) -> "Costs":
        """Return the costs of a job that simulations need, given this preset. Raises `ConfigError` if the number of the
        job's operations is unknown."""
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
            kept_per_doubling=self.kept_per_doubling,
            source=f"the preset {name} ({self.summary})",
            validation=self.validation,
        )


class MeasuredRun(Config):
    """The measurements that the learners of a run made together. Each is given by learner, or as a mean over
    learners."""

    gradient_seconds: tuple[Rounded, ...]
    """Time of a gradient on each learner, without averaging."""
    gradients_measured: tuple[int, ...]
    step_seconds: Rounded
    """Time of the rest of a step."""
    mean_seconds: Rounded
    """Time of a mean of the model."""
    mean_of_gradients_seconds: Rounded
    """Time that the mean of all gradients takes in addition to the slowest gradient."""
    exchange_seconds: dict[str, Rounded]
    """Time of an averaging round while all learners compute gradients, by pattern."""
    lost_to_exchanges: tuple[Annotated[float, PlainSerializer(lambda share: round(share, 3))], ...]
    """Share of its time that each learner loses while a round is under way."""
    model_bytes: int


class Costs(Config):
    """The costs that simulations of a job need."""

    job: JobFacts
    compute: ComputeModel
    uncertainty: tuple[float, float] = (1.0, 1.0)
    """95 % interval of the mean gradient time, as factors of it."""
    messages: LinkModel
    """Link between learners on different nodes, or a node's uplink if several learners share a node."""
    means: LinkModel
    gradient_means: LinkModel | None = None
    """Link for means of gradients; None uses the link of other means."""
    inside: LinkModel | None = None
    """Link between learners of one node; None if it is like the link between nodes."""
    devices_per_node: int = 1
    kept_per_doubling: float = 1.0
    """Share of its speed that a learner keeps when twice as many learners of its node compute."""
    measured: MeasuredRun | None = None
    """Measurements that the learners of a run made together. They are valid for the same number of learners, and
    predictions use them in place of the links for messages. They include waiting for a node's link, because all
    learners sent at once."""
    memory_bandwidth: float | None = None
    """Bytes per second of the memory in which a server keeps the model."""
    memory_bytes: int | None = None
    source: str
    validation: Validation | None = None

    def beside(self, learners: int) -> ComputeModel:
        """Return the times of a gradient on a node on which `learners` learners compute."""
        slower = self.kept_per_doubling ** -math.log2(max(1, learners))
        return self.compute.model_copy(update={"seconds": self.compute.seconds * slower})


def read_profile(path: Path) -> Profile:
    """Return the profile in a file that `starling profile` wrote. Raises `ConfigError` for any other file."""
    return loaded(Profile, path, "profile", "make one with `starling profile RECIPE --output profile.yaml`")


def find_preset(name: str) -> Preset:
    """Return the preset with the name `name`, or in the file with that path. Raises `ConfigError` if there is none."""
    known = {path.stem: path for path in sorted(PRESETS.glob("*.yaml"))}
    path = known.get(name, Path(name))
    if name not in known and path.suffix not in (".yaml", ".yml"):
        raise ConfigError(
            f"preset {name!r} is unknown; {did_you_mean(name, known)}known are {', '.join(known)}, or the "
            "path of a YAML file"
        )
    return loaded(Preset, path, "preset", "copy one of Starling's presets, and change it")


def find_costs(job: Job | JobFacts | None, profile: Profile | Path | str | None, preset: Preset | str | None) -> Costs:
    """Return the costs of a job, given a profile or a preset. Raises `ConfigError` unless exactly one of them is given,
    or if the profile is of another model."""
    if (profile is None) == (preset is None):
        raise ConfigError("plan: give either a profile, made by `starling profile`, or a preset such as v100-2019")
    if preset is not None:
        if job is None:
            raise ConfigError("plan: a preset knows no job; give the job, or a profile of it")
        name, found = (preset, find_preset(preset)) if isinstance(preset, str) else (preset.device, preset)
        return found.costs(job if isinstance(job, JobFacts) else facts_of(job, counts_flops=True), name)
    measured = profile if isinstance(profile, Profile) else read_profile(Path(str(profile)))
    if job is not None:
        facts = job if isinstance(job, JobFacts) else facts_of(job)
        if facts.model_bytes != measured.job.model_bytes:
            raise ConfigError(
                f"profile: it is of a model of {measured.job.model_bytes:,} bytes ({measured.job.trains}), and the "
                f"job's has {facts.model_bytes:,}; profile this job"
            )
        kept = {"flops_per_gradient": measured.job.flops_per_gradient}
        return measured.costs.model_copy(update={"job": facts.model_copy(update=kept)})
    return measured.costs


def loaded(kind: type[ConfigT], given: Path | Mapping[str, Any], what: str, advice: str) -> ConfigT:
    """Return a configuration from a YAML file or a mapping, in which it may be under the key `what`. Raises
    `ConfigError` with all problems, or with `advice` if the content is not a mapping."""
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
    """Return a configuration as YAML, after a comment."""
    tree: dict[str, Any] = config.model_dump(mode="json")
    return f"# {comment}\n" + yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=120)


def with_step(gradient: ComputeModel, seconds: Seconds) -> ComputeModel:
    """Return the times of a gradient together with the rest of its step, whose time does not vary."""
    total = gradient.seconds + seconds
    return gradient.model_copy(update={"seconds": total, "spread": gradient.spread * gradient.seconds / total})


def facts_of(job: Job, counts_flops: bool = False) -> JobFacts:
    """Return the facts that a plan needs about a job. With `counts_flops`, operations are counted by computing one
    gradient on the CPU."""
    workload = job.workload
    model = workload.make_model()
    return JobFacts(
        trains=f"{type(workload).__module__}.{type(workload).__qualname__}",
        model_bytes=sum(parameter.nbytes for parameter in trainable(model)),
        batches_per_epoch=workload.num_batches(0),
        flops_per_gradient=_flops(job) if counts_flops else None,
    )


def _flops(job: Job) -> float | None:
    """Return the number of floating-point operations in the matrix products and convolutions of one gradient, or None
    if there are none.

    Recurrent layers are computed step by step, because the counter does not see the operations inside the libraries'
    implementations.
    """
    workload = job.workload
    model = workload.make_model()
    counter = FlopCounterMode(display=False)
    with warnings.catch_warnings(), counter:
        warnings.simplefilter("ignore", UserWarning)  # oneDNN warns about Intel's GPUs
        with torch.backends.mkldnn.flags(enabled=False):
            for examples in workload.load(Ticket(0, 0, 0)):
                workload.loss(model, examples).backward()  # type: ignore[no-untyped-call]
    return float(counter.get_total_flops()) or None


@dataclass(frozen=True)
class LearnerMemory:
    """The memory of one learner, or of one rank of an island, in bytes. Copies that a strategy makes, and the libraries
    of the process, are not included."""

    weights: int
    gradients: int
    optimizer: int
    gathered: int
    """Parameters of other ranks that are held while this rank computes: in a sharded island, parameters in no block,
    and the largest block with its gradient; in a tensor island, parameters that are not cut."""
    activations: int
    """Tensors that backward needs for the largest micro-batch of the first mini-batch, measured with a whole model."""

    @property
    def total(self) -> int:
        """Sum of all fields."""
        return sum(astuple(self))

    def __str__(self) -> str:
        sizes = {each.name: getattr(self, each.name) for each in fields(self)}
        listed = ", ".join(f"{name} {size / 1e6:.3g} MB" for name, size in sizes.items() if size)
        return f"{self.total / 1e6:.3g} MB: {listed}"


def memory_of(job: Job) -> LearnerMemory:
    """Return the memory of a learner of a job. It is determined from the model, the optimizer, the island, and a
    forward pass."""
    model, island = job.workload.make_model(), job.island
    parameters = trainable(model)
    shapes, item = tuple(tuple(each.shape) for each in parameters), parameters[0].itemsize
    whole, gathered, dims = sum(each.nbytes for each in parameters), 0, (0,) * len(parameters)
    if island.tensor > 1:
        cut = cut_dims(model)
        dims = tuple(cut.get(each, 0) for each in parameters)
        gathered = whole - sum(each.nbytes for each in parameters if each in cut)
    elif island.sharded > 1:
        seen: set[nn.Parameter] = set()
        blocks = [_bytes_in(block, seen) for block in blocks_of(model)]
        gathered = whole - sum(blocks) + 2 * max(blocks, default=0)
    own = item * Cut(island.size, shapes, dims).local_numbers
    return LearnerMemory(own, own, own * _vectors(job), gathered, _activations(job, model))


def _bytes_in(block: nn.Module, seen: set[nn.Parameter]) -> int:
    """Return the bytes of a block's parameters that were in no earlier block. An earlier block may be a part of this
    block."""
    own = [each for each in block.parameters() if each.requires_grad and each not in seen]
    seen.update(own)
    return sum(each.nbytes for each in own)


def _vectors(job: Job) -> int:
    """Return the number of values that the optimizer keeps for each weight."""
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.zeros(2)
    optimizer = job.make_optimizer([parameter])
    optimizer.step()
    state = optimizer.state[parameter].values()
    return sum(isinstance(each, Tensor) and each.shape == parameter.shape for each in state)


def _activations(job: Job, model: nn.Module) -> int:
    """Return the bytes of the tensors, other than parameters and buffers, that backward needs from a forward pass."""
    own = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
    most = 0
    for examples in job.workload.load(Ticket(0, 0, 0)):
        kept: dict[int, int] = {}

        def keep(tensor: Tensor, kept: dict[int, int] = kept) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.random.fork_rng(devices=[]), torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept):
            loss = job.workload.loss(model, examples)
        most = max(most, sum(kept.values()))
        del loss
    return most
