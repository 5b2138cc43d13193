"""`starling status` and `starling join`: show a running experiment, and add learners to it, from another terminal."""

import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from starling.errors import ConfigError, DataError, PeerLost, ProtocolError
from starling.experiment.folder import existing
from starling.files import writing
from starling.launch.joiners import ask, launcher_id, take_answer, withdraw
from starling.launch.messages import LearnerStatus, Status, decode_file
from starling.launch.roster import LearnerRecord, LearnerState, Roster
from starling.reporting.epochs import duration
from starling.reporting.progress import Say
from starling.timeouts import ANSWER_EVERY, LOOK_EVERY, STATUS_FRESH


def status(experiment: Path, watch: bool, output: Console) -> None:
    """Print the state of an experiment; with `watch`, update it until the run ends or its launcher is gone.

    Raises ConfigError if the folder is not an experiment or has no status, DataError if the status is damaged.
    """
    read = read_status(experiment)
    if not watch:
        output.print(describe(read, time.time(), is_alive(read)), highlight=False)
        return
    with Live(console=output, auto_refresh=False) as live:
        while True:
            alive = is_alive(read)
            live.update(describe(read, time.time(), alive), refresh=True)
            if read.stage == "ended" or not alive:
                return
            time.sleep(LOOK_EVERY)
            read = read_status(experiment)


def read_status(experiment: Path) -> Status:
    """The last status that an experiment's launcher has written."""
    folder = existing(experiment)
    try:
        return decode_file(Status, folder.status.read_bytes())
    except FileNotFoundError:
        raise ConfigError(
            f"{experiment}: no status.json, because it never ran under `starling train`; simulations, and learners "
            "that torchrun or Slurm start, do not write one"
        ) from None
    except (OSError, ProtocolError) as error:
        raise DataError(
            f"{folder.status}: cannot be read ({error}); a running launcher rewrites it every second"
        ) from error


def is_alive(status: Status) -> bool:
    """Whether the launcher that wrote a status still runs: the status is recent, and the process exists, as far as this
    machine can tell."""
    is_recent, is_here = time.time() - status.written < STATUS_FRESH, status.machine in ("", os.uname().nodename)
    try:
        if is_recent and is_here:
            os.kill(status.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # the process exists and belongs to another user
        return True
    return is_recent


def learners_of(roster: Roster) -> Iterator[LearnerStatus]:
    """The present status of all learners of a roster."""
    now = roster.clock()
    for record in sorted(roster.learners.values(), key=lambda each: each.learner_id):
        yield LearnerStatus(
            learner_id=record.learner_id,
            rank=record.rank,
            state=state_of(record, roster),
            num_steps=record.num_steps,
            loss=record.loss,
            heard=None if record.attempt.heard_at is None else now - record.attempt.heard_at,
            log=f"log/learner-{record.learner_id}.log",
            node=record.process.node,
        )


def state_of(record: LearnerRecord, roster: Roster) -> str:
    """A learner's state as text: `silent`, or else its state; during training, its computation or its wait."""
    if silence := roster.silence(record):
        return f"silent for {duration(silence)}"
    if record.state is LearnerState.READY:
        return "ready to join"
    if record.state is not LearnerState.TRAINING:
        return str(record.state.value)
    attempt, wait = record.attempt, record.attempt.wait
    if wait is not None and not wait.is_behind:
        is_named = wait.is_group or not wait.whom or f"learner {wait.whom[0]}" in wait.what
        whom = "" if is_named else f" for learner {', '.join(map(str, wait.whom[:8]))}"
        return f"waiting {duration(wait.seconds)} in {wait.what}{whom}"
    return attempt.doing if attempt.doing.startswith("computing") else "computing"


def describe(status: Status, now: float, is_alive: bool) -> Group:
    """A status as a table with text, at time `now`; `is_alive` says whether its launcher runs."""
    has_nodes = any(each.node for each in status.learners)
    right, folded = partial(Column, justify="right"), partial(Column, overflow="fold")
    nodes = [folded("node")] if has_nodes else []
    table = Table(right("learner"), "state", *map(right, ("batches", "loss", "last heard")), *nodes, folded("log"))
    since = max(0.0, now - status.written)
    for each in status.learners:
        heard = "none yet" if each.heard is None else f"{duration(each.heard + since)} ago"
        loss = "" if each.loss is None else f"{each.loss:.4f}"
        node = [each.node] if has_nodes else []
        table.add_row(str(each.learner_id), each.state, str(each.num_steps), loss, heard, *node, each.log)
    lines = [f"lost: {loss}" for loss in status.losses]
    if status.goodput:
        lines.append(status.goodput)
    if status.saved:
        lines.append(f"newest checkpoint: {status.saved}, saved {duration(status.saved_age + since)} ago")
    else:
        lines.append("no checkpoint of this run yet")
    if status.stage != "ended" and status.message:
        lines.insert(0, status.message)
    return Group(Text(_title(status, now, is_alive)), table, *(Text(line) for line in lines))


def _title(status: Status, now: float, is_alive: bool) -> str:
    what = f"{status.name}, {status.strategy}"
    if status.stage == "ended":
        took, ago = duration(status.written - status.began), duration(max(0.0, now - status.written))
        return f"{what}: ended {ago} ago after {took}, exit code {status.exit_code}: {status.message}"
    since = f"{status.stage}, began {duration(max(0.0, now - status.began))} ago"
    generation = f", membership {status.generation}" if status.generation >= 0 else ""
    if is_alive:
        return f"{what}: {since}{generation}"
    silent = duration(max(0.0, now - status.written))
    return f"{what}: its launcher (process {status.pid}) is gone or stalled; it wrote this {silent} ago, {since}"


def join(experiment: Path, learners: int, tell: Say) -> None:
    """Ask for more learners in a running experiment, and wait until they train.

    Raises ConfigError if nothing runs there or the request is refused, PeerLost if a learner failed while joining or
    the run ended first.
    """
    folder = existing(experiment)
    launcher = launcher_id(folder.joins)
    if launcher is None:
        raise ConfigError(f"{experiment}: nothing runs here; start it with: starling train {folder.config}")
    with writing(folder.joins, f"to add learners you need write access to {experiment}"):
        request = ask(folder.joins, learners)
    try:
        while True:
            is_over = launcher_id(folder.joins) != launcher  # checked before the last look for an answer
            if answer := take_answer(folder.joins, request):
                break
            if is_over:
                raise PeerLost(f"{experiment}: the run ended before a learner joined")
            time.sleep(ANSWER_EVERY)
    finally:
        withdraw(folder.joins, request)
    if answer.refused:
        raise ConfigError(f"{experiment}: no learner was added: {answer.refused}")
    if answer.joined:
        names = ", ".join(map(str, answer.joined))
        tell(f"joined as learner {names}; {answer.learners} learners train now; logs: {folder.log}")
    if answer.failed:
        raise PeerLost(f"{experiment}: " + "; ".join(answer.failed))
