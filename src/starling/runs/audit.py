"""`starling audit`: which learner saw what, and whether every utterance was seen once in every epoch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from starling.checkpoint.manifest import read_manifest
from starling.checkpoint.reader import latest
from starling.errors import DataError
from starling.runs.experiment.folder import existing
from starling.runs.experiment.seen import Sight, read_seen, read_skipped, start_of_record
from starling.runs.frame_plan import FramePlan, load_frame_plan
from starling.runs.recipe.recipe import Recipe, load_resolved
from starling.runs.training_plan import TrainingPlan, load_plan
from starling.workload import Position, Ticket

if TYPE_CHECKING:
    from starling.report.progress import Say

Plan = TrainingPlan | FramePlan

SHOWN = 5
"""Utterances that a message names; of more, it gives the number."""


@dataclass
class EpochAudit:
    """What learners saw of one epoch."""

    epoch: int
    num_batches: int
    """In the epoch's plan."""
    batches: Counter[int] = field(default_factory=Counter)
    """How often each was computed."""
    by_learner: Counter[int] = field(default_factory=Counter)
    """Mini-batches that each computed."""
    utterances: Counter[str] = field(default_factory=Counter)
    """How often each was seen."""
    num_skipped: int = 0
    """Utterances that could not be used."""
    strange: list[int] = field(default_factory=list)
    """Mini-batches that do not hold what the plan says."""


def audit(experiment: Path, tell: Say, output: Console) -> None:
    """Print what learners saw in each epoch, up to the newest checkpoint, and whether that was everything, once.

    Raises DataError if a mini-batch was computed twice or, before the position of the checkpoint, never.
    """
    folder = existing(experiment)
    recipe = load_resolved(folder.config)
    end = read_manifest(latest(experiment)).position
    plan: Plan
    if recipe.loss == "frames":
        plan = load_frame_plan(recipe, folder.frames)
    else:
        plan = load_plan(recipe, folder.too_short)
    epochs = collect(read_seen(folder.seen, end), plan, read_skipped(folder.seen))
    begin = start_of_record(folder.seen)
    output.print(_table(epochs))
    problems = problems_of(epochs, plan, begin, end)
    if begin.num_done:
        tell(
            f"the record begins at step {begin.num_done}: what came before is in the record of the run that this one "
            "continues"
        )
    if problems:
        raise DataError(f"{experiment}: " + "; ".join(problems))
    tell(_verdict(epochs, end, _expected(recipe, plan, epochs)))


def collect(sights: Iterable[Sight], plan: Plan, skipped: Mapping[int, Collection[str]]) -> list[EpochAudit]:
    """The record, epoch by epoch, each mini-batch beside its plan."""
    epochs: dict[int, EpochAudit] = {}
    for sight in sights:
        number = sight.ticket.epoch
        if number not in epochs:
            epochs[number] = EpochAudit(number, plan.epoch(number).num_batches)
        epochs[number].batches[sight.ticket.index] += 1
        epochs[number].by_learner[sight.learner] += 1
        epochs[number].utterances.update(sight.utterances)
        if plan.num_parts == 1 and sight.ticket.index < epochs[number].num_batches:
            missing = planned(plan, sight.ticket)
            strange = Counter(sight.utterances) - missing
            missing -= Counter(sight.utterances)
            epochs[number].num_skipped += sum(missing[name] for name in missing if name in skipped.get(number, ()))
            if strange or any(name not in skipped.get(number, ()) for name in missing):
                epochs[number].strange.append(sight.ticket.index)
    return [epochs[number] for number in sorted(epochs)]


def planned(plan: Plan, ticket: Ticket) -> Counter[str]:
    """The utterances, or sub-sequences, of a mini-batch."""
    return Counter(plan.ids(ticket))


def problems_of(epochs: list[EpochAudit], plan: Plan, begin: Position, end: Position) -> list[str]:
    """What was seen twice, or not at all though it was due between two positions; empty if all is well."""
    problems = []
    known = {each.epoch: each for each in epochs}
    before, undone = ({(ticket.epoch, ticket.index) for ticket in position.outstanding} for position in (begin, end))
    for epoch in range(begin.next_ticket.epoch, end.next_ticket.epoch + 1):
        last = end.next_ticket.index if epoch == end.next_ticket.epoch else plan.epoch(epoch).num_batches
        first = begin.next_ticket.index if epoch == begin.next_ticket.epoch else 0
        due = {index for index in range(first, last) if (epoch, index) not in undone}
        due |= {index for number, index in before - undone if number == epoch}
        seen = known[epoch].batches if epoch in known else Counter[int]()
        if missing := sorted(due - seen.keys()):
            problems.append(f"mini-batches {_some(missing)} of epoch {epoch + 1} were not computed")
        if twice := sorted(index for index, times in seen.items() if times > 1):
            problems.append(f"mini-batches {_some(twice)} of epoch {epoch + 1} were computed more than once")
        if epoch in known and known[epoch].strange:
            strange = _some(sorted(known[epoch].strange))
            problems.append(f"mini-batches {strange} of epoch {epoch + 1} did not hold the utterances of the plan")
    return problems


def _some(indices: list[int]) -> str:
    shown = ", ".join(str(index + 1) for index in indices[:SHOWN])
    return shown if len(indices) <= SHOWN else f"{shown} and {len(indices) - SHOWN} more"


def _table(epochs: list[EpochAudit]) -> Table:
    learners = sorted({learner for each in epochs for learner in each.by_learner})
    table = Table("epoch", "batches", "seen", "once", "more")
    for learner in learners[:16]:
        table.add_column(f"by {learner}", justify="right")
    for each in epochs:
        times = Counter(each.utterances.values())
        table.add_row(
            str(each.epoch + 1),
            f"{len(each.batches)}/{each.num_batches}",
            str(len(each.utterances)),
            str(times[1]),
            str(len(each.utterances) - times[1]),
            *(str(each.by_learner[learner]) for learner in learners[:16]),
        )
    return table


def _verdict(epochs: list[EpochAudit], end: Position, seen: str) -> str:
    line = f"every mini-batch before number {end.next_ticket.step + 1} was computed once"
    if end.outstanding:
        line += f", but for {len(end.outstanding)} that a resume computes first"
    return f"{line}; {seen}"


def _expected(recipe: Recipe, plan: Plan, epochs: list[EpochAudit]) -> str:
    """How often utterances were seen, beside how often they should have been."""
    if recipe.partition != "identical":
        return f"learners drew {plan.examples} at random from their parts"
    if recipe.mixture is not None and isinstance(plan, TrainingPlan):
        return _passes(plan, epochs)
    whole = [each for each in epochs if len(each.batches) == each.num_batches]
    if not whole:
        return "no epoch is whole yet"
    expected = plan.num_examples
    once = [each for each in whole if len(each.utterances) == expected and set(each.utterances.values()) == {1}]
    line = f"{len(once)} of {len(whole)} whole epochs saw each of {expected} {plan.examples} exactly once"
    if num_skipped := sum(each.num_skipped for each in whole):
        line += f"; {num_skipped} could not be used and were skipped"
    return line


def _passes(plan: TrainingPlan, epochs: list[EpochAudit]) -> str:
    """How often each domain of a mixture was gone through."""
    whole = [each for each in epochs if len(each.batches) == each.num_batches]
    times: Counter[str] = Counter()
    for each in whole:
        times.update(each.utterances)
    lines = []
    train = plan.speech_set
    for domain, (first, last) in zip(train.domains, pairwise(train.domain_bounds), strict=True):
        own = plan.utterances[(first <= plan.utterances) & (plan.utterances < last)]
        counts = [times[train.id(int(index))] for index in own]
        lines.append(
            f"{domain} {sum(counts) / len(counts):.2f} passes (each utterance {min(counts)} to {max(counts)} times)"
        )
    return f"in {len(whole)} whole epochs: " + ", ".join(lines)
