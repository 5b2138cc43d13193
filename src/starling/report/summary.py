"""What became of a run, on one screen: who did how much, who was lost, what was given out again, what was saved."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Group
from rich.table import Table
from rich.text import Text

from starling.report.lines import duration
from starling.report.roster import Known, Roster


@dataclass(frozen=True)
class Record:
    """What a run has written down of who computed what, itself alone, without the runs that it goes on with."""

    num_computed: dict[int, int] = field(default_factory=dict)
    """Mini-batches by learner."""
    num_again: int = 0
    """Mini-batches that were given out again when learners were lost."""
    num_skipped: int = 0
    """Utterances that could not be used, as often as they were skipped."""


def summarise(title: str, roster: Roster, record: Record, waits: Sequence[str], experiment: str) -> Group:
    """The table and the lines below it. `waits` are the lines about unusual waits."""
    table = Table()
    for heading in ("learner", "batches", "share", "computing", "waiting for data", "for peers", "became"):
        table.add_column(heading, justify="left" if heading == "became" else "right")
    numbers = {name: record.num_computed.get(name, known.num_steps) for name, known in roster.learners.items()}
    total = sum(numbers.values())
    for name, known in sorted(roster.learners.items()):
        share = f"{100 * numbers[name] / total:.1f} %" if total else ""
        table.add_row(str(name), str(numbers[name]), share, *_shares(known), _became(known))
    return Group(Text(title), table, *(Text(line) for line in _lines(roster, record, waits, experiment)))


def _lines(roster: Roster, record: Record, waits: Sequence[str], experiment: str) -> list[str]:
    lines = [f"lost after {duration(each.at - roster.began_at)}: {each.reason}" for each in roster.losses]
    joined = [str(each.name) for each in roster.learners.values() if each.has_joined]
    if joined:
        lines.append(f"joined while the run went on: learner {', '.join(joined)}")
    if roster.losses or roster.view > 0:
        lines.append(
            f"{record.num_again} mini-batches that others had begun were given out again; who saw what, and whether "
            f"nobody did: starling audit {experiment}"
        )
    if record.num_skipped:
        lines.append(f"skipped utterances: {record.num_skipped}, listed in {experiment}/seen")
    if num_not_finite := sum(each.num_not_finite for each in roster.learners.values()):
        lines.append(f"gradients that were not finite and left out: {num_not_finite}")
    lines += waits
    lines.append(f"checkpoints: {roster.num_saved}, the newest {roster.saved}" if roster.saved else "checkpoints: none")
    return lines


def _shares(known: Known) -> list[str]:
    if known.seconds <= 0.0:
        return [""] * 3  # it reported no epoch
    parts = (known.computing, known.waiting_for_data, known.waiting_for_peers)
    return [f"{100 * part / known.seconds:.1f} %" for part in parts]


def _became(known: Known) -> str:
    if known.is_lost:
        return "lost"
    joined = "joined, " if known.has_joined else ""
    return f"{joined}{'ended' if known.has_ended else 'was ended'}"
