"""The recipe: everything that a run depends on, as one checked tree."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from starling.budget import Budget
from starling.configuration import Config, digest
from starling.engines.virtual.cluster import Cluster
from starling.errors import ConfigError
from starling.runs.recipe.file import Tree, read_recipe
from starling.runs.recipe.optimizer import OptimizerConfig
from starling.runs.recipe.overrides import apply_overrides
from starling.runs.recipe.problems import describe
from starling.speech.augmentation import AugmentConfig
from starling.speech.data import DataConfig, set_digest, set_settings
from starling.speech.features import FeatureConfig
from starling.speech.mixture import MixtureConfig
from starling.speech.models import ModelConfig
from starling.speech.partition import PartitionConfig, labels_are_domains
from starling.speech.planning import BatchConfig
from starling.speech.set_summary import read_summary
from starling.speech.tokens import TokenConfig
from starling.strategies import Strategy, find_strategy
from starling.training.faults import Fault, Join
from starling.training.faults import problems as faults_problems
from starling.training.stragglers import Stragglers

FORMAT = 2
"""That of Starling 0.2, which later versions read. Every recipe in an experiment's folder says it."""
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
    """How long learners wait for each other before they call one lost, and for how long one may stand still."""
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


class Recipe(Config):
    """A complete run."""

    format: int = FORMAT
    """Of this tree of keys; a recipe written by hand may leave it out."""
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)
    """The experiment's folder inside `exp`."""
    seed: int = Field(default=1, ge=0)
    learners: Learners = 1
    strategy: StrategyChoice = DEFAULT_STRATEGY
    budget: Budget
    data: DataConfig
    mixture: MixtureConfig | None = None
    """Several domains to train on instead of `data.train`, and how much of each."""
    partition: PartitionConfig = "identical"
    """Which utterances a learner may see. identical: all, each exactly once an epoch. Otherwise (for studies) each
    learner draws at random from a part of its own, of whole speakers or domains, or divided by Dirichlet."""
    tokens: TokenConfig = TokenConfig()
    features: FeatureConfig = FeatureConfig()
    augment: AugmentConfig = AugmentConfig()
    batches: BatchConfig = BatchConfig()
    model: ModelConfig = ModelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    engine: EngineConfig = EngineConfig()
    cluster: Cluster = Cluster()
    """The cluster that `starling simulate` pretends to have."""
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
    validate_every: int | None = Field(default=1, ge=1)
    """Epochs between two scorings of the valid set while training; null: never. An epoch is left out where scoring
    would take more than a twentieth of the time."""
    resume: Path | None = None
    """An experiment (its newest checkpoint) or one checkpoint to continue from."""
    warm_start: Path | None = None
    """An experiment, for its newest model, or a recogniser's folder: training begins with these weights. Only the
    output layer may differ."""
    overwrite: bool = False
    """Remove an earlier run of the same name, rather than moving it aside."""
    exp: Path = Path("exp")
    """Where experiments are."""

    @model_validator(mode="after")
    def _mixed_sets_exist(self) -> Self:
        known = self.data.corpus.sets
        for name in self.mixture.sets if self.mixture is not None else ():
            if name not in known and not Path(name).is_dir():
                raise ValueError(
                    f"mixture: {name!r} is neither a set of data.corpus ({', '.join(known)}) nor a folder; prepare it "
                    "first with a recipe of its own"
                )
        return self

    @model_validator(mode="after")
    def _joins_are_possible(self) -> Self:
        if self.on_loss == "stop" and any(isinstance(fault, Join) for fault in self.faults):
            raise ValueError("faults: no learner can join a run that ends with the first loss; leave out on_loss: stop")
        return self

    @model_validator(mode="after")
    def _partition_fits(self) -> Self:
        if self.mixture is None:
            if labels_are_domains(self.partition):
                raise ValueError("partition: domains are divided, but there is no mixture; name the domains there")
        elif self.partition != "identical" and (self.mixture.by == "hand" or self.mixture.temperature != 1.0):
            raise ValueError(
                "partition: learners draw from all that is in their parts, whatever the mixture's shares; "
                "leave out mixture.temperature and by: hand, or the partition"
            )
        return self

    @property
    def folder(self) -> Path:
        """The folder of this experiment."""
        return self.exp / self.name

    def set_folder(self, name: str) -> Path:
        """Where a set of the corpus, or of a mixture, is or will be prepared."""
        return self.data.set_folder(name) if name in self.data.corpus.sets else Path(name)

    @property
    def num_workers(self) -> int:
        """How many learners compute gradients."""
        return self.strategy.num_workers(self.learners)

    @property
    def sync_group_size(self) -> int:
        """How many learners claim mini-batches together."""
        return self.strategy.sync_group_size(self.learners)


def load_recipe(path: Path, overrides: Sequence[str] = (), learners: int | None = None) -> Recipe:
    """The recipe in a file, with `key=value` overrides; for another number of learners if that is given.

    Raises one ConfigError that lists all problems.
    """
    tree = apply_overrides(read_recipe(path), overrides)
    return check_recipe(tree if learners is None else tree | {"learners": learners}, str(path))


def check_recipe(tree: Tree, where: str) -> Recipe:
    """The recipe of a tree; `where` names it in the ConfigError that lists all problems."""
    if (found := tree.get("format", FORMAT)) != FORMAT:
        raise ConfigError(
            f"recipe {where}: format {found!r}, this version reads format {FORMAT}; write its keys into a new recipe "
            "without `format` (`starling recipes copy` gives one to begin with), or use the version that wrote it"
        )
    learners = _learners(tree)
    problems = _strategy_problems(tree.get("strategy"), learners)
    problems += _weighting_problems(tree.get("batches"), tree.get("strategy"))
    problems += _straggler_problems(tree.get("stragglers"), learners)
    problems += _fault_problems(tree.get("faults"), learners)
    try:
        recipe = Recipe.model_validate(tree)
    except ValidationError as error:
        problems = describe(error, Recipe, tree) + problems
    if problems:
        count = f"{len(problems)} problems" if len(problems) > 1 else "a problem"
        raise ConfigError(f"recipe {where}: {count}\n" + "\n".join(f"  {problem}" for problem in problems))
    return recipe


def load_resolved(path: Path) -> Recipe:
    """The recipe in an experiment's folder. Raises ConfigError, also for one that was written before Starling 0.2."""
    tree = read_recipe(path)
    if "format" not in tree:
        raise ConfigError(
            f"{path}: written before Starling 0.2, and not read by this version; train the experiment again, or use "
            "the version that its env.txt names"
        )
    return check_recipe(tree, str(path))


def dump_recipe(recipe: Recipe) -> str:
    """The resolved tree as YAML; loading it gives the same recipe."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def recipe_digest(recipe: Recipe) -> str:
    """SHA-256 of the resolved tree, for learners to compare."""
    return digest(recipe.model_dump(mode="json", exclude={"overwrite"}))


def fingerprints(recipe: Recipe) -> dict[str, str]:
    """Digests of `fixed_settings`. DataError for a folder of a mixture that is not prepared."""
    return {section: digest(content) for section, content in fixed_settings(recipe).items()}


def fixed_settings(recipe: Recipe) -> dict[str, Any]:
    """What a resumed run may not change, by section: the model, and what each mini-batch holds. DataError as above."""
    fixed = recipe.model_dump(
        mode="json",
        include={
            "seed": True,
            "tokens": True,
            "features": True,
            "mixture": True,
            "partition": True,
            "batches": {"max_duration", "accumulate", "num_buckets", "window", "similar"},
            "model": True,
            "optimizer": {"name", "options"},
        },
    )
    if recipe.partition != "identical":
        fixed["partition"] = [fixed["partition"], recipe.num_workers]
    return fixed | {"data": _data_settings(recipe)}


def _data_settings(recipe: Recipe) -> Any:
    """What the set that is trained on is made from; of a mixture, the digests of its sets."""
    if recipe.mixture is None:
        return set_settings(recipe.data, recipe.data.train)
    corpus = recipe.data.corpus.sets
    return [
        set_digest(recipe.data, name) if name in corpus else read_summary(Path(name)).digest
        for name in recipe.mixture.sets
    ]


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


def _strategy_problems(choice: Any, learners: int | None) -> list[str]:
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


def _weighting_problems(section: Any, choice: Any) -> list[str]:
    """A weighting that the strategy cannot use."""
    try:
        batches = BatchConfig.model_validate(section) if section is not None else BatchConfig()
        strategy = StrategyChoice.model_validate(choice) if choice is not None else DEFAULT_STRATEGY
        problem = strategy.strategy.weighting_problem(strategy.options, batches.weighting)
    except (ConfigError, ValidationError):
        return []  # the other checks say so
    return [] if problem is None else [f"batches.weighting: {problem}"]
