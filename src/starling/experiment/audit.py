"""`starling audit`: which learner saw which utterances, and whether each epoch saw every utterance exactly once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from starling.checkpoint.manifest import read_manifest
from starling.checkpoint.reader import latest
from starling.errors import DataError, some
from starling.experiment.folder import existing
from starling.experiment.record import SeenBatch, read_seen, read_skipped, segments, start_of
from starling.experiment.task import MiniBatches, task_of
from starling.recipe.file import read_recipe
from starling.workload import Position

if TYPE_CHECKING:
    from starling.reporting.progress import Say


@dataclass
class EpochAudit:
    """The record of what learners saw in one epoch. Mini-batches are identified by their index in the epoch, from 0."""

    epoch: int
    num_batches: int
    """Number of mini-batches in the epoch's plan."""
    batches: Counter[int] = field(default_factory=Counter)
    """Number of times that each mini-batch was computed."""
    by_learner: Counter[int] = field(default_factory=Counter)
    """Number of mini-batches that each learner computed."""
    examples: Counter[str] = field(default_factory=Counter)
    """Number of times that each example was seen."""
    num_skipped: int = 0
    """Number of planned examples that could not be used."""
    mismatched: list[int] = field(default_factory=list)
    """Mini-batches whose examples differ from the plan."""

    def add(self, batch: SeenBatch, planned: Iterable[str] | None, skipped: Collection[str]) -> None:
        """Count a mini-batch, and compare it with the plan, if there is one; `skipped` are the utterances that were
        skipped in the epoch."""
        self.batches[batch.ticket.index] += 1
        self.by_learner[batch.learner] += 1
        self.examples.update(batch.utterances)
        found = Counter(batch.utterances)
        expected = found if planned is None else Counter(planned)
        missing = expected - found
        num_skipped = sum(number for name, number in missing.items() if name in skipped)
        self.num_skipped += num_skipped
        if found - expected or num_skipped < missing.total():
            self.mismatched.append(batch.ticket.index)

    def problems(self, due: set[int]) -> Iterator[str]:
        """Describe mini-batches that are `due` and missing, were computed twice, or differ from the plan."""
        twice = [index for index, times in self.batches.items() if times > 1]
        for indices, what in (
            (due - self.batches.keys(), "were not computed"),
            (twice, "were computed more than once"),
            (self.mismatched, "did not contain the utterances of the plan"),
        ):
            if indices:
                yield f"mini-batches {some([index + 1 for index in sorted(indices)])} of epoch {self.epoch + 1} {what}"


def audit(experiment: Path, tell: Say, output: Console) -> None:
    """Print what learners saw in each epoch, up to the newest checkpoint, and check it against the plan.

    Raises DataError if a mini-batch was computed twice, did not contain the utterances of the plan, or is missing
    although it is due at the position of the checkpoint.
    """
    folder = existing(experiment)
    task = task_of(tree := read_recipe(folder.config))
    recipe = task.check_resolved(tree, str(folder.config))
    plan, record = task.mini_batches(recipe, folder), segments(folder.seen)
    skipped, begin = read_skipped(record), start_of(record[0]) if record else Position()
    end = read_manifest(latest(experiment)).position
    found: dict[int, EpochAudit] = {}
    for batch in read_seen(folder.seen, end):
        number = batch.ticket.epoch
        if number not in found:
            found[number] = EpochAudit(number, plan.num_batches(number))
        is_planned = plan.num_parts == 1 and batch.ticket.index < found[number].num_batches
        found[number].add(batch, plan.ids(batch.ticket) if is_planned else None, skipped.get(number, ()))
    epochs = [found[number] for number in sorted(found)]
    output.print(_table(epochs))
    problems: list[str] = []
    for number in range(begin.next_ticket.epoch, end.next_ticket.epoch + 1):
        problems += found.get(number, EpochAudit(number, 0)).problems(_due(plan, number, begin, end))
    if begin.num_done:
        tell(
            f"the record begins at step {begin.num_done}: earlier mini-batches are in the record of the run from which "
            "this one was resumed"
        )
    if problems:
        raise DataError(f"{experiment}: " + "; ".join(problems))
    line = f"every mini-batch before number {end.next_ticket.step + 1} was computed once"
    if end.outstanding:
        line += f", except {len(end.outstanding)} that a resumed run computes first"
    tell(f"{line}; {_expected(plan, epochs)}")


def _due(plan: MiniBatches, epoch: int, begin: Position, end: Position) -> set[int]:
    """The mini-batches of an epoch that should have been computed between two positions."""
    before, outstanding = (
        {ticket.index for ticket in position.outstanding if ticket.epoch == epoch} for position in (begin, end)
    )
    first = begin.next_ticket.index if epoch == begin.next_ticket.epoch else 0
    last = end.next_ticket.index if epoch == end.next_ticket.epoch else plan.num_batches(epoch)
    return (before | set(range(first, last))) - outstanding


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


def _expected(plan: MiniBatches, epochs: list[EpochAudit]) -> str:
    """A sentence that compares how often examples were seen with how often they should have been."""
    if plan.num_parts > 1:
        return f"learners drew {plan.examples} at random from their parts"
    complete = [each for each in epochs if len(each.batches) == each.num_batches]
    times = sum((each.examples for each in complete), Counter[str]())
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
