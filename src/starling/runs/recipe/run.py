"""What every run has, whatever it trains: learners, strategy, budget, engine, checkpoints, and a folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from starling.budget import Budget
from starling.configuration import Config
from starling.errors import ConfigError
from starling.runs.recipe.file import Tree
from starling.runs.recipe.problems import describe
from starling.strategies import Strategy, find_strategy
from starling.training.faults import Fault, Join
from starling.training.faults import problems as faults_problems
from starling.training.stragglers import Stragglers

Learners = Annotated[int, Field(ge=1, le=4096)]


class StrategyChoice(BaseModel):
    """A strategy by name, or a mapping with its `name` and options."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str

    @model_validator(mode="before")
    @classmethod
    def _of_name(cls, value: object) -> object:
        return {"name": value} if isinstance(value, str) else value

    @property
    def strategy(self) -> Strategy:
        """What the name stands for: a strategy of Starling or of an installed package, or `module:name`; ConfigError if
        nothing."""
        return find_strategy(self.name)

    @property
    def options(self) -> Config:
        """The options, checked by the strategy's own model; pydantic's ValidationError if they are wrong."""
        return self.strategy.options.model_validate(self.model_extra or {})

    def check_for(self, learners: int) -> None:
        """Raise ConfigError if the strategy's options do not fit this number of learners."""
        self.strategy.validate(self.options, learners)

    def num_workers(self, learners: int) -> int:
        """How many of them compute."""
        return self.strategy.num_workers(self.options, learners)

    def sync_group_size(self, learners: int) -> int:
        """How many of them claim mini-batches together."""
        return self.strategy.sync_group_size(self.options, learners)


DEFAULT_STRATEGY = StrategyChoice(name="allreduce")


class EngineConfig(Config):
    """How a learner computes; the `engine:` section of a recipe."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where there is one."""
    autocast: Literal["none", "bf16"] = "none"
    """Compute losses in bfloat16 where torch considers it safe."""
    threads: int | None = Field(default=None, ge=1)
    """Threads of one learner; null: the cores of the machine divided by the learners on it, and 1 on the virtual
    engine."""
    timeout_seconds: float = Field(default=600.0, gt=0.0)
    """How long learners wait for each other, and how long one may send no heartbeat, before it counts as lost."""
    explain_seconds: float = Field(default=10.0, gt=0.0)
    """Longer waits are explained, if they also take ten times as long as usual: which learner waits for which, why."""


class CheckpointConfig(Config):
    """The `checkpoints:` section of a recipe."""

    keep: int = Field(default=2, ge=1)
    """How many checkpoints stay; older ones are removed, but for the newest that is whole and finite."""
    minutes: float | None = Field(default=5.0, gt=0.0)
    """Minutes of training between two checkpoints, wherever in an epoch that is; null: none by time. There is always
    one at the end of the run. Simulations save in the end only."""
    epochs: int | None = Field(default=None, ge=1)
    """Epochs between two checkpoints at the ends of epochs; null: none there."""
    every: int | None = Field(default=None, ge=1)
    """Mini-batches of all learners together between two checkpoints inside an epoch; null: none by number."""


class RunConfig(Config):
    """The settings of a run on real processes that do not depend on what it trains."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)
    """The experiment's folder inside `exp`."""
    seed: int = Field(default=1, ge=0)
    learners: Learners = 1
    strategy: StrategyChoice = DEFAULT_STRATEGY
    budget: Budget
    engine: EngineConfig = EngineConfig()
    stragglers: Stragglers = Stragglers()
    """Slowness on purpose, in training and in simulation."""
    faults: tuple[Fault, ...] = ()
    """Faults on purpose, for tests: {kill: 2, at_step: 40}, {pause: 1, seconds: 5}, {nan: 3, at_step: 10}. Steps are
    the learner's own mini-batches, from 1. {join: 2, at_seconds: 30}: a learner comes, one that was lost or a new one.
    """
    on_loss: Literal["continue", "replace", "stop"] = "continue"
    """What happens when a learner that our launcher started is killed. continue: the others continue without it;
    replace: it is also restarted and joins them; stop: the run ends with exit code 3."""
    checkpoints: CheckpointConfig = CheckpointConfig()
    resume: Path | None = None
    """An experiment (its newest checkpoint) or one checkpoint to continue from."""
    overwrite: bool = False
    """Remove an earlier run of the same name, rather than moving it aside."""
    exp: Path = Path("exp")
    """Where experiments are."""

    @model_validator(mode="after")
    def _joins_are_possible(self) -> Self:
        if self.on_loss == "stop" and any(isinstance(fault, Join) for fault in self.faults):
            raise ValueError("faults: no learner can join a run that ends with the first loss; leave out on_loss: stop")
        return self

    @property
    def folder(self) -> Path:
        """The folder of this experiment."""
        return self.exp / self.name

    @property
    def num_workers(self) -> int:
        """How many learners compute gradients."""
        return self.strategy.num_workers(self.learners)

    @property
    def sync_group_size(self) -> int:
        """How many learners claim mini-batches together."""
        return self.strategy.sync_group_size(self.learners)


RunT = TypeVar("RunT", bound=RunConfig)


def check_run(kind: type[RunT], tree: Tree, where: str, problems: Sequence[str] = ()) -> RunT:
    """The settings in a tree; raises one ConfigError, which begins with `where`, with all problems that it has.

    `problems` are those that were found already.
    """
    learners = _learners(tree)
    found = strategy_problems(tree.get("strategy"), learners)
    found += problems
    found += _straggler_problems(tree.get("stragglers"), learners)
    found += _fault_problems(tree.get("faults"), learners)
    try:
        run = kind.model_validate(tree)
    except ValidationError as error:
        found = describe(error, kind, tree) + found
    if found:
        count = f"{len(found)} problems" if len(found) > 1 else "a problem"
        raise ConfigError(f"{where}: {count}\n" + "\n".join(f"  {problem}" for problem in found))
    return run


def _learners(tree: Tree) -> int | None:
    """How many learners a tree says, if that is a possible number: the tree's own check says so otherwise."""
    try:
        return TypeAdapter[int](Learners).validate_python(tree.get("learners", 1))
    except ValidationError:
        return None


def _straggler_problems(section: Any, learners: int | None) -> list[str]:
    """Entries for learners that are not there."""
    try:
        stragglers = Stragglers.model_validate(section) if section is not None else Stragglers()
    except ValidationError:
        return []  # the tree's own check says so
    return [] if learners is None else list(stragglers.problems(learners))


def _fault_problems(section: Any, learners: int | None) -> list[str]:
    """Faults of learners that are not there."""
    try:
        faults = TypeAdapter[tuple[Fault, ...]](tuple[Fault, ...]).validate_python(section or ())
    except ValidationError:
        return []  # the tree's own check says so
    return [] if learners is None else list(faults_problems(faults, learners))


def strategy_problems(choice: Any, learners: int | None) -> list[str]:
    """What is wrong with a `strategy:` section for so many learners."""
    choice = {"name": choice} if isinstance(choice, str) else choice
    try:
        strategy = StrategyChoice.model_validate(choice) if choice is not None else None
        if strategy is not None:
            _ = strategy.options  # raises what is wrong with them
            if learners is not None:
                strategy.check_for(learners)
    except ConfigError as error:
        return [str(error)]
    except ValidationError as error:
        if not isinstance(choice, dict) or "name" not in choice:
            return []  # the tree's own check says so
        options = {key: value for key, value in choice.items() if key != "name"}
        return describe(error, find_strategy(choice["name"]).options, options, prefix="strategy.")
    return []
