"""What is known of a running experiment, as it stands in its `status.json`, and the table made of it."""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from starling.report.lines import duration
from starling.report.roster import Known, Roster

Seconds = float
FORMAT = 1


@dataclass(frozen=True)
class LearnerStatus:
    """One learner. Ages are seconds before the status was written; None: never."""

    name: int
    state: str
    num_steps: int
    loss: float | None
    heard: Seconds | None
    log: str
    """Inside the experiment's folder."""


@dataclass(frozen=True)
class Status:
    """A run at one moment. Times are seconds since the epoch."""

    name: str
    strategy: str
    stage: str
    """`training`, `scoring` or `ended`."""
    began: float
    written: float
    pid: int
    """Of the launcher."""
    view: int
    learners: tuple[LearnerStatus, ...]
    losses: tuple[str, ...]
    """A reason for each learner that was lost."""
    saved: str
    """The newest checkpoint, or nothing."""
    saved_age: Seconds
    exit_code: int | None
    message: str
    """How it ended."""
    format: int = FORMAT

    def encode(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def decode(cls, text: str) -> "Status":
        """From what `encode` gave; ValueError for anything else."""
        try:
            read: dict[str, Any] = json.loads(text)
            if read["format"] != FORMAT:
                raise ValueError(f"format {read['format']}, but this version reads {FORMAT}")
            learners = tuple(LearnerStatus(**each) for each in read.pop("learners"))
            return cls(learners=learners, losses=tuple(read.pop("losses")), **read)
        except (KeyError, TypeError) as error:
            raise ValueError(f"not the status of a run: {error!r}") from error


def learners_of(roster: Roster) -> Iterator[LearnerStatus]:
    """All learners of a roster as they are now."""
    now = roster.clock()
    for known in sorted(roster.learners.values(), key=lambda each: each.name):
        yield LearnerStatus(
            name=known.name,
            state=state_of(known, roster),
            num_steps=known.num_steps,
            loss=known.loss if known.loss is not None and math.isfinite(known.loss) else None,
            heard=None if known.heard_at is None else now - known.heard_at,
            log=f"log/learner-{known.name}.log",
        )


def state_of(known: Known, roster: Roster) -> str:
    """What a learner is in, in words: starting, computing, waiting, silent, lost or ended."""
    if known.is_lost:
        return "lost"
    if known.has_ended:
        return "ended"
    if silence := roster.silence(known):
        return f"silent for {duration(silence)}"
    wait = known.wait
    if wait is not None and not wait.is_behind:
        is_told = wait.is_group or not wait.whom or f"learner {wait.whom[0]}" in wait.what
        whom = "" if is_told else f" for learner {', '.join(map(str, wait.whom[:8]))}"
        return f"waiting {duration(wait.seconds)} in {wait.what}{whom}"
    if known.view < 0 and known.num_steps == known.num_before:
        return "starting"
    return known.doing if known.doing.startswith("computing") else "computing"


def describe(status: Status, now: float, is_alive: bool) -> Group:
    """What people see of a status at time `now`; `is_alive`: whether its launcher is there."""
    table = Table()
    for name, justify in (("learner", "right"), ("state", "left"), ("batches", "right"), ("loss", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    table.add_column("last heard", justify="right")
    table.add_column("log", justify="left", no_wrap=True)
    since = max(0.0, now - status.written)
    for each in status.learners:
        heard = "none yet" if each.heard is None else f"{duration(each.heard + since)} ago"
        loss = "" if each.loss is None else f"{each.loss:.4f}"
        table.add_row(str(each.name), each.state, str(each.num_steps), loss, heard, each.log)
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
    view = f", view {status.view}" if status.view >= 0 else ""
    if is_alive:
        return f"{what}: {since}{view}"
    silent = duration(max(0.0, now - status.written))
    return f"{what}: its launcher (process {status.pid}) is gone or stands still; it wrote this {silent} ago, {since}"
