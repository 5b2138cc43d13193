"""`starling train`: trains with real processes, as the launcher or as one of its learners."""

import sys
from datetime import timedelta
from pathlib import Path

from rich.console import Console

from starling.engines.processes.place import Place
from starling.errors import PeerLost, Stopped
from starling.experiment.auto import choose_before, choose_together, kept, with_choice
from starling.experiment.claim import resolve_resume
from starling.experiment.cores import cores_here
from starling.experiment.folder import ExperimentFolder, best_model
from starling.experiment.following import Following
from starling.experiment.launching import check_engine, check_not_running, crowding_warning, resumable, run_learners
from starling.experiment.learning import Task, learn
from starling.launch.link import Link
from starling.launch.messages import LearnerMessage, ModelSaved, Saved
from starling.launch.process import signal_name
from starling.launch.rendezvous import find_place
from starling.reporting.progress import Bars, Display, Say, say_on
from starling.speech.recipe import Recipe, fingerprints, recipe_digest
from starling.speech.scoring.evaluate import evaluate
from starling.speech.training.job import ModelWriter, make_job, max_skipped
from starling.speech.training.set_up import set_up_and_claim
from starling.speech.training.validate import Validation
from starling.timeouts import SET_UP


def train(recipe: Recipe, tell: Say, console: Console) -> None:
    """Train with `learners` processes on this machine, then score the test sets.

    Scores go to `tell`, everything else to `console`.
    """
    recipe = kept(resolve_resume(recipe), say_on(console))
    check_engine(recipe)
    check_not_running(recipe)
    if recipe.launch.kind == "local" and (line := crowding_warning(recipe.learners, cores_here())):
        say_on(console)(line)
    folder = _ready(recipe, console)
    if recipe.strategy.is_auto:
        job = make_job(recipe, folder, recipe.learners)
        recipe = with_choice(recipe, choose_before(recipe, job, folder, say_on(console)), folder)
    title = f"{recipe.name}: {recipe.learners} learners, {recipe.strategy.name}"
    command = [sys.executable, "-m", "starling", "train", str(folder.config)]
    with (
        Following(recipe, folder, console) as following,
        Display(title, recipe.learners, console, following.events) as display,
        Validation(recipe, folder, display.say, display.scored) as validation,
    ):

        def on_message(message: LearnerMessage) -> None:
            if isinstance(message, Saved) and message.moment != "barrier":
                validation.saved(Path(message.folder), is_last=message.moment == "end")
            if isinstance(message, ModelSaved):
                validation.saved(Path(message.folder))

        run_learners(
            recipe, folder, command, following, display, how_to_resume(folder), on_message, validation.is_enough
        )
    with following.scoring():
        is_best = recipe.patience is not None and best_model(folder) is not None
        evaluate(folder.path, None, tell, console, is_best)


def train_as_learner(recipe: Recipe, link: Link | None, tell: Say, console: Console) -> None:
    """Train as one learner, started by Starling's launcher if there is a `link` to it, else by torchrun or Slurm.

    Without Starling's launcher, learner 0 sets up the run while the others wait, and scores the test sets at the end.
    """
    place = find_place(recipe.engine.timeout_seconds)
    if link is None:
        check_engine(recipe)
        recipe = _agree_on_set_up(recipe, place, console)
    folder = ExperimentFolder(recipe.folder)
    if recipe.strategy.is_auto:
        job = make_job(recipe, folder, place.local_world)
        choice = choose_together(recipe, job, place, folder, say_on(console))
        recipe = with_choice(recipe, choice, folder, writes=place.rank == 0)
    try:
        stopped_by = _learn(recipe, folder, place, link)
    except PeerLost as error:
        if link is None:
            resumable(error, folder, how_to_resume(folder))
        raise
    if link is None and stopped_by is not None:
        stopped = Stopped(f"stopped by {signal_name(stopped_by)}", stopped_by, has_saved=True)
        raise resumable(stopped, folder, how_to_resume(folder))
    if link is None and place.rank == 0:
        evaluate(folder.path, None, tell, console)


def _ready(recipe: Recipe, console: Console) -> ExperimentFolder:
    """Set up the run, and claim the experiment's folder."""
    with Bars(console) as bars:
        return set_up_and_claim(recipe, say_on(console), bars)


def _agree_on_set_up(recipe: Recipe, place: Place, console: Console) -> Recipe:
    """Let learner 0 set up the run; return the recipe with the checkpoint that it resumes from."""
    key = "set up"
    if place.rank == 0:
        recipe = kept(resolve_resume(recipe), say_on(console))
        _ready(recipe, console)
        place.store.set(key, str(recipe.resume or ""))
        return recipe
    place.store.wait([key], timedelta(seconds=SET_UP))
    resume = place.store.get(key).decode()
    return kept(recipe.model_copy(update={"resume": Path(resume) if resume else None}), lambda line: None)


def how_to_resume(folder: ExperimentFolder) -> str:
    """The command that resumes a run from its newest checkpoint."""
    return f"starling train {folder.config} resume={folder.path}"


def _learn(recipe: Recipe, folder: ExperimentFolder, place: Place, link: Link | None) -> int | None:
    task = Task(
        make_job=lambda: make_job(recipe, folder, place.local_world),
        write_model=ModelWriter(folder.initial, recipe.freeze),
        digest=recipe_digest(recipe),
        fingerprints=fingerprints(recipe),
        max_skipped=lambda job: max_skipped(recipe, job),
        validate_every=recipe.validate_every if recipe.data.valid is not None else None,
    )
    return learn(recipe, task, folder, place, link)
