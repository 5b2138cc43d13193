"""Trains with real processes, as the launcher or as one of its learners, whatever the task."""

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

from rich.console import Console

from starling.engines.processes.place import cores_here
from starling.errors import PeerLost, Stopped
from starling.experiment.auto import kept, launched_choice, measured_choice, settled
from starling.experiment.claim import resolve_resume, set_up_and_claim
from starling.experiment.folder import ExperimentFolder
from starling.experiment.following import Following, recorded
from starling.experiment.launching import check_engine, crowding_warning, resumable, run_learners
from starling.experiment.learning import learn
from starling.experiment.task import RunT, Task, load_recipe
from starling.launch.link import Link, reported_errors
from starling.launch.process import signal_name
from starling.launch.rendezvous import find_place, is_first, is_learner, number_of_learners
from starling.recipe.file import apply_overrides, read_recipe
from starling.reporting.progress import Bars, Say, say_on
from starling.timeouts import SET_UP

_RESUMES = "set up"
"""Key in the store under which learner 0 tells that the run is set up, and from which checkpoint it resumes."""


def train_recipe(path: Path, overrides: Sequence[str], tell: Say, console: Console, command: str) -> None:
    """Train the recipe in a file: as the launcher or, if a launcher has started this process, as a learner."""
    if not is_learner():
        train(*load_recipe(path, overrides, command=command), tell, console)
        return
    link = Link.from_environment()
    with reported_errors(link):
        learners = number_of_learners()
        asked = apply_overrides(read_recipe(path), overrides).get("learners", learners)
        if asked != learners and is_first():
            console.print(f"{learners} learners were started; the recipe's learners={asked} is ignored")
        train_as_learner(*load_recipe(path, overrides, learners, command), link, tell, console)


def train(task: Task[RunT], recipe: RunT, tell: Say, console: Console) -> RunT:
    """Train with `learners` processes, then score the model; return the recipe with the chosen strategy.

    Scores go to `tell`, everything else to `console`.
    """
    say, folder = say_on(console), ExperimentFolder(recipe.folder)
    if recipe.launch.kind == "local" and (line := crowding_warning(recipe.learners, cores_here())):
        say(line)
    recipe = _set_up(task, recipe, say, console)
    choose = partial(launched_choice, recipe, folder, say)
    recipe = settled(task, recipe, folder, recipe.learners, say, choose)
    with recorded(recipe, folder, say) as events, Following(recipe, folder, console, events) as following:
        run_learners(task, recipe, folder, console, following)
        following.end_training()
        if (verdict := task.score(recipe, folder, tell, console, may_be_best=True)) is not None:
            events.judge(verdict, lambda line: None)  # the summary begins with it
    return recipe


def train_as_learner(task: Task[RunT], recipe: RunT, link: Link | None, tell: Say, console: Console) -> RunT:
    """Train as one learner, started by Starling's launcher if there is a `link` to it, else by torchrun or Slurm;
    otherwise as `train`.

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
            resumable(error, folder, task.how_to_resume(folder))
        raise
    if link is None and stopped_by is not None:
        stopped = Stopped(f"stopped by {signal_name(stopped_by)}", stopped_by, has_saved=True)
        raise resumable(stopped, folder, task.how_to_resume(folder))
    if link is None and place.rank == 0 and (verdict := task.score(recipe, folder, tell, console)):
        say_on(console)(verdict)
    return recipe


def _set_up(task: Task[RunT], recipe: RunT, say: Say, console: Console) -> RunT:
    """Check the needs of a run, set it up and claim its folder; return the recipe with the checkpoint from which it
    resumes."""
    recipe = kept(resolve_resume(task, recipe), say)
    check_engine(recipe)
    with Bars(console) as bars:
        set_up_and_claim(task, recipe, say, bars)
    return recipe
