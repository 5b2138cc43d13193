"""Training with real processes, in the launcher and in its learners. It trains the recipe of any task or, through
`starling.train`, any PyTorch model and data."""

import io
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn

from starling.checkpoint.reader import latest
from starling.configuration import checked
from starling.engines.processes.place import cores_here
from starling.errors import PeerLost, Stopped
from starling.experiment import launching
from starling.experiment.auto import kept, launched_choice, measured_choice, settled
from starling.experiment.claim import resolve_resume, set_up_and_claim
from starling.experiment.folder import ExperimentFolder
from starling.experiment.following import Following, recorded
from starling.experiment.learning import learn
from starling.experiment.task import OF_BOTH, RunT, Task, load_recipe, settings_of
from starling.launch.link import Link, reported_errors
from starling.launch.process import signal_name
from starling.launch.rendezvous import find_place, is_first, is_learner, number_of_learners
from starling.recipe import apply_overrides, read_recipe
from starling.recipe.run import EngineConfig, RunConfig
from starling.reporting.progress import Bars, Say, say_on
from starling.strategies import name_of
from starling.strategies.islands import NO_ISLANDS, between_islands
from starling.timeouts import SET_UP
from starling.training.flat import load_weights
from starling.training.job import Job

_RESUMES = "set up"
"""Key of the store under which learner 0 announces that the run is set up, and from which checkpoint it resumes."""


def train_recipe(path: Path, overrides: Sequence[str], tell: Say, console: Console, command: str) -> None:
    """Train the recipe in a file. If a launcher has started this process, it is a learner; otherwise it is the
    launcher."""
    if not is_learner():
        run_training(*load_recipe(path, overrides, command=command), tell, console)
        return
    link = Link.from_environment()
    with reported_errors(link):
        learners = number_of_learners()
        asked = apply_overrides(read_recipe(path), overrides).get("learners", learners)
        if asked != learners and is_first():
            console.print(f"{learners} learners were started; the recipe's learners={asked} is ignored")
        train_as_learner(*load_recipe(path, overrides, learners, command), link, tell, console)


def run_training(task: Task[RunT], recipe: RunT, tell: Say, console: Console) -> RunT:
    """Train with `learners` processes, then score the model. Return the recipe with the chosen strategy.

    Scores are passed to `tell`; everything else is printed on `console`.
    """
    say, folder = say_on(console), ExperimentFolder(recipe.folder)
    if recipe.launch.kind == "local" and (line := launching.crowding_warning(recipe.learners, cores_here())):
        say(line)
    recipe = _set_up(task, recipe, say, console)
    choose = partial(launched_choice, recipe, folder, say)
    recipe = settled(task, recipe, folder, recipe.learners, say, choose)
    with recorded(recipe, folder, say) as events, Following(recipe, folder, console, events) as following:
        launching.run_learners(task, recipe, folder, console, following)
        following.end_training()
        if recipe.follow is not None:
            say(f"learners kept to the order of {recipe.follow}: their states have its weights, bit for bit")
        if (verdict := task.score(recipe, folder, tell, console, may_be_best=True)) is not None:
            events.judge(verdict, lambda line: None)  # the summary begins with it
    return recipe


def train_as_learner(task: Task[RunT], recipe: RunT, link: Link | None, tell: Say, console: Console) -> RunT:
    """Train as one learner. If there is a `link`, Starling's launcher has started this process; otherwise torchrun or
    Slurm has. Apart from that, this function is like `run_training`.

    Without Starling's launcher, learner 0 sets up the run while the others wait, and scores the model at the end.
    """
    place, folder = find_place(recipe.engine.timeout_seconds), ExperimentFolder(recipe.folder)
    say = say_on(console) if place.rank == 0 else None
    if link is None and say is not None:
        recipe = _set_up(task, recipe, say, console)
        place.store.set(_RESUMES, str(recipe.resume or ""))
    elif link is None:
        place.store.wait([_RESUMES], timedelta(seconds=SET_UP))
        resume = place.store.get(_RESUMES).decode()
        recipe = kept(recipe.model_copy(update={"resume": Path(resume) if resume else None}), lambda line: None)
    recipe = settled(task, recipe, folder, place.local_world, say, partial(measured_choice, recipe, place))
    try:
        stopped_by = learn(task, recipe, place, link)
    except PeerLost as error:
        if link is None:
            launching.resumable(error, folder, task.how_to_resume(folder))
        raise
    if link is None and stopped_by is not None:
        stopped = Stopped(f"stopped by {signal_name(stopped_by)}", stopped_by, has_saved=True)
        raise launching.resumable(stopped, folder, task.how_to_resume(folder))
    if link is None and place.rank == 0 and (verdict := task.score(recipe, folder, tell, console)):
        say_on(console)(verdict)
    return recipe


def _set_up(task: Task[RunT], recipe: RunT, say: Say, console: Console) -> RunT:
    """Check the requirements of a run, set it up, and claim its folder. Return the recipe with the checkpoint from
    which the run resumes."""
    recipe = kept(resolve_resume(task, recipe), say)
    launching.check_engine(recipe)
    with Bars(console) as bars:
        set_up_and_claim(task, recipe, say, bars)
    return recipe


class JobConfig(RunConfig):
    """The settings of a run that `starling.train` starts; saved as `config.yaml` in its folder."""

    trains: str
    """The name of the workload's class, for readers of the file."""


@dataclass(frozen=True)
class Trained:
    """The result of `starling.train`."""

    job: Job
    """The job that was trained."""
    folder: Path
    """The experiment's folder."""
    checkpoint: Path
    """The newest checkpoint, with the consensus model and the state of every learner."""

    def model(self) -> nn.Module:
        """Return the consensus model on the CPU, in evaluation mode."""
        return load_weights(self.job.workload.make_model(), self.checkpoint)


def train(
    job: Job,
    learners: int = 1,
    *,
    strategy: str | Mapping[str, Any] | None = None,
    name: str = "run",
    exp: Path | str = "exp",
    resume: Path | str | None = None,
    follow: Path | str | None = None,
    overwrite: bool = False,
    on_loss: str = "continue",
    checkpoints: Mapping[str, Any] | None = None,
    engine: Mapping[str, Any] | None = None,
    launch: str | Mapping[str, Any] = "local",
    console: Console | None = None,
) -> Trained:
    """Train a job with `learners` processes, on this machine or on a Ray cluster.

    Every mini-batch of an epoch is computed exactly once, whatever the learners' speeds. Checkpoints, resuming, lost
    learners, joiners, injected faults, `starling status` and `starling join` work as they do for a recipe.

    Learners receive a pickled copy of the job and import this script. Everything the job refers to must therefore be
    defined at the top level of a module or of the script, and this call must be under `if __name__ == "__main__":`.
    In a notebook, it must be defined in a module that the notebook imports, which a cell may write with `%%writefile`.
    Under `torchrun` or Slurm, every process makes the same call, and `learners` is ignored: each process is a learner.

    Args:
        job: What to train, how, and for how long.
        learners: The number of processes.
        strategy: A name that `starling strategies` lists, `module:name`, or a mapping with `name` and options; `auto`
            chooses one by measuring this machine first. None uses the job's strategy; your own must be at the top
            level of a module or of the script.
        name: The experiment's folder inside `exp`. An earlier run there is moved aside.
        exp: The folder of all experiments.
        resume: An experiment or a checkpoint to resume from.
        follow: An experiment whose recorded order of events the learners follow, so that they end with the same
            weights as that experiment.
        overwrite: Remove an earlier run instead of moving it aside.
        on_loss: What happens when a learner is lost: `continue` without it, `replace` it, or `stop`.
        checkpoints: Options of a recipe's `checkpoints` section: `minutes`, `epochs`, `every`, `keep`.
        engine: Options of a recipe's `engine` section: `device`, `threads`, `timeout_seconds`, `explain_seconds`.
        launch: Where the learners run: `local`, `ray`, or a mapping as in a recipe's `launch` section.
        console: Where progress is shown; None uses standard error.

    Raises:
        ConfigError: The settings cannot be used; raised before any process starts.
        StarlingError: The error that ended the run; its notes say how to resume.

    Example:
        >>> trained = starling.train(job, learners=4, strategy="adpsgd", name="digits")  # doctest: +SKIP
        >>> model = trained.model()  # doctest: +SKIP
    """
    launching.refuse_if_importing("starling.train")
    own = between_islands(job.strategy, NO_ISLANDS)
    given = {
        **{key: getattr(job, key) for key in OF_BOTH},
        "name": name,
        "learners": learners,
        "strategy": strategy or {"name": name_of(own), **job.options.model_dump(mode="json")},
        "engine": engine or EngineConfig(),
        "launch": launch,
        "on_loss": on_loss,
        "checkpoints": {"every": job.checkpoint_every, **(checkpoints or {})},
        "resume": resume,
        "follow": follow,
        "overwrite": overwrite,
        "exp": exp,
        "trains": f"{type(job.workload).__module__}.{type(job.workload).__qualname__}",
    }
    run: RunConfig = checked(JobConfig, given, "starling.train")
    console = console or Console(stderr=True)
    task = GivenJob(job)
    if is_learner():  # torchrun or Slurm has started this process
        run = run.model_copy(update={"learners": number_of_learners()})
        run = train_as_learner(task, run, None, lambda line: None, console)
    else:
        run = run_training(task, run, lambda line: None, console)
    return Trained(task.make_job(run), run.folder, latest(run.folder))


def train_quietly(job: Job, learners: int, **given: Any) -> Trained:
    """Train in order to measure, without output and without timed checkpoints. If a learner is lost, the run ends."""
    quiet, rarely = Console(file=io.StringIO(), force_jupyter=False), {"minutes": None}
    return train(job, learners, overwrite=True, on_loss="stop", checkpoints=rarely, console=quiet, **given)


@dataclass(frozen=True)
class GivenJob(Task[RunConfig]):
    """The task of `starling.train`: a job that is given as an object. Learners receive a pickled copy of the job."""

    job: Job

    def make_job(
        self, recipe: RunConfig, folder: ExperimentFolder | None = None, learners_here: int | None = None
    ) -> Job:
        """Return the job with the strategy and the other settings of a run."""
        autocast = self.job.autocast or recipe.engine.autocast == "bf16"
        return replace(self.job, autocast=autocast, **settings_of(recipe))

    def set_up(self, recipe: RunConfig, folder: ExperimentFolder, say: Say, bars: Bars | None = None) -> None:
        """Check that the job can be sent to learners. Raises ConfigError if not."""
        if not is_learner():
            launching.pack(self.job, recipe)

    def learner_command(self, recipe: RunConfig, folder: ExperimentFolder) -> AbstractContextManager[list[str]]:
        return launching.packed_command(self.job, recipe, folder)

    def how_to_resume(self, folder: ExperimentFolder) -> str:
        return f"starling.train(job, ..., resume={str(folder.path)!r})"
