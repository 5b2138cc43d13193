"""The costs of a job on some machines, on which predictions rest: from a profile, from the data sheets of a preset, or
measured by the learners of a run.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, PlainSerializer

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
PRESETS = Path(__file__).parent / "presets"
Rounded = Annotated[Seconds, PlainSerializer(lambda seconds: round(seconds, 6))]
"""Seconds that are shown in microseconds."""


class JobFacts(Config):
    """What a plan needs to know of a job."""

    trains: str
    """What it trains, for people."""
    model_bytes: int = Field(ge=1)
    """The size of the weights that learners exchange."""
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
    """The link between two devices of a node."""
    uplink: LinkModel
    """The link of a node to others, shared by its devices."""
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


class MeasuredRun(Config):
    """What the learners of a run measured together: by learner, or their mean."""

    gradient_seconds: tuple[Rounded, ...]
    """Without averaging."""
    gradients_measured: tuple[int, ...]
    step_seconds: Rounded
    """The rest of a step."""
    mean_seconds: Rounded
    """A mean of the model."""
    mean_of_gradients_seconds: Rounded
    """What the mean of all gradients takes beyond the slowest of them."""
    exchange_seconds: dict[str, Rounded]
    """By pattern: a round of averaging while all learners compute gradients."""
    lost_to_exchanges: tuple[Annotated[float, PlainSerializer(lambda share: round(share, 3))], ...]
    """The share of its time that a learner loses while a round is under way."""
    model_bytes: int


class Costs(Config):
    """What simulations of a job need to know."""

    job: JobFacts
    compute: ComputeModel
    uncertainty: tuple[float, float] = (1.0, 1.0)
    """The 95 % interval of the mean gradient time, as factors of it."""
    messages: LinkModel
    """The link between learners on different nodes, or a node's uplink where several learners share a node."""
    means: LinkModel
    gradient_means: LinkModel | None = None
    """The link for means of gradients; None: that of other means."""
    inside: LinkModel | None = None
    """The link between learners of one node; None: it is like that between nodes."""
    devices_per_node: int = 1
    measured: MeasuredRun | None = None
    """What the learners of a run measured together. It holds for as many learners, and predictions use it in place of
    the links for messages. Waiting for a node's link is in it, because all learners sent at once."""
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


def with_step(gradient: ComputeModel, seconds: Seconds) -> ComputeModel:
    """What a gradient takes with the rest of its step, which does not vary."""
    total = gradient.seconds + seconds
    return gradient.model_copy(update={"seconds": total, "spread": gradient.spread * gradient.seconds / total})
