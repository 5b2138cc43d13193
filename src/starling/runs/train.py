"""Training with real learner processes: the one that starts them, and each of them."""

import sys
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
from rich.console import Console

from starling.checkpoint.files import remove_partial
from starling.checkpoint.reader import checkpoints_in, load
from starling.checkpoint.writer import CheckpointWriter
from starling.engines.processes.member import run_learner
from starling.engines.processes.place import Place, choose_device
from starling.engines.processes.stalls import Waits
from starling.errors import ConfigError, StarlingError, Stopped
from starling.launch.launcher import launch
from starling.launch.link import Link
from starling.launch.process import signal_name
from starling.launch.rendezvous import find_membership, find_place, joins
from starling.launch.requests import taking_requests, who_takes
from starling.launch.stopping import wishes_of
from starling.launch.watch import Loss
from starling.report.curves import Curves
from starling.report.progress import Bars, Display, Say, say_on
from starling.runs.evaluate import evaluate
from starling.runs.experiment.folder import ExperimentFolder, resolve_resume
from starling.runs.experiment.seen import Seen, segments
from starling.runs.following import Following
from starling.runs.heartbeat import Heartbeat, giving
from starling.runs.job import ModelWriter, cores_here, make_job, most_skipped, use_threads
from starling.runs.join import changes
from starling.runs.observers import (
    CURVES_EVERY,
    LOG_EVERY,
    SEND_EVERY,
    CurvesByRank,
    Log,
    Message,
    Messages,
    Metered,
    Saver,
    Together,
    show,
)
from starling.runs.recipe.recipe import Recipe, fingerprints, recipe_digest
from starling.runs.regrouping import Regrouping
from starling.runs.setup import make_ready
from starling.runs.validate import Choice, Validation, model_writer
from starling.training.faults import only_simulated

MOST_TO_A_CORE = 4
"""Learners; more is taken for a mistake."""
_SET_UP_LIMIT = timedelta(days=2)  # preparing a large corpus may take long; a death ends the waiting sooner


def train(recipe: Recipe, tell: Say, console: Console) -> None:
    """Train with `learners` processes on this machine, then score the test sets.

    Scores go to `tell`, everything else to `console`.
    """
    recipe = resolve_resume(recipe)
    check_engine(recipe)
    _check_alone(recipe)
    if line := crowding(recipe.learners, cores_here()):
        say_on(console)(line)
    folder = _ready(recipe, console)
    title = f"{recipe.name}: {recipe.learners} learners, {recipe.strategy.name}"
    command = [sys.executable, "-m", "starling", "train", str(folder.config)]
    with (
        Following(recipe, folder, console) as following,
        Display(title, recipe.learners, console) as display,
        Validation(recipe, folder, display.say) as validation,
    ):

        def on_message(rank: int, message: Message) -> None:
            following.hear(rank, message)
            show(message, display)
            if message.get("moment") in ("epoch", "end"):
                validation.saved(Path(message["saved"]), is_last=message["moment"] == "end")
            if "to_validate" in message:
                validation.saved(Path(message["to_validate"]))

        def on_loss(loss: Loss) -> None:
            following.lose(loss.learner, loss.reason)
            display.say(f"{loss.reason}; the others go on without it")
            display.lost(loss.learner)

        try:
            with taking_requests(folder.joins) as requests:
                losses = launch(
                    command,
                    recipe.learners,
                    folder.log,
                    on_message,
                    None if recipe.on_loss == "stop" else on_loss,
                    recipe.engine.timeout_seconds,
                    changes(recipe, requests, display, following.leave_out),
                )
        except StarlingError as error:
            raise resumable(error, folder) from None
        finally:
            with suppress(OSError):
                remove_partial(folder.checkpoints)  # all learners have ended
        for loss in losses:
            if loss.learner in display.away:
                display.say(f"{recipe.name} ended without learner {loss.learner}: {loss.reason}")
    with following.scoring():
        evaluate(folder.path, None, tell, console)


def crowding(learners: int, cores: int) -> str | None:
    """A warning where this machine has far fewer cores than learners."""
    if learners <= MOST_TO_A_CORE * cores:
        return None
    return (
        f"warning: {learners} learners share {cores} cores and slow each other down; use at most {cores} for speed, or "
        "`starling simulate` to study more"
    )


def _check_alone(recipe: Recipe) -> None:
    """Raises ConfigError where the experiment's folder belongs to a run that goes on: two would write into it."""
    if who_takes(ExperimentFolder(recipe.folder).joins) is not None:
        raise ConfigError(
            f"{recipe.folder}: a run is going on here; wait for its end, stop it, or set name to another one"
        )


def train_as_learner(recipe: Recipe, link: Link | None, tell: Say, console: Console) -> None:
    """Be one of the learners: of our own launcher if there is a `link` to it, of torchrun or Slurm otherwise.

    Without a launcher of ours, learner 0 does what it would do: it makes everything ready while the others wait,
    and scores the test sets in the end.
    """
    place = find_place(recipe.engine.timeout_seconds)
    if link is None:
        check_engine(recipe)
        recipe = _agree_on_set_up(recipe, place, console)
    folder = ExperimentFolder(recipe.folder)
    stopped_by = _learn(recipe, folder, place, link)
    if link is None and stopped_by is not None:
        stopped = Stopped(f"stopped by {signal_name(stopped_by)}", stopped_by, has_saved=True)
        raise resumable(stopped, folder)
    if link is None and place.rank == 0:
        evaluate(folder.path, None, tell, console)


def check_engine(recipe: Recipe) -> None:
    """Raises ConfigError for what real processes cannot be given: CUDA where there is none, some faults on purpose."""
    if problems := list(only_simulated(recipe.faults)):
        raise ConfigError("\n".join(problems))
    if recipe.engine.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("engine.device: cuda is asked for, but torch finds none here; use engine.device=auto or cpu")


def _ready(recipe: Recipe, console: Console) -> ExperimentFolder:
    """Make everything ready in the experiment's folder."""
    with Bars(console) as bars:
        return make_ready(recipe, say_on(console), bars)


def _agree_on_set_up(recipe: Recipe, place: Place, console: Console) -> Recipe:
    """Learner 0 sets up; all go on from the checkpoint that it found."""
    key = "set up"
    if place.rank == 0:
        recipe = resolve_resume(recipe)
        _ready(recipe, console)
        place.store.set(key, str(recipe.resume or ""))
        return recipe
    place.store.wait([key], _SET_UP_LIMIT)
    resume = place.store.get(key).decode()
    return recipe.model_copy(update={"resume": Path(resume) if resume else None})


def resumable(error: StarlingError, folder: ExperimentFolder) -> StarlingError:
    """The error that ended a run, with what was saved last and how to go on from it."""
    found = checkpoints_in(folder.checkpoints)
    if isinstance(error, Stopped):
        saved = "; there is no checkpoint"
        if found:
            saved = f", saved {found[-1]}" if error.has_saved else f"; the newest checkpoint is {found[-1]}"
        error = Stopped(f"{error}{saved}", error.signal_number)
    if found:
        error.add_note(f"resume with: starling train {folder.config} resume={folder.path}")
    return error


def _learn(recipe: Recipe, folder: ExperimentFolder, place: Place, link: Link | None) -> int | None:
    """Be a learner to the end; the signal by which all were asked to end early, if they were."""
    use_threads(recipe, place.local_world)

    def tell(message: Message) -> None:
        if link is not None:
            link.send(message)

    regrouping = Regrouping(folder, place, tell)
    curves = CurvesByRank(lambda rank: Curves(folder.tensorboard / f"learner-{rank}"))
    write_model, waits = ModelWriter(folder.initial), Waits()
    writer = CheckpointWriter(
        folder.checkpoints,
        regrouping.arrive,
        write_model,
        fingerprints(recipe),
        recipe.checkpoints.keep,
        recipe.sync_group_size,
    )
    validates = link is not None and recipe.validate_every is not None and recipe.data.valid is not None
    saver = Saver(
        writer,
        tell,
        lambda: Curves(folder.tensorboard / "consensus"),
        Choice(recipe.checkpoints.epochs, recipe.validate_every if validates else None, folder, regrouping.agree),
        model_writer(folder, lambda name: regrouping.arrive(f"validation/{name}"), write_model, recipe.sync_group_size),
    )
    job = make_job(recipe, folder, place.local_world)
    seen = Seen(
        segments(folder.seen)[-1],
        regrouping.count,
        most_skipped(recipe, job),
        lambda line: tell({"say": line}),
    )
    regrouping.watch(seen, saver)
    world = max(place.world, place.rank + 1)  # who joins may be beyond those that began
    listeners = [Metered(Log(sys.stdout), world, LOG_EVERY), Metered(curves, world, CURVES_EVERY)]
    if link is not None:
        listeners.append(Metered(Messages(tell), world, SEND_EVERY))
    start = load(recipe.resume).start(place.rank, place.world) if recipe.resume and not joins() else None
    sign = Heartbeat(place.rank, say_on(Console(file=sys.stdout)), waits, recipe.engine.explain_seconds)
    try:
        with giving(sign, link), wishes_of(link, recipe.checkpoints.minutes) as wishes, saver:
            run_learner(
                job,
                place,
                choose_device(recipe.engine.device, place),
                recipe_digest(recipe),
                Together([sign, *listeners, seen, saver]),
                start,
                recipe.engine.timeout_seconds,
                find_membership(place, link),
                regrouping,
                wishes,
                waits,
            )
            return wishes.stopped_by
    finally:
        curves.close()
        seen.close()
