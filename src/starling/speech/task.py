"""Speech recognition as a task of recipes, through the interface that any package can use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from starling.errors import require
from starling.experiment.folder import ExperimentFolder, best_model
from starling.experiment.task import MiniBatches, Scoring, Task
from starling.recipe import Tree
from starling.speech.recipe import Recipe, changed_keys, check_recipe, check_resolved, fingerprints

if TYPE_CHECKING:
    from rich.console import Console

    from starling.checkpoint.writer import WriteModel
    from starling.comparing.subject import Subject
    from starling.reporting.epochs import Score
    from starling.reporting.evidence import ScoredSet
    from starling.reporting.progress import Bars, Say
    from starling.speech.training.plan import RecipePlan
    from starling.training.job import Job


class Speech(Task[Recipe]):
    """Recipes that train speech recognisers. Modules that need an extra are imported on demand."""

    preload = (*Task.preload, "starling.speech.training.set_up", "lhotse.dataset", "torch.utils.tensorboard")

    def require(self, command: str) -> None:
        require("speech", command)

    def check(self, tree: Tree, where: str) -> Recipe:
        return check_recipe(tree, where)

    def check_resolved(self, tree: Tree, where: str) -> Recipe:
        return check_resolved(tree, where)

    def make_job(self, recipe: Recipe, folder: ExperimentFolder, learners_here: int | None = None) -> Job:
        from starling.speech.training.set_up import make_job

        return make_job(recipe, folder, learners_here)

    def model_writer(self, recipe: Recipe, folder: ExperimentFolder) -> WriteModel:
        from starling.speech.training.set_up import ModelWriter

        return ModelWriter(folder.initial, recipe.freeze)

    def fingerprints(self, recipe: Recipe) -> dict[str, str]:
        return fingerprints(recipe)

    def changes(self, recipe: Recipe, checkpoint: Path, sections: Sequence[str]) -> str:
        return changed_keys(checkpoint, recipe, sections)

    def set_up(self, recipe: Recipe, folder: ExperimentFolder, say: Say, bars: Bars | None = None) -> None:
        from starling.speech.training.set_up import set_up

        set_up(recipe, folder, say, bars)

    def max_skipped(self, recipe: Recipe, job: Job) -> int:
        plan: RecipePlan = cast(Any, job.workload).plan
        return recipe.data.filter.skippable(len(plan.utterances))

    def validate_every(self, recipe: Recipe) -> int | None:
        return recipe.validate_every if recipe.data.valid is not None else None

    def scoring(
        self, recipe: Recipe, folder: ExperimentFolder, say: Say, on_score: Callable[[Score], None]
    ) -> AbstractContextManager[Scoring]:
        from starling.speech.training.validate import Validation

        return Validation(recipe, folder, say, on_score)

    def score(
        self, recipe: Recipe, folder: ExperimentFolder, tell: Say, console: Console, may_be_best: bool = False
    ) -> str | None:
        from starling.speech.commands.evaluate import evaluate
        from starling.speech.training.validate import verdict_on_test

        is_best = may_be_best and recipe.patience is not None and best_model(folder) is not None
        return verdict_on_test(recipe, folder, evaluate(folder.path, None, tell, console, is_best))

    def scored_set(self, folder: ExperimentFolder, file: Path) -> tuple[ScoredSet, str]:
        from starling.speech.commands.score import scored_set

        return scored_set(folder, file)

    def mini_batches(self, recipe: Recipe, folder: ExperimentFolder) -> MiniBatches:
        from starling.speech.training.plan import load_plan

        return load_plan(recipe, folder)

    def comparison(self, tree: Tree, where: str) -> Subject:
        from starling.speech.comparison import check_comparison

        return check_comparison(tree, where)


SPEECH = Speech()
