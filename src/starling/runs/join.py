"""`starling join`: more learners for a run that goes on, and how learners may come to it."""

import time
from collections.abc import Callable
from pathlib import Path

from starling.errors import ConfigError, PeerLost
from starling.launch.joiners import Changes
from starling.launch.requests import Answer, Request, Requests, answered, ask, who_takes, withdraw
from starling.report.progress import Display, Say
from starling.runs.experiment.folder import ExperimentFolder
from starling.runs.recipe.recipe import Recipe
from starling.training.faults import Join

_LOOK_EVERY = 0.1  # seconds


def changes(
    recipe: Recipe, requests: Requests | None, display: Display, on_left_out: Callable[[int, str], None]
) -> Changes:
    """How learners may come to the run of a recipe."""
    strategy, options = recipe.strategy.strategy, recipe.strategy.options
    return Changes(
        succession=lambda members, lost, came: strategy.successors(options, members, lost, came),
        replaces=recipe.on_loss == "replace",
        joins=[fault for fault in recipe.faults if isinstance(fault, Join)],
        requests=requests,
        is_open=recipe.on_loss != "stop",
        say=display.say,
        on_join=display.joined,
        on_left_out=on_left_out,
    )


def join(experiment: Path, learners: int, tell: Say) -> None:
    """Ask for more learners in a run that goes on, and wait until they compute.

    Raises ConfigError where no run is going on, or it refuses them; PeerLost when some of them failed while they
    joined, or the run ended before.
    """
    folder = ExperimentFolder(experiment)
    if not folder.config.is_file():
        raise ConfigError(f"{experiment}: no config.yaml here; give an experiment that `starling train` has written")
    launcher = who_takes(folder.joins)
    if launcher is None:
        raise ConfigError(f"{experiment}: no run is going on here; start one with: starling train {folder.config}")
    request = _asked(experiment, folder.joins, learners)
    try:
        answer = _await(experiment, folder.joins, request, launcher)
    finally:
        withdraw(folder.joins, request)
    if answer.refused:
        raise ConfigError(f"{experiment}: nobody joins: {answer.refused}")
    if answer.joined:
        names = ", ".join(map(str, answer.joined))
        tell(f"joined as learner {names}; {answer.learners} learners go on; logs: {folder.log}")
    if answer.failed:
        raise PeerLost(f"{experiment}: " + "; ".join(answer.failed))


def _asked(experiment: Path, folder: Path, learners: int) -> Request:
    try:
        return ask(folder, learners)
    except OSError as error:
        raise ConfigError(
            f"{folder}: cannot be written ({error}); only who may write to {experiment} can join"
        ) from error


def _await(experiment: Path, folder: Path, request: Request, launcher: bytes) -> Answer:
    while True:
        is_over = who_takes(folder) != launcher  # before the last look
        if answer := answered(folder, request):
            return answer
        if is_over:
            raise PeerLost(f"{experiment}: the run ended before anybody had joined")
        time.sleep(_LOOK_EVERY)
