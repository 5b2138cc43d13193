"""`starling replay` and `starling.replay`: an experiment again, in the recorded order, with the same bits.

Mini-batches, augmentation and dropout are functions of their tickets, so only the order of a run is recorded: see
`starling.training.order`, and docs/replay.md.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from starling.checkpoint.reader import load
from starling.checkpoint.state import LearnerState
from starling.engines.virtual.engine import Outcome
from starling.engines.virtual.replay import RecordEnded, ReplayEngine, Script
from starling.errors import ConfigError, ReplayError
from starling.experiment.folder import ExperimentFolder, existing
from starling.experiment.record import events_in, segments
from starling.experiment.task import task_of
from starling.recipe.file import read_recipe
from starling.reporting.progress import Bars, Say
from starling.strategies.islands import NO_ISLANDS
from starling.training.job import Job, Observer, StepReport
from starling.training.order import ARITHMETIC, arithmetic

OnProgress = Callable[[str, int, int], object]
RACES = ("hogwild",)
"""Strategies whose learners race for single numbers, so that no order of events determines their weights."""


@dataclass(frozen=True)
class Replayed:
    """The result of `starling.replay`."""

    outcome: Outcome
    """What the virtual engine has, at the end: the learners' states."""
    states: Mapping[int, int]
    """How many recorded hashes of weights were found again, by learner: all of them."""
    scripts: Sequence[Script]
    """What the record has of each learner, by membership and rank."""


class States(Observer):
    """Keeps the hashes of states that a record has."""

    def __init__(self, saves: bool, told: Callable[[int], object]) -> None:
        self._saves, self._told, self._num_steps = saves, told, 0
        self.found: dict[tuple[int, int], list[tuple[int, str]]] = defaultdict(list)
        """By membership and learner."""
        self._number = 0

    @property
    def saves(self) -> bool:
        return self._saves

    @property
    def records(self) -> bool:
        return True

    def on_step(self, report: StepReport) -> None:
        self._num_steps += 1
        self._told(self._num_steps)

    def on_event(self, rank: int, kind: str, **fields: object) -> None:
        if kind == "membership":
            self._number = int(str(fields["number"]))
        if kind == "state":
            self.found[self._number, rank].append((int(str(fields["step"])), str(fields["sha256"])))


def replay(job: Job, experiment: Path | str, progress: OnProgress = lambda name, done, total: None) -> Replayed:
    """Run an experiment again, in this process and in the recorded order, and check its weights.

    Each learner's weights at each checkpoint and at the end have the hashes that its process recorded.

    Args:
        job: The job that was trained.
        experiment: The experiment's folder.
        progress: Called with `mini-batches`, how many have been computed, and how many there are.

    Raises:
        ReplayError: The record is damaged or of other code, this machine computes otherwise, or weights differ.
        ConfigError: The strategy cannot be replayed, or there is no record.

    Example:
        >>> from starling.toy import regression
        >>> job = regression("adpsgd")
        >>> trained = starling.train(job, learners=2, name="again")  # doctest: +SKIP
        >>> sorted(starling.replay(job, trained.folder).states)  # doctest: +SKIP
        [0, 1]
    """
    if job.strategy.name in RACES:
        raise ConfigError(
            f"{job.strategy.name} cannot be replayed: its learners change single numbers of one memory at the same "
            "time, which no order of events describes"
        )
    if job.island != NO_ISLANDS:
        raise ConfigError(
            "a run with islands cannot be replayed: torch sums what their ranks exchange, in its own order"
        )
    folder = ExperimentFolder(Path(experiment))
    memberships = read_scripts(folder)
    scripts = [script for each in memberships for script in each]
    start = _start(job, folder, len(memberships[0]))
    total = sum(len(script.batches) for script in scripts)
    observer = States(scripts[0].saves, lambda done: progress("mini-batches", done, total))
    ended: RecordEnded | None = None
    with _as_recorded(scripts):
        try:
            outcome = ReplayEngine(job, memberships, observer, start).run()
        except RecordEnded as error:
            ended = error
    for script in scripts:
        _compare(script, observer.found[script.number, script.learner])
    if ended is not None:
        raise ended
    return Replayed(outcome, Counter(script.learner for script in scripts for _ in script.states), scripts)


def read_scripts(folder: ExperimentFolder) -> list[list[Script]]:
    """What the record has of the learners of each membership, by rank. Raises ConfigError if there is none,
    ReplayError if it is damaged or has gaps."""
    found = segments(folder.seen)
    if not found:
        raise ConfigError(f"{folder.path}: nothing was recorded here; train with this version of Starling first")
    memberships = [_scripts_in(segment) for segment in found]
    for number, scripts in enumerate(memberships):
        if scripts[0].number != number:
            what = "the run was resumed" if scripts[0].number < number else f"membership {number} has no record"
            raise ReplayError(f"{found[number]}: {what}; a replay needs the record of a run from its beginning")
    return memberships


def _scripts_in(segment: Path) -> list[Script]:
    scripts: dict[int, Script] = {}
    for learner, place, event in events_in(segment):
        script = scripts.setdefault(learner, Script(learner))
        try:
            if event is None:
                raise ValueError("not an event, or not as it was written")
            script.add(event)
        except (KeyError, TypeError, ValueError) as error:
            raise ReplayError(f"{place}: damaged: {error}") from None
    members = next((script.members for script in scripts.values() if script.members), None)
    if members is None:
        raise ReplayError(f"{segment}: no learner recorded its membership; the record is of an earlier version")
    if missing := [learner for learner in members if learner not in scripts]:
        raise ReplayError(f"{segment}: no record of learners {missing}")
    return [scripts[learner] for learner in members]


def replay_recipe(experiment: Path, tell: Say, console: Console) -> None:
    """Replay the experiment of a recipe, and print what was checked."""
    folder = existing(experiment)
    task = task_of(tree := read_recipe(folder.config))
    recipe = task.check_resolved(tree, str(folder.config))
    with Bars(console) as bars:
        replayed = replay(task.make_job(recipe, folder), experiment, bars)
    output = Table("member-\nship", "learner", "batches", "turns", "states")
    for script in replayed.scripts:
        counts = script.number, script.learner, len(script.batches), len(script.turns), len(script.states)
        output.add_row(*map(str, counts))
    console.print(output)
    num_states = sum(replayed.states.values())
    tell(f"replayed {experiment}: {num_states} states, each with the same weights as in the run, bit for bit")


def _start(job: Job, folder: ExperimentFolder, world: int) -> list[LearnerState] | None:
    """The states in which the learners began."""
    resumed = read_recipe(folder.config).get("resume")
    if not resumed:
        return None
    checkpoint, described = load(Path(resumed)), job.strategy.described(job.options)
    return [checkpoint.start(rank, world, described) for rank in range(world)]


@contextmanager
def _as_recorded(scripts: Sequence[Script]) -> Generator[None, None, None]:
    """A context in which this process computes as the learners did. Raises ReplayError if it cannot."""
    threads = torch.get_num_threads()
    for script in scripts:
        torch.set_num_threads(int(script.arithmetic["threads"]))
        here = arithmetic(torch.device("cpu"))
        for name in ARITHMETIC:
            if script.arithmetic[name] != here[name]:
                torch.set_num_threads(threads)
                raise ReplayError(
                    f"learner {script.learner} computed with {name} {script.arithmetic[name]}, but it is {here[name]} "
                    "here, where other bits are computed; replay where the run was made"
                )
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _compare(script: Script, found: Sequence[tuple[int, str]]) -> None:
    """Raise ReplayError unless the replay has the states of the record."""
    for number, (step, sha256) in enumerate(script.states):
        if number >= len(found) or found[number] != (step, sha256):
            has = "has none" if number >= len(found) else f"has {found[number][1][:12]} after {found[number][0]} steps"
            raise ReplayError(
                f"learner {script.learner}: its state number {number + 1}, after {step} steps, has the hash "
                f"{sha256[:12]}, but the replay {has}"
            )
