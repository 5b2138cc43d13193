"""The `study:` section of a recipe, checked with all its cells: the runs of the grid, each with a recipe and a name."""

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, field_validator, model_validator

from starling.configuration import Config, digest
from starling.errors import ConfigError, did_you_mean
from starling.runs.recipe.file import Tree, read_recipe
from starling.runs.recipe.overrides import apply_overrides
from starling.runs.recipe.problems import describe
from starling.runs.recipe.recipe import Recipe, check_recipe
from starling.runs.study.arms import ARMS
from starling.speech.models import ModelConfig

Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._]*$", max_length=40)]
"""A name that becomes part of a file's name, in which a hyphen separates labels."""


_NO_RESULT_DEPENDS_ON = {"name", "exp", "overwrite", "resume", "checkpoints", "validate_every"}


class Cell(Config):
    """One run of a study."""

    model: str
    optimizer: str
    warmup: float
    arm: str
    workers: int | None
    """None where the arm does not depend on their number."""
    seed: int

    @property
    def name(self) -> str:
        """The name of its file."""
        workers = "" if self.workers is None else f"-{self.workers}"
        return f"{self.model}-{self.optimizer}-warmup{self.warmup:g}-{self.arm}{workers}-seed{self.seed}"

    @property
    def num_together(self) -> int:
        """How many mini-batches make one optimizer step."""
        return self.workers or 1 if self.arm in ("batch", "summed") else 1


class StudiedOptimizer(Config):
    """An optimizer, with a learning rate of its own for each model."""

    name: str
    """A class of `torch.optim`."""
    lr: float | dict[str, float]
    """The peak learning rate; one number, or one for each model."""
    options: dict[str, Any] = Field(default_factory=dict)

    def rate(self, model: str) -> float:
        """The peak learning rate for a model."""
        return self.lr[model] if isinstance(self.lr, dict) else self.lr


class StudyConfig(Config):
    """The grid: every model with every optimizer, warm-up, arm, number of workers and seed."""

    models: dict[Label, ModelConfig] = Field(min_length=1)
    optimizers: dict[Label, StudiedOptimizer] = Field(min_length=1)
    warmups: tuple[Annotated[float, Field(ge=0.0, lt=1.0)], ...] = Field(default=(0.0, 0.1), min_length=1)
    """Shares of the budget over which the learning rate rises."""
    workers: tuple[Annotated[int, Field(ge=2, le=4096)], ...] = Field(default=(4, 16), min_length=1)
    """Numbers N of workers."""
    arms: tuple[str, ...] = Field(default=tuple(ARMS), min_length=1)
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field(default=(1, 2, 3), min_length=1)
    """Of the first weights, the order of the data and the times of the cluster."""
    fewer_seeds: dict[int | str, Annotated[int, Field(ge=1)]] = Field(default_factory=dict)
    """How many of the seeds a number of workers, an optimizer, a model or an arm gets, where not all of them."""
    jobs: int = Field(default=1, ge=1, le=256)
    """Processes that compute cells side by side; the results do not depend on it."""

    @field_validator("arms")
    @classmethod
    def _arms_are_known(cls, arms: tuple[str, ...]) -> tuple[str, ...]:
        unknown = [arm for arm in arms if arm not in ARMS]
        if unknown:
            hint = did_you_mean(unknown[0], ARMS)
            raise ValueError(f"{', '.join(map(repr, unknown))} unknown; {hint}known are {', '.join(ARMS)}")
        return arms

    @field_validator("warmups", "workers", "arms", "seeds")
    @classmethod
    def _each_once(cls, values: tuple[Any, ...]) -> tuple[Any, ...]:
        twice = sorted({str(value) for value in values if values.count(value) > 1})
        if twice:
            raise ValueError(f"{', '.join(twice)} given twice; list each once")
        return values

    @model_validator(mode="after")
    def _every_model_has_a_rate(self) -> "StudyConfig":
        for label, optimizer in self.optimizers.items():
            if isinstance(optimizer.lr, Mapping) and optimizer.lr.keys() != self.models.keys():
                raise ValueError(
                    f"optimizers.{label}.lr must give one learning rate for each of {', '.join(self.models)}; "
                    f"it has {', '.join(optimizer.lr) or 'none'}"
                )
        return self

    @model_validator(mode="after")
    def _fewer_seeds_are_of_something(self) -> "StudyConfig":
        known = [*self.models, *self.optimizers, *ARMS]
        unknown = [key for key in self.fewer_seeds if isinstance(key, str) and key not in known]
        if unknown:
            raise ValueError(
                f"fewer_seeds: nothing is called {', '.join(unknown)}; it may name a number of workers, "
                f"{', '.join(known)}"
            )
        return self

    def seeds_of(self, model: str, optimizer: str, arm: str, workers: int | None) -> tuple[int, ...]:
        """The seeds of such cells: the first of all, as many as the scarcest of their labels allows."""
        allowed = [self.fewer_seeds.get(label, len(self.seeds)) for label in (model, optimizer, arm, workers) if label]
        return self.seeds[: min(allowed)]

    def cells(self) -> list[Cell]:
        """Every cell once. Cells that load the same mini-batches are neighbours, and seeds follow each other."""
        found = [
            Cell(model=model, optimizer=optimizer, warmup=warmup, arm=arm, workers=workers, seed=seed)
            for arm in self.arms
            for workers in (self.workers if ARMS[arm].depends else (None,))
            for model, optimizer, warmup in product(self.models, self.optimizers, self.warmups)
            for seed in self.seeds_of(model, optimizer, arm, workers)
        ]
        planned_for = {cell: cell.num_together if cell.arm == "batch" else 1 for cell in found}
        return sorted(found, key=lambda cell: (self.seeds.index(cell.seed), planned_for[cell]))


class Study(Config):
    """A study that is ready to be expanded: the grid, the recipe that every cell builds on, and its name."""

    grid: StudyConfig
    base: Recipe
    """As it would run without the study; cells put their own model, optimizer, strategy, learners and seed in."""

    @property
    def folder(self) -> Path:
        """Where everything of the study is."""
        return self.base.folder

    def recipe_of(self, cell: Cell) -> Recipe:
        """The complete recipe of a cell."""
        tree = self.base.model_dump(mode="json")
        arm, workers = ARMS[cell.arm], cell.workers or 1
        own = {
            "seed": cell.seed,
            "learners": workers if arm.many else 1,
            "strategy": arm.choice(workers),
            "model": self.grid.models[cell.model].model_dump(mode="json"),
            "optimizer": optimizer_section(tree, self.grid.optimizers[cell.optimizer], cell.model, cell.warmup),
        }
        return check_recipe(tree | own, f"of {cell.name}")


def result_digest(recipe: Recipe) -> str:
    """Digest of all that a cell's result depends on: a result with another digest is computed again."""
    return digest(recipe.model_dump(mode="json", exclude=_NO_RESULT_DEPENDS_ON))


def load_study(path: Path, overrides: Sequence[str] = ()) -> Study:
    """The study in a recipe file with `key=value` overrides. Raises one ConfigError that lists all problems."""
    return check_study(apply_overrides(read_recipe(path), overrides), str(path))


def check_study(tree: Tree, where: str) -> Study:
    """The study of a tree; `where` names it in the ConfigError that lists all problems."""
    tree = dict(tree)
    section = tree.pop("study", None)
    problems, grid = _grid(section)
    try:
        base = check_recipe(tree, where)
        problems += [] if base.data.test else ["data.test: a study needs a test set, and this recipe names none"]
    except ConfigError as error:
        problems += [line.strip() for line in str(error).splitlines()[1:]]
    if grid is not None and not problems:
        problems += _cell_problems(grid, tree, where)
    if problems or grid is None:
        count = f"{len(problems)} problems" if len(problems) > 1 else "a problem"
        raise ConfigError(f"study {where}: {count}\n" + "\n".join(f"  {problem}" for problem in problems))
    return Study(grid=grid, base=base)


def _grid(section: Any) -> tuple[list[str], StudyConfig | None]:
    if section is None:
        return ["study: missing; a study's recipe must say what to vary, as the recipe `staleness` does"], None
    try:
        return [], StudyConfig.model_validate(section)
    except ValidationError as error:
        return describe(error, StudyConfig, section, prefix="study."), None


def _cell_problems(grid: StudyConfig, tree: Tree, where: str) -> list[str]:
    """What is wrong with single cells: optimizers that cannot train, models that are none."""
    problems: list[str] = []
    for label, optimizer in grid.optimizers.items():
        for model in grid.models:
            try:
                check_recipe(tree | {"optimizer": optimizer_section(tree, optimizer, model, 0.0)}, where)
            except ConfigError as error:
                lines = (line.strip() for line in str(error).splitlines()[1:])
                problems += [f"study.optimizers.{label}: {line}" for line in lines]
                break  # the other models would say the same
    return problems


def optimizer_section(tree: Tree, optimizer: StudiedOptimizer, model: str, warmup: float) -> Tree:
    """The `optimizer:` section of a cell: that of the base, with the cell's own choices put in."""
    below = tree.get("optimizer") or {}
    schedule = (below.get("schedule") or {}) | {"warmup": warmup}
    own = {"name": optimizer.name, "lr": optimizer.rate(model), "options": optimizer.options, "schedule": schedule}
    return {**below, **own}
