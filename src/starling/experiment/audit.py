"""`starling audit`: which learner saw which utterances, and whether each epoch saw every utterance exactly once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from starling.checkpoint.manifest import read_manifest
from starling.checkpoint.reader import latest
from starling.errors import DataError
from starling.experiment.folder import existing
from starling.experiment.seen import SeenBatch, read_seen, read_skipped, segments, start_of_record
from starling.experiment.task import MiniBatches, task_of
from starling.recipe.file import read_recipe
from starling.workload import Position, Ticket

if TYPE_CHECKING:
    from starling.reporting.progress import Say

MAX_SHOWN = 5
"""How many mini-batches a message lists by number."""


@dataclass
class EpochAudit:
    """What learners saw in one epoch. Mini-batches are identified by their index in the epoch, from 0."""

    epoch: int
    num_batches: int
    """Mini-batches in the epoch's plan."""
    batches: Counter[int] = field(default_factory=Counter)
    """How often each mini-batch was computed."""
    by_learner: Counter[int] = field(default_factory=Counter)
    """How many mini-batches each learner computed."""
    examples: Counter[str] = field(default_factory=Counter)
    """How often each example was seen."""
    num_skipped: int = 0
    """Planned examples that could not be used."""
    mismatched: list[int] = field(default_factory=list)
    """Mini-batches whose examples are not those of the plan."""

    @property
    def is_complete(self) -> bool:
        """Whether every mini-batch was computed."""
        return len(self.batches) == self.num_batches


def audit(experiment: Path, tell: Say, output: Console) -> None:
    """Print what learners saw in each epoch, up to the newest checkpoint, and check it against the plan.

    Raises DataError if a mini-batch was computed twice, did not contain the utterances of the plan, or is missing
    although it is due at the position of the checkpoint.
    """
    folder = existing(experiment)
    task = task_of(tree := read_recipe(folder.config))
    recipe = task.check_resolved(tree, str(folder.config))
    end = read_manifest(latest(experiment)).position
    plan = task.mini_batches(recipe, folder)
    epochs = collect(read_seen(folder.seen, end), plan, read_skipped(segments(folder.seen)))
    begin = start_of_record(folder.seen)
    output.print(_table(epochs))
    problems = problems_of(epochs, plan, begin, end)
    if begin.num_done:
        tell(
            f"the record begins at step {begin.num_done}: earlier mini-batches are in the record of the run from which "
            "this one was resumed"
        )
    if problems:
        raise DataError(f"{experiment}: " + "; ".join(problems))
    tell(_verdict(epochs, end, _expected(plan, epochs)))


def collect(seen: Iterable[SeenBatch], plan: MiniBatches, skipped: Mapping[int, Collection[str]]) -> list[EpochAudit]:
    """Sum up the record for each epoch, and compare each mini-batch with the plan. `skipped` lists the utterances that
    were skipped in each epoch."""
    epochs: dict[int, EpochAudit] = {}
    for batch in seen:
        number = batch.ticket.epoch
        if number not in epochs:
            epochs[number] = EpochAudit(number, plan.num_batches(number))
        epochs[number].batches[batch.ticket.index] += 1
        epochs[number].by_learner[batch.learner] += 1
        epochs[number].examples.update(batch.utterances)
        if plan.num_parts == 1 and batch.ticket.index < epochs[number].num_batches:
            missing = planned(plan, batch.ticket)
            unplanned = Counter(batch.utterances) - missing
            missing -= Counter(batch.utterances)
            epochs[number].num_skipped += sum(missing[name] for name in missing if name in skipped.get(number, ()))
            if unplanned or any(name not in skipped.get(number, ()) for name in missing):
                epochs[number].mismatched.append(batch.ticket.index)
    return [epochs[number] for number in sorted(epochs)]


def planned(plan: MiniBatches, ticket: Ticket) -> Counter[str]:
    """The examples that the plan assigns to a mini-batch."""
    return Counter(plan.ids(ticket))


def problems_of(epochs: list[EpochAudit], plan: MiniBatches, begin: Position, end: Position) -> list[str]:
    """Describe mini-batches that were computed twice, differ from the plan, or are missing between two positions."""
    problems = []
    known = {each.epoch: each for each in epochs}
    before, outstanding = (
        {(ticket.epoch, ticket.index) for ticket in position.outstanding} for position in (begin, end)
    )
    for epoch in range(begin.next_ticket.epoch, end.next_ticket.epoch + 1):
        last = end.next_ticket.index if epoch == end.next_ticket.epoch else plan.num_batches(epoch)
        first = begin.next_ticket.index if epoch == begin.next_ticket.epoch else 0
        due = {index for index in range(first, last) if (epoch, index) not in outstanding}
        due |= {index for number, index in before - outstanding if number == epoch}
        seen = known[epoch].batches if epoch in known else Counter[int]()
        if missing := sorted(due - seen.keys()):
            problems.append(f"mini-batches {_some(missing)} of epoch {epoch + 1} were not computed")
        if twice := sorted(index for index, times in seen.items() if times > 1):
            problems.append(f"mini-batches {_some(twice)} of epoch {epoch + 1} were computed more than once")
        if epoch in known and known[epoch].mismatched:
            mismatched = _some(sorted(known[epoch].mismatched))
            problems.append(
                f"mini-batches {mismatched} of epoch {epoch + 1} did not contain the utterances of the plan"
            )
    return problems


def _some(indices: list[int]) -> str:
    shown = ", ".join(str(index + 1) for index in indices[:MAX_SHOWN])
    return shown if len(indices) <= MAX_SHOWN else f"{shown} and {len(indices) - MAX_SHOWN} more"


def _table(epochs: list[EpochAudit]) -> Table:
    learners = sorted({learner for each in epochs for learner in each.by_learner})
    table = Table("epoch", "batches", "seen", "once", "more")
    for learner in learners[:16]:
        table.add_column(f"by {learner}", justify="right")
    for each in epochs:
        times = Counter(each.examples.values())
        table.add_row(
            str(each.epoch + 1),
            f"{len(each.batches)}/{each.num_batches}",
            str(len(each.examples)),
            str(times[1]),
            str(len(each.examples) - times[1]),
            *(str(each.by_learner[learner]) for learner in learners[:16]),
        )
    return table


def _verdict(epochs: list[EpochAudit], end: Position, seen: str) -> str:
    line = f"every mini-batch before number {end.next_ticket.step + 1} was computed once"
    if end.outstanding:
        line += f", except {len(end.outstanding)} that a resumed run computes first"
    return f"{line}; {seen}"


def _expected(plan: MiniBatches, epochs: list[EpochAudit]) -> str:
    """How often examples were seen, compared with how often they should have been."""
    if plan.num_parts > 1:
        return f"learners drew {plan.examples} at random from their parts"
    complete = [each for each in epochs if each.is_complete]
    times: Counter[str] = Counter()
    for each in complete:
        times.update(each.examples)
    if (passes := plan.passes(times)) is not None:
        return f"in {len(complete)} complete epochs: {passes}"
    if not complete:
        return "no epoch is complete yet"
    expected = plan.num_examples
    once = [each for each in complete if len(each.examples) == expected and set(each.examples.values()) == {1}]
    line = f"{len(once)} of {len(complete)} complete epochs saw each of {expected} {plan.examples} exactly once"
    if num_skipped := sum(each.num_skipped for each in complete):
        line += f"; {num_skipped} could not be used and were skipped"
    return line
