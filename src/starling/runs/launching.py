"""The launcher of a run: it starts the learners, shows what they do, and leaves the experiment's folder in order."""

from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from starling.checkpoint.files import remove_partial
from starling.checkpoint.reader import checkpoints_in
from starling.errors import ConfigError, StarlingError, Stopped
from starling.launch.launcher import launch
from starling.launch.messages import LearnerMessage
from starling.launch.requests import launcher_id, taking_requests
from starling.launch.watch import Loss
from starling.report.progress import Display
from starling.runs.experiment.folder import ExperimentFolder
from starling.runs.following import Following
from starling.runs.join import changes
from starling.runs.observers import show
from starling.runs.recipe.run import RunConfig
from starling.training.faults import only_simulated

MOST_TO_A_CORE = 4
"""Learners; more is taken for a mistake."""


def run_learners(
    run: RunConfig,
    folder: ExperimentFolder,
    command: Sequence[str],
    following: Following,
    display: Display,
    how_to_resume: str,
    on_message: Callable[[LearnerMessage], None] = lambda message: None,
) -> None:
    """Run the learners of `run`, each a process of `command`, until all have ended.

    Their messages are shown and then given to `on_message`. Raises what ended the run, with `how_to_resume` it if there
    is a checkpoint.
    """
    following.on_look = display.tick
    roster = following.roster

    def hear(learner_id: int, message: LearnerMessage) -> None:
        show(message, display)
        on_message(message)

    def on_loss(loss: Loss) -> None:
        display.lost(loss.learner, loss.reason)
        display.train_with(roster.membership.members)

    def on_join(learner_id: int, num_learners: int) -> None:
        display.joined(learner_id, num_learners)
        display.train_with(roster.membership.members)

    try:
        with taking_requests(folder.joins) as requests:
            losses = launch(
                command,
                run.learners,
                folder.log,
                hear,
                None if run.on_loss == "stop" else on_loss,
                run.engine.timeout_seconds,
                changes(run, requests, display.say, on_join, display.left_out),
                roster,
            )
    except StarlingError as error:
        raise resumable(error, folder, how_to_resume) from None
    finally:
        with suppress(OSError):
            remove_partial(folder.checkpoints)  # all learners have ended
    for loss in losses:
        if loss.learner in display.away:
            display.say(f"{run.name} ended without learner {loss.learner}: {loss.reason}")


def crowding(learners: int, cores: int) -> str | None:
    """A warning where this machine has far fewer cores than learners."""
    if learners <= MOST_TO_A_CORE * cores:
        return None
    return (
        f"warning: {learners} learners share {cores} cores and slow each other down; use at most {cores} for speed, or "
        "`starling simulate` to study more"
    )


def check_alone(run: RunConfig) -> None:
    """Raises ConfigError if a run uses the experiment's folder already: both would write into it."""
    if launcher_id(ExperimentFolder(run.folder).joins) is not None:
        raise ConfigError(
            f"{run.folder}: another run writes here; wait for its end, stop it, or set name to another one"
        )


def check_engine(run: RunConfig) -> None:
    """Raises ConfigError for what real processes cannot have: CUDA on a machine without it, and some faults."""
    if problems := list(only_simulated(run.faults)):
        raise ConfigError("\n".join(problems))
    if run.engine.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("engine.device: cuda is asked for, but torch finds none here; use engine.device=auto or cpu")


def resumable(error: StarlingError, folder: ExperimentFolder, how_to_resume: str) -> StarlingError:
    """The error that ended a run, with what was saved last and how to resume from it."""
    found = checkpoints_in(folder.checkpoints)
    if isinstance(error, Stopped):
        saved = "; there is no checkpoint"
        if found:
            saved = f", saved {found[-1]}" if error.has_saved else f"; the newest checkpoint is {found[-1]}"
        error = Stopped(f"{error}{saved}", error.signal_number)
    if found:
        error.add_note(f"resume with: {how_to_resume}")
    return error
