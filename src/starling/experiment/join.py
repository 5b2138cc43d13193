"""`starling join`: adds learners to a running experiment."""

import time
from collections.abc import Callable
from pathlib import Path

from starling.errors import ConfigError, PeerLost
from starling.experiment.folder import existing
from starling.launch.joiners import Changes
from starling.launch.messages import JoinAnswer, JoinRequest
from starling.launch.requests import Requests, ask, launcher_id, take_answer, withdraw
from starling.recipe.run import RunConfig
from starling.reporting.progress import Say
from starling.strategies.islands import between_islands
from starling.timeouts import ANSWER_EVERY
from starling.training.faults import Join


def changes(
    run: RunConfig,
    requests: Requests | None,
    say: Say,
    on_join: Callable[[int, int], None],
    on_left_out: Callable[[int, str], None],
) -> Changes:
    """How the set of learners of a run may change, by its settings."""
    strategy, options = between_islands(run.strategy.strategy, run.island), run.strategy.options
    return Changes(
        succession=lambda members, lost, joining: strategy.successors(options, members, lost, joining),
        replaces=run.on_loss == "replace",
        joins=[fault for fault in run.faults if isinstance(fault, Join)],
        requests=requests,
        is_open=run.on_loss != "stop",
        say=say,
        on_join=on_join,
        on_left_out=on_left_out,
    )


def join(experiment: Path, learners: int, tell: Say) -> None:
    """Ask for more learners in a running experiment, and wait until they train.

    Raises ConfigError if nothing runs there or the request is refused, PeerLost if a learner failed while joining or
    the run ended first.
    """
    folder = existing(experiment)
    launcher = launcher_id(folder.joins)
    if launcher is None:
        raise ConfigError(f"{experiment}: nothing runs here; start it with: starling train {folder.config}")
    request = _ask(experiment, folder.joins, learners)
    try:
        answer = _await(experiment, folder.joins, request, launcher)
    finally:
        withdraw(folder.joins, request)
    if answer.refused:
        raise ConfigError(f"{experiment}: no learner was added: {answer.refused}")
    if answer.joined:
        names = ", ".join(map(str, answer.joined))
        tell(f"joined as learner {names}; {answer.learners} learners train now; logs: {folder.log}")
    if answer.failed:
        raise PeerLost(f"{experiment}: " + "; ".join(answer.failed))


def _ask(experiment: Path, folder: Path, learners: int) -> JoinRequest:
    try:
        return ask(folder, learners)
    except OSError as error:
        raise ConfigError(
            f"{folder}: cannot be written ({error}); to add learners you need write access to {experiment}"
        ) from error


def _await(experiment: Path, folder: Path, request: JoinRequest, launcher: bytes) -> JoinAnswer:
    while True:
        is_over = launcher_id(folder) != launcher  # checked before the last look for an answer
        if answer := take_answer(folder, request):
            return answer
        if is_over:
            raise PeerLost(f"{experiment}: the run ended before a learner joined")
        time.sleep(ANSWER_EVERY)
