"""The settings of every run, for any workload: learners, strategy, budget, engine, checkpoints, and folder."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from starling.budget import Budget, Schedule
from starling.configuration import Config, ProblemsError, describe, digest, short_for
from starling.engines.virtual.cluster import Cluster
from starling.errors import ConfigError, did_you_mean
from starling.learner import Learner
from starling.strategies import Strategy, find_strategy
from starling.strategies.base import always
from starling.strategies.islands import NO_ISLANDS, Island, between_islands
from starling.training.faults import Fault, Join
from starling.training.speeds import BatchShares, Stragglers, shares_problem

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


KNOWN_TO_WORK = ("adam", "adamw", "sgd")
"""Optimizers that are known to work with their default options. A recipe that uses one of them can be checked without a
trial step, and therefore without importing torch."""


class OptimizerConfig(Config):
    """The optimizer of each learner, and its learning rate; the `optimizer:` section of a recipe."""

    name: str = "adamw"
    """A class of `torch.optim`, in upper or lower case. `muon` steps matrices with Muon and all other parameters with
    AdamW."""
    lr: float = Field(default=1e-3, ge=0.0)
    """The peak learning rate; the schedule multiplies it."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the class, such as momentum or weight_decay."""
    clip_norm: float | None = Field(default=5.0, gt=0.0)
    """Gradients with a larger 2-norm are scaled down to this norm; null: never."""
    schedule: Schedule = Field(default_factory=lambda: Schedule(warmup=0.05))
    """How the learning rate follows the budget."""

    @model_validator(mode="after")
    def _works(self) -> OptimizerConfig:
        """Make a trial step with the optimizer on a matrix and a vector. Raises ValueError with the reason if the step
        fails."""
        if not self.options and self.name.lower() in KNOWN_TO_WORK:
            return self
        import torch
        from torch import nn

        kind = self._kind()
        signature, title = inspect.signature, kind.__name__
        known = [name for name in signature(kind).parameters if name not in ("self", "params", "lr")]
        for option in self.options:
            if option not in known:
                hint = did_you_mean(option, known)
                raise ValueError(f"options: {title} has no {option!r}; {hint}known are {', '.join(known)}")
        if signature(kind.step).parameters["closure"].default is inspect.Parameter.empty:
            raise ValueError(
                f"{title} computes the loss several times per step, which is not supported; use another, such as adamw"
            )
        parameters = [nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        try:
            kind(parameters, lr=self.lr, **self.options).step()
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{title} cannot train with lr {self.lr} and options {self.options}: {error}") from None
        return self

    def maker(self) -> Callable[[list[nn.Parameter]], Optimizer]:
        """Return a function that makes a learner's optimizer with the peak learning rate.

        Unless the options select an implementation, the function selects torch's `fused` implementation if there is
        one, because it is several times faster on the CPU.
        """
        kind = self._kind()
        chosen = {"fused", "foreach", "differentiable"} & self.options.keys()
        fused = {} if chosen or "fused" not in inspect.signature(kind).parameters else {"fused": True}
        return partial(kind, lr=self.lr, **self.options, **fused)

    def _kind(self) -> Any:
        from torch import optim

        from starling.training.muon import Muon

        known = {
            name.lower(): kind
            for name, kind in vars(optim).items()
            if isinstance(kind, type) and issubclass(kind, optim.Optimizer) and kind is not optim.Optimizer
        } | {"muon": Muon}
        if self.name.lower() not in known:
            hint = did_you_mean(self.name.lower(), known)
            raise ValueError(f"name: {self.name!r} is not in torch.optim; {hint}known are {', '.join(known)}")
        return known[self.name.lower()]


AUTO = "auto"
Candidate = Literal["allreduce", "delay-by-one", "dpsgd", "adpsgd", "hadpsgd"]
CANDIDATES = get_args(Candidate)
"""Strategies from which `auto` can choose, the plainest first. `hogwild` requires that all learners are on one machine,
and `parameter-server` uses some learners as servers."""


class AutoOptions(Config):
    """The options of `strategy: auto`. Before the run, `auto` chooses a strategy by measuring, and the chosen strategy
    replaces `auto`."""

    among: tuple[Candidate, ...] = Field(default=CANDIDATES, min_length=1)
    """The strategies to choose from."""
    seconds: float = Field(default=60.0, gt=0.0, le=600.0)
    """The longest time that measuring should take. In a short run it takes less: about 3 % of the run."""


async def _unchosen(me: Learner, options: AutoOptions) -> None:
    """A short measurement before the run chooses a strategy and its options, and the run keeps that choice.

    Use when:
        You do not know how long gradients and exchanges take on these machines.
    """
    raise ConfigError(
        "strategy: auto is chosen by `starling train` and `starling simulate` before the learners start; name a "
        "strategy here"
    )


AUTO_STRATEGY = Strategy(
    AUTO,
    "measure the machines at hand, and choose one of the others",
    _unchosen,
    options=AutoOptions,
    averages_gradients=always,  # a weighting may have an effect, and limits the choice
    kind="chosen by measuring",
)
"""A placeholder for the strategy that `auto` will choose. It is used in checks that are made before the choice."""


Learners = Annotated[int, Field(ge=1, le=4096)]


class StrategyChoice(BaseModel):
    """A strategy by name, or a mapping with its `name` and options."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str

    _of_name = short_for("name")

    @property
    def strategy(self) -> Strategy:
        """The strategy with this name. The name may be that of a strategy in Starling or in an installed package,
        `module:name`, or `auto`, for which the result is the placeholder. Raises ConfigError if there is no such
        strategy."""
        return AUTO_STRATEGY if self.is_auto else find_strategy(self.name, also=[AUTO])

    @property
    def is_auto(self) -> bool:
        """Whether the strategy is still to be chosen."""
        return self.name == AUTO

    @property
    def options(self) -> Config:
        """The options of the strategy, as its own configuration model. Raises pydantic's ValidationError if they are
        wrong."""
        return self.strategy.options.model_validate(self.model_extra or {})

    @property
    def described(self) -> str:
        """The text that describes the strategy and all its options in a checkpoint."""
        return self.strategy.described(self.options)

    def check_for(self, learners: int, island: Island = NO_ISLANDS, batch_shares: BatchShares | None = None) -> None:
        """Raise ConfigError if the strategy's options do not fit this number of learners, these islands, or these batch
        shares."""
        if self.is_auto and island.size > 1:
            raise ConfigError(
                "strategy auto: it chooses among strategies without islands; name one, or leave out island"
            )
        if self.is_auto and batch_shares:
            raise ConfigError("batch_shares: strategy auto chooses for learners with equal shares; name a strategy")
        between_islands(self.strategy, island).validate(self.options, learners)
        if problem := shares_problem(batch_shares or {}, self.strategy, self.options, learners, island):
            raise ConfigError(problem)


DEFAULT_STRATEGY = StrategyChoice(name="allreduce")


class EngineConfig(Config):
    """How a learner computes, and how long it waits; the `engine:` section of a recipe."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The learner's device. auto: CUDA if available, else the CPU."""
    autocast: Literal["none", "bf16"] = "none"
    """The precision of losses. bf16: they are computed under `torch.autocast` in bfloat16."""
    threads: int | None = Field(default=None, ge=1)
    """Threads per learner; null: the number of cores divided by the number of learners on the machine, and 1 in a
    simulation."""
    reduce: Literal["fastest", "ordered"] = "fastest"
    """How gradients and weights are summed. fastest: between machines, gradients are summed while backward computes the
    others, in an order that the backend chooses. ordered: always in the order of ranks, so that the same order of
    events gives the same bits; see `starling replay`. Islands do not support it."""
    timeout_seconds: float = Field(default=600.0, gt=0.0)
    """The longest time that learners wait for each other. A learner that sends no heartbeat for that long is lost."""
    explain_seconds: float = Field(default=10.0, gt=0.0)
    """Waits are explained if they are longer than this, and more than ten times as long as usual."""


class CheckpointConfig(Config):
    """When a run saves checkpoints, and how many it keeps."""

    keep: int = Field(default=2, ge=1)
    """Number of checkpoints to keep. Older ones are removed, except the newest one that is intact and finite."""
    minutes: float | None = Field(default=5.0, gt=0.0)
    """Minutes of training between two checkpoints, also inside an epoch; null: no checkpoints by time. There is always
    one at the end of the run; a simulation saves only that one."""
    epochs: int | None = Field(default=None, ge=1)
    """Epochs between two checkpoints at the end of an epoch; null: no checkpoints by epoch."""
    every: int | None = Field(default=None, ge=1)
    """Mini-batches of all learners together between two checkpoints; null: no checkpoints by number."""


class LaunchConfig(Config):
    """Where the learners of `starling train` run; the `launch:` section of a recipe, or only its `kind`."""

    kind: Literal["local", "ray"] = "local"
    """The place of the learners. local: as processes of this machine; ray: on the nodes of a running Ray cluster."""
    address: str = "auto"
    """The Ray cluster, HOST:PORT; auto: the one to which this machine belongs, or that of RAY_ADDRESS."""
    learners_per_node: int | None = Field(default=None, ge=1)
    """Number of learners with successive numbers that Ray must place on one node; null: as many as a super-learner has.
    Groups of learners share a node if it has room for them."""
    resources: dict[str, Annotated[float, Field(gt=0.0)]] = Field(default_factory=dict)
    """Resources that Ray reserves for each learner, such as {CPU: 4, GPU: 1}. CPU is 1 unless given, and so is GPU if
    engine.device is cuda."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """The port at which the launcher serves figures of the run to Prometheus; 0: any free port; null: none. Needs the
    extra `monitoring`."""
    metrics_address: str = "127.0.0.1"
    """The address of the interface on which the launcher serves these figures; with 127.0.0.1, only to this machine."""
    opentelemetry: bool = False
    """Whether the launcher sends these figures to an OpenTelemetry collector, by OTLP/HTTP; the environment variables
    `OTEL_*` say to which. Needs the extra `opentelemetry`."""

    _of_kind = short_for("kind")


class RunConfig(Config):
    """The settings of a run on real processes that do not depend on its workload."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)
    """The experiment's folder inside `exp`."""
    seed: int = Field(default=1, ge=0)
    """The seed of everything random: first weights, the order of the data, augmentation, patterns."""
    learners: Learners = 1
    """How many learners train: processes, or coroutines of a simulation. Some may be servers."""
    island: Island = NO_ISLANDS
    """Learners that hold one model together, because it does not fit into the memory of one: in shards, {sharded: 2},
    or with its large layers cut, {tensor: 2}. The strategy then applies between islands."""
    batch_shares: dict[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=1)]] | Literal["auto"] = Field(
        default_factory=dict
    )
    """Number of mini-batches in each learner's gradient of a step, such as {0: 2}; it is 1 for learners that are not
    named. auto: as many as the learner's speed allows, as measured when the run begins. This option is for learners of
    unequal speed that step together."""
    strategy: StrategyChoice = Field(default=DEFAULT_STRATEGY, validate_default=True)
    """How learners agree: a strategy's name, or a mapping with its `name` and options."""
    budget: Budget
    """When the run ends: after so many epochs, steps or minutes, whichever comes first."""
    engine: EngineConfig = EngineConfig()
    """How a learner computes, and how long it waits."""
    launch: LaunchConfig = LaunchConfig()
    """Where the learners run: local (processes of this machine), ray, or a mapping with the `kind` and its options."""
    stragglers: Stragglers = Stragglers()
    """Learners to slow down on purpose, in training and in simulation."""
    faults: tuple[Fault, ...] = ()
    """Faults injected on purpose, for tests: {kill: 2, at_step: 40}, {pause: 1, seconds: 5}, {nan: 3, at_step: 10}.
    Steps are the learner's own mini-batches, from 1. {join: 2, at_seconds: 30}: a lost or a new learner joins.
    """
    on_loss: Literal["continue", "replace", "stop"] = "continue"
    """What happens when a learner that Starling's launcher started is lost. continue: the others continue without it;
    replace: it is also restarted and joins them; stop: the run ends with exit code 3."""
    checkpoints: CheckpointConfig = CheckpointConfig()
    """When the run saves checkpoints, and how many it keeps."""
    resume: Path | None = None
    """Resume from this experiment's newest checkpoint, or from this checkpoint."""
    follow: Path | None = None
    """Make the learners keep to the order of events that this experiment has recorded, so that the run ends with the
    same weights, bit for bit."""
    overwrite: bool = False
    """Remove an earlier run of the same name instead of moving it aside."""
    exp: Path = Path("exp")
    """The folder of all experiments."""

    @field_validator("batch_shares", "stragglers", "faults")
    @classmethod
    def _learners_exist(cls, value: Any, info: ValidationInfo) -> Any:
        last = info.data.get("learners", sys.maxsize) - 1
        if isinstance(value, Stragglers):
            named = {f"slow.{name}": name for name in value.slow}
            named |= {f"pauses.{place}.learner": pause.learner for place, pause in enumerate(value.pauses)}
        elif isinstance(value, tuple):
            named = {str(place): fault.learner for place, fault in enumerate(value) if not isinstance(fault, Join)}
        else:
            named = {} if value == "auto" else {str(name): name for name in value}
        if found := [
            f"{info.field_name}.{key}: there is no learner {name} among {last + 1}; the last is learner {last}"
            for key, name in named.items()
            if name > last
        ]:
            raise ProblemsError(*found)
        return value

    @field_validator("strategy")
    @classmethod
    def _strategy_fits(cls, choice: StrategyChoice, info: ValidationInfo) -> StrategyChoice:
        others = {key: info.data[key] for key in ("learners", "island", "batch_shares") if key in info.data}
        if found := strategy_problems(choice, **others):
            raise ProblemsError(*found)
        return choice

    @model_validator(mode="after")
    def _joins_are_possible(self) -> Self:
        if self.on_loss == "stop" and any(isinstance(fault, Join) for fault in self.faults):
            raise ValueError("faults: no learner can join a run with on_loss: stop; remove the join or on_loss")
        return self

    @model_validator(mode="after")
    def _super_learners_fit_nodes(self) -> Self:
        per_node = self.launch.learners_per_node
        if per_node is not None and not self.strategy.is_auto and per_node % self.super_learner_size:
            raise ValueError(
                f"launch.learners_per_node: {per_node} is not a multiple of {self.super_learner_size}, the size of a "
                "super-learner, whose learners share a node"
            )
        return self

    @property
    def folder(self) -> Path:
        """The experiment's folder."""
        return self.exp / self.name

    @property
    def between(self) -> Strategy:
        """The strategy, as applied between islands."""
        return between_islands(self.strategy.strategy, self.island)

    @property
    def num_workers(self) -> int:
        """The number of learners that compute gradients of their own mini-batches. A tensor island counts as one such
        learner."""
        return self.between.sync_groups(self.strategy.options, self.learners).num_workers // self.island.tensor

    @property
    def sync_group_size(self) -> int:
        """The number of learners that claim mini-batches together."""
        return self.between.sync_groups(self.strategy.options, self.learners).size

    @property
    def super_learner_size(self) -> int:
        """The number of learners in each super-learner, which step together. 1 if there are no super-learners."""
        size = self.sync_group_size
        return size if size < self.learners else self.island.size


class RecipeConfig(RunConfig):
    """The settings of a run that is described by a recipe. They do not depend on the recipe's task."""

    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer of each learner, and its learning rate."""
    cluster: Cluster = Cluster()
    """The cluster that `starling simulate` simulates."""


def strategy_problems(choice: StrategyChoice, learners: int | None = None, **others: Any) -> list[str]:
    """Return the problems of a strategy and its options. If `learners` is given, include the problems that `check_for`
    finds."""
    try:
        _ = choice.options  # raises if they are wrong
        if learners is not None:
            choice.check_for(learners, **others)
    except ConfigError as error:
        return [str(error)]
    except ValidationError as error:
        return describe(error, choice.strategy.options, choice.model_extra, prefix="strategy.")
    return []


def dump_recipe(recipe: RunConfig) -> str:
    """Return the resolved tree of a recipe as YAML. Loading the YAML gives the same recipe."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def recipe_digest(recipe: RunConfig) -> str:
    """Return the SHA-256 digest of the resolved tree without the key `overwrite`. Learners compare their digests."""
    return digest(recipe.model_dump(mode="json", exclude={"overwrite"}))
