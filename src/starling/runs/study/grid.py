"""The cells of a study: which runs there are, each with a recipe and a name of its own."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from starling.runs.recipe.recipe import Recipe, check_recipe
from starling.runs.study.arms import ARMS
from starling.runs.study.config import Study, StudyConfig, optimizer_section

_NO_RESULT_DEPENDS_ON = {"name", "exp", "overwrite", "resume", "checkpoints", "validate_every"}


@dataclass(frozen=True, order=True)
class Setting:
    """What the arms of a study are compared under."""

    model: str
    optimizer: str
    warmup: float

    def __str__(self) -> str:
        return f"{self.model}-{self.optimizer}-warmup{self.warmup:g}"


@dataclass(frozen=True)
class Cell:
    """One run of a study."""

    setting: Setting
    arm: str
    workers: int | None
    """None where the arm does not depend on their number."""
    seed: int

    @property
    def name(self) -> str:
        """As its file is called."""
        workers = "" if self.workers is None else f"-{self.workers}"
        return f"{self.setting}-{self.arm}{workers}-seed{self.seed}"


def cells(grid: StudyConfig) -> list[Cell]:
    """Every cell once; those that load the same mini-batches stand together, and seeds one after the other."""
    found = [
        Cell(Setting(model, optimizer, warmup), arm, workers, seed)
        for arm, workers in _arms(grid)
        for model, optimizer, warmup in product(grid.models, grid.optimizers, grid.warmups)
        for seed in grid.seeds_of(model, optimizer, arm, workers)
    ]
    return sorted(found, key=lambda cell: (grid.seeds.index(cell.seed), _team_size(cell)))


def recipe_of(study: Study, cell: Cell) -> Recipe:
    """The complete recipe of a cell."""
    tree = study.base.model_dump(mode="json")
    arm, workers = ARMS[cell.arm], cell.workers or 1
    model = study.grid.models[cell.setting.model]
    optimizer = study.grid.optimizers[cell.setting.optimizer]
    own = {
        "seed": cell.seed,
        "learners": arm.learners(workers),
        "strategy": arm.choice(workers),
        "model": model.model_dump(mode="json"),
        "optimizer": optimizer_section(tree, optimizer, cell.setting.model, cell.setting.warmup),
    }
    return check_recipe(tree | own, f"of {cell.name}")


def digest(recipe: Recipe) -> str:
    """SHA-256 of all in a cell's recipe that its result depends on: a result of another digest is computed anew."""
    content = recipe.model_dump(mode="json", exclude=_NO_RESULT_DEPENDS_ON)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _arms(grid: StudyConfig) -> Iterator[tuple[str, int | None]]:
    for arm in grid.arms:
        if ARMS[arm].depends:
            yield from ((arm, workers) for workers in grid.workers)
        else:
            yield arm, None


def _team_size(cell: Cell) -> int:
    """How many claim together: batches are planned for so many."""
    return cell.workers or 1 if cell.arm == "batch" else 1
