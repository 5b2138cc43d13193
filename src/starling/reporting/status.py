"""What a roster tells: the learners' part of `status.json`, a table of a status, and the summary of a run."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich.console import Group
from rich.table import Column, Table
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
    has_nodes = any(each.node for each in status.learners)
    numbers = (Column(name, justify="right") for name in ("batches", "loss", "last heard"))
    places = (Column(name, no_wrap=True) for name in (["node"] if has_nodes else []) + ["log"])
    table = Table(Column("learner", justify="right"), "state", *numbers, *places)
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


@dataclass(frozen=True)
class Record:
    """Counts from a run's record of mini-batches, without the runs that it resumed."""

    num_computed: dict[int, int] = field(default_factory=dict)
    """Mini-batches computed by each learner."""
    num_again: int = 0
    """Mini-batches that were re-issued after a change of the membership."""
    num_skipped: int = 0
    """Utterances that could not be used, counted each time they were skipped."""


def summarise(title: str, roster: Roster, record: Record, waits: Sequence[str], experiment: str) -> Group:
    """The table, and the lines below it. `waits` are the lines about stalls that have ended."""
    numbers_of = ("learner", "batches", "share", "computing", "waiting for data", "for peers")
    table = Table(*(Column(name, justify="right") for name in numbers_of), "outcome")
    numbers = {each: record.num_computed.get(each, learner.num_steps) for each, learner in roster.learners.items()}
    total = sum(numbers.values())
    for learner_id, learner in sorted(roster.learners.items()):
        share = f"{100 * numbers[learner_id] / total:.1f} %" if total else ""
        table.add_row(str(learner_id), str(numbers[learner_id]), share, *_shares(learner), _became(learner))
    return Group(Text(title), table, *(Text(line) for line in _lines(roster, record, waits, experiment)))


def _lines(roster: Roster, record: Record, waits: Sequence[str], experiment: str) -> list[str]:
    lines = [f"lost after {duration(each.at - roster.began_at)}: {each.reason}" for each in roster.lost]
    joined = [str(each.learner_id) for each in roster.learners.values() if each.has_joined]
    if joined:
        lines.append(f"joined the running experiment: learner {', '.join(joined)}")
    if roster.lost or roster.generation > 0:
        lines.append(
            f"{record.num_again} mini-batches that others had begun were re-issued; to check that nothing was missed: "
            f"starling audit {experiment}"
        )
    if record.num_skipped:
        lines.append(f"skipped utterances: {record.num_skipped}, listed in {experiment}/seen")
    if num_not_finite := sum(each.num_not_finite for each in roster.learners.values()):
        lines.append(f"gradients that were not finite and left out: {num_not_finite}")
    lines += waits
    lines.append(f"checkpoints: {roster.num_saved}, the newest {roster.saved}" if roster.saved else "checkpoints: none")
    return lines


def _shares(learner: LearnerRecord) -> list[str]:
    if learner.seconds <= 0.0:
        return [""] * 3  # it reported no epoch
    parts = (learner.computing, learner.waiting_for_data, learner.waiting_for_peers)
    return [f"{100 * part / learner.seconds:.1f} %" for part in parts]


def _became(learner: LearnerRecord) -> str:
    if learner.state is LearnerState.LOST:
        return "lost"
    if learner.state is LearnerState.LEFT:
        return "left"
    joined = "joined, " if learner.has_joined else ""
    return f"{joined}{'ended' if learner.state is LearnerState.ENDED else 'was ended'}"
