"""The summary of a run: how much each learner did, which were lost or joined, what was re-issued and saved."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Group
from rich.table import Table
from rich.text import Text

from starling.launch.roster import LearnerRecord, LearnerState, Roster
from starling.reporting.lines import duration


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
    table = Table()
    for heading in ("learner", "batches", "share", "computing", "waiting for data", "for peers", "outcome"):
        table.add_column(heading, justify="left" if heading == "outcome" else "right")
    numbers = {each: record.num_computed.get(each, learner.num_steps) for each, learner in roster.learners.items()}
    total = sum(numbers.values())
    for learner_id, learner in sorted(roster.learners.items()):
        share = f"{100 * numbers[learner_id] / total:.1f} %" if total else ""
        table.add_row(str(learner_id), str(numbers[learner_id]), share, *_shares(learner), _became(learner))
    return Group(Text(title), table, *(Text(line) for line in _lines(roster, record, waits, experiment)))


def _lines(roster: Roster, record: Record, waits: Sequence[str], experiment: str) -> list[str]:
    lines = [f"lost after {duration(each.at - roster.began_at)}: {each.reason}" for each in roster.lost]
    joined = [str(each.learner_id) for each in roster.learners.values() if each.num_joins]
    if joined:
        lines.append(f"joined the running experiment: learner {', '.join(joined)}")
    if roster.lost or roster.generation > 0:
        lines.append(
            f"{record.num_again} mini-batches that others had begun were re-issued; to check that nothing was missed: "
            f"starling audit {experiment}"
        )
    if record.num_skipped:
        lines.append(f"skipped utterances: {record.num_skipped}, listed in {experiment}/seen")
    if num_not_finite := sum(end.num_not_finite for each in roster.learners.values() for end in each.epochs):
        lines.append(f"gradients that were not finite and left out: {num_not_finite}")
    lines += waits
    lines.append(f"checkpoints: {roster.num_saved}, the newest {roster.saved}" if roster.saved else "checkpoints: none")
    return lines


def _shares(learner: LearnerRecord) -> list[str]:
    total = sum(end.seconds for end in learner.epochs)
    if total <= 0.0:
        return [""] * 3  # it reported no epoch
    parts = ((end.computing, end.waiting_for_data, end.waiting_for_peers) for end in learner.epochs)
    return [f"{100 * sum(part) / total:.1f} %" for part in zip(*parts, strict=True)]


def _became(learner: LearnerRecord) -> str:
    if learner.state is LearnerState.LOST:
        return "lost"
    if learner.state is LearnerState.LEFT:
        return "left"
    joined = "joined, " if learner.num_joins else ""
    return f"{joined}{'ended' if learner.state is LearnerState.ENDED else 'was ended'}"
