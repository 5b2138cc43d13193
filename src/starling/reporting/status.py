"""Makes the learners' part of `status.json` from a roster, and a table from a status."""

import math
from collections.abc import Iterator

from rich.console import Group
from rich.table import Table
from rich.text import Text

from starling.launch.messages import LearnerStatus, Status
from starling.launch.roster import LearnerRecord, LearnerState, Roster
from starling.reporting.lines import duration


def learners_of(roster: Roster) -> Iterator[LearnerStatus]:
    """The present status of all learners of a roster."""
    now = roster.clock()
    for record in sorted(roster.learners.values(), key=lambda each: each.learner_id):
        yield LearnerStatus(
            learner_id=record.learner_id,
            rank=record.rank,
            state=state_of(record, roster),
            num_steps=record.num_steps,
            loss=record.loss if record.loss is not None and math.isfinite(record.loss) else None,
            heard=None if record.heard_at is None else now - record.heard_at,
            log=f"log/learner-{record.learner_id}.log",
            node=record.process.node if record.process is not None else "",
        )


def state_of(record: LearnerRecord, roster: Roster) -> str:
    """A learner's state as text: that it is silent, else its state, and during training what it computes or waits
    for."""
    if silence := roster.silence(record):
        return f"silent for {duration(silence)}"
    if record.state is LearnerState.READY:
        return "ready to join"
    if record.state is not LearnerState.TRAINING:
        return str(record.state.value)
    wait = record.wait
    if wait is not None and not wait.is_behind:
        is_named = wait.is_group or not wait.whom or f"learner {wait.whom[0]}" in wait.what
        whom = "" if is_named else f" for learner {', '.join(map(str, wait.whom[:8]))}"
        return f"waiting {duration(wait.seconds)} in {wait.what}{whom}"
    return record.doing if record.doing.startswith("computing") else "computing"


def describe(status: Status, now: float, is_alive: bool) -> Group:
    """A status as a table with text, at time `now`; `is_alive` says whether its launcher runs."""
    table = Table()
    for name, justify in (("learner", "right"), ("state", "left"), ("batches", "right"), ("loss", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    table.add_column("last heard", justify="right")
    has_nodes = any(each.node for each in status.learners)
    if has_nodes:
        table.add_column("node", justify="left", no_wrap=True)
    table.add_column("log", justify="left", no_wrap=True)
    since = max(0.0, now - status.written)
    for each in status.learners:
        heard = "none yet" if each.heard is None else f"{duration(each.heard + since)} ago"
        loss = "" if each.loss is None else f"{each.loss:.4f}"
        node = [each.node] if has_nodes else []
        table.add_row(str(each.learner_id), each.state, str(each.num_steps), loss, heard, *node, each.log)
    lines = [f"lost: {loss}" for loss in status.losses]
    if status.saved:
        lines.append(f"newest checkpoint: {status.saved}, saved {duration(status.saved_age + since)} ago")
    else:
        lines.append("no checkpoint of this run yet")
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
