"""The interface by which a package defines what its recipes train: their own keys, their data, the job, and how it is
scored.

A recipe names its task with the key `task`: the entry point of an installed package in the group `starling.tasks`, or
`module:name`. Without the key, the task is `speech`, which uses the same interface.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from starling.configuration import checked, digest
from starling.errors import ConfigError
from starling.experiment.folder import ExperimentFolder
from starling.recipe import Tree, apply_overrides, read_recipe
from starling.recipe.run import RecipeConfig, RunConfig
from starling.registry import Registry
from starling.workload import Ticket, Workload

if TYPE_CHECKING:
    from rich.console import Console
    from torch import nn

    from starling.checkpoint.writer import WriteModel
    from starling.launch.messages import LearnerMessage
    from starling.reporting.epochs import Score
    from starling.reporting.evidence import ScoredSet
    from starling.reporting.progress import Bars, Say
    from starling.training.job import Job

RunT = TypeVar("RunT", bound=RunConfig)
RecipeT = TypeVar("RecipeT", bound=RecipeConfig)
DEFAULT = "speech"
"""Task of a recipe without the key `task`."""

OF_BOTH = ("seed", "island", "batch_shares", "budget", "stragglers", "faults")
"""Fields that a job and the settings of a run have in common."""


class TaskRecipe(RecipeConfig):
    """The keys of a recipe of any task but speech; a task adds its own by inheriting from this class."""

    task: str
    """Task that is trained: one that an installed package offers, or `module:name`."""


class Scoring:
    """Scores models while a run trains; this class scores none."""

    def hear(self, message: LearnerMessage) -> None:
        """Take a learner's message, perhaps that it has saved a model to be scored."""

    def is_enough(self) -> bool:
        """Whether the run may end before its budget is spent."""
        return False


class MiniBatches:
    """The examples that a task plans for each mini-batch, by which `starling audit` checks a run; this class plans
    none: each mini-batch of a workload is loaded to learn its examples' names."""

    examples = "examples"
    """Word for examples, in the plural."""

    def __init__(self, workload: Workload[Any]) -> None:
        self._workload = workload
        self.num_parts = workload.num_parts
        """The number of parts into which the data are divided."""

    @property
    def num_examples(self) -> int:
        """Number of examples in an epoch."""
        return sum(len(list(self.ids(Ticket(0, index, index)))) for index in range(self.num_batches(0)))

    def num_batches(self, epoch: int) -> int:
        """Number of mini-batches in an epoch."""
        return self._workload.num_batches(epoch)

    def ids(self, ticket: Ticket) -> Iterable[str]:
        """The names of a mini-batch's examples."""
        return (name for part in self._workload.load(ticket) for name in getattr(part, "ids", ()))

    def passes(self, times: Counter[str]) -> str | None:
        """A sentence about how often each example was seen in complete epochs; None if each should be seen once in each
        epoch."""
        return None


class Task(ABC, Generic[RunT]):
    """The training task of recipes of one kind. Methods get a recipe that `check` has returned."""

    settings: ClassVar[type[RunConfig]]
    """Typed tree of the recipe's keys."""
    preload: ClassVar[tuple[str, ...]] = ("starling.cli",)
    """Modules, beside torch, that every learner imports. On one machine they are imported once for all learners."""

    def require(self, command: str) -> None:
        """Raise MissingExtraError if something that `command` needs is not installed."""

    def check(self, tree: Tree, where: str) -> RunT:
        """The recipe of a tree of keys; `where` names it in the ConfigError that lists all problems."""
        return checked(self.settings, tree, f"recipe {where}")  # type: ignore[return-value]

    def check_resolved(self, tree: Tree, where: str) -> RunT:
        """The recipe of the tree that an experiment's folder holds, perhaps written by an earlier version; otherwise as
        `check`."""
        return self.check(tree, where)

    @abstractmethod
    def make_job(self, recipe: RunT, folder: ExperimentFolder, learners_here: int | None = None) -> Job:
        """The job of a recipe whose `folder` is set up. `learners_here` is the number of learners on this machine, None
        in a simulation."""

    def trained_model(self, recipe: RunT, folder: ExperimentFolder) -> nn.Module:
        """The newest consensus model, in evaluation mode, on the CPU. Raises CheckpointError if there is none."""
        from starling.checkpoint.reader import latest
        from starling.training.flat import load_weights

        return load_weights(self.make_job(recipe, folder).workload.make_model(), latest(folder.path))

    def model_writer(self, recipe: RunT, folder: ExperimentFolder) -> WriteModel:
        """The function that writes the model into checkpoints; by default, its state as `model.safetensors`."""
        from starling.training.flat import write_weights

        return partial(write_weights, self.make_job(recipe, folder).workload.make_model())

    def fingerprints(self, recipe: RunT) -> dict[str, str]:
        """Digests of the settings that a resumed run may not change, by section; by default, of the model's tensors,
        the number of mini-batches and the seed."""
        job = self.make_job(recipe, ExperimentFolder(recipe.folder))
        shapes = {
            key: [list(value.shape), str(value.dtype)] for key, value in job.workload.make_model().state_dict().items()
        }
        return {"model": digest(shapes), "data": digest([job.workload.num_batches(0), job.seed])}

    def changes(self, recipe: RunT, checkpoint: Path, sections: Sequence[str]) -> str:
        """The changes in some sections since a checkpoint, as `: KEY=OLD (now NEW), …`; empty if they are unknown."""
        return ""

    def set_up(self, recipe: RunT, folder: ExperimentFolder, say: Say, bars: Bars | None = None) -> None:
        """Prepare what learners need, in `folder`. Errors are raised here, before a run claims its folder."""

    def learner_command(self, recipe: RunT, folder: ExperimentFolder) -> AbstractContextManager[list[str]]:
        """The command that starts a learner; the files that it reads exist within this context."""
        return nullcontext([sys.executable, "-m", "starling", "train", str(folder.config)])

    def how_to_resume(self, folder: ExperimentFolder) -> str:
        """The command with which the user resumes from the newest checkpoint."""
        return f"starling train {folder.config} resume={folder.path}"

    def max_skipped(self, recipe: RunT, job: Job) -> int:
        """Number of examples of an epoch that may be skipped; if there are more, the run fails."""
        return 0

    def validate_every(self, recipe: RunT) -> int | None:
        """The number of epochs between two models that the launcher scores; None if it scores none."""
        return None

    def scoring(
        self, recipe: RunT, folder: ExperimentFolder, say: Say, on_score: Callable[[Score], None]
    ) -> AbstractContextManager[Scoring]:
        """A context with the object that scores models while the run trains."""
        return nullcontext(Scoring())

    def score(
        self, recipe: RunT, folder: ExperimentFolder, tell: Say, console: Console, may_be_best: bool = False
    ) -> str | None:
        """Score the trained model or, with `may_be_best`, the best model that was scored during training. Returns a
        line that says why the model does not work and what to do; empty if it works, and None if nothing was scored."""
        return None

    def scored_set(self, folder: ExperimentFolder, file: Path) -> tuple[ScoredSet, str]:
        """The contents of a file `recogs-SET.txt` for a report, and why something is missing. Raises DataError."""
        raise ConfigError(f"{file}: this task has no scored sets")

    def mini_batches(self, recipe: RunT, folder: ExperimentFolder) -> MiniBatches:
        """The plan of a run's mini-batches; by default, the mini-batches that the workload loads, whose examples may
        have `ids`."""
        return MiniBatches(self.make_job(recipe, folder).workload)


def job_of(recipe: RecipeConfig, workload: Workload[Any], **fields: Any) -> Job:
    """The job that trains a workload with all settings of a recipe; `fields` are other fields of `starling.Job`."""
    from starling.training.job import Job

    return Job(
        workload=workload,
        make_optimizer=recipe.optimizer.maker(),
        schedule=recipe.optimizer.schedule,
        clip_norm=recipe.optimizer.clip_norm,
        autocast=recipe.engine.autocast == "bf16",
        **settings_of(recipe),
        **fields,
    )


def settings_of(run: RunConfig) -> dict[str, Any]:
    """The fields of a job that the settings of any run determine."""
    choice, own = run.strategy, {name: getattr(run, name) for name in OF_BOTH}
    return own | {"strategy": choice.strategy, "options": choice.options, "checkpoint_every": run.checkpoints.every}


_TASKS = Registry[Task[RecipeConfig]](
    {}, "starling.tasks", accepts=Task, wanted="a starling.experiment.task.Task", prefix="task: "
)


def task_of(tree: Tree) -> Task[RecipeConfig]:
    """The task of a recipe's tree. Raises ConfigError if there is no task of that name."""
    name = tree.get("task", DEFAULT)
    if not isinstance(name, str):
        raise ConfigError(f"task: must be a name or `module:name`, not {name!r}")
    return _TASKS.find(name)


def load_recipe(
    path: Path, overrides: Sequence[str] = (), learners: int | None = None, command: str = ""
) -> tuple[Task[RecipeConfig], RecipeConfig]:
    """The recipe in a file with `key=value` overrides, and with `learners` learners if given; also its task, which must
    have everything that `command` needs.

    Raises one ConfigError that lists all problems.
    """
    tree = apply_overrides(read_recipe(path), overrides)
    task = task_of(tree)
    if command:
        task.require(command)
    return task, task.check(tree if learners is None else tree | {"learners": learners}, str(path))
