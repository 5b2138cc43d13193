"""`starling replay` and `starling.replay`, which run an experiment again in the recorded order, with bit-identical
results; and what the learners of a run with `follow` read of a record.

Mini-batches, augmentation and dropout are functions of their tickets, so a run needs to record only the order of its
events. See `starling.training.order` and docs/replay.md.
"""

import math
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from statistics import median
from types import CodeType
from typing import cast

import torch
from rich.console import Console
from rich.table import Column, Table

from starling.checkpoint.files import read_manifest
from starling.checkpoint.reader import Checkpoint, CheckpointInMemory, latest, load
from starling.checkpoint.state import LearnerState
from starling.engines.virtual.engine import Outcome
from starling.engines.virtual.replay import Moment, RecordEnded, ReplayEngine, ReplayStopped
from starling.errors import ConfigError, ReplayError
from starling.experiment.folder import ExperimentFolder, existing
from starling.experiment.record import RECIPE, events_in, segments
from starling.experiment.task import task_of
from starling.recipe import apply_overrides, read_recipe
from starling.recipe.run import RunConfig
from starling.reporting.metrics import Curves
from starling.reporting.progress import Bars
from starling.strategies.islands import NO_ISLANDS, Island
from starling.training.flat import FlatModel
from starling.training.job import EpochReport, Job, Observer, StepReport
from starling.training.order import NO_BATCH, RACES, Script, sha256_of
from starling.training.succession import MembershipStart
from starling.workload import Position

OnProgress = Callable[[str, int, int], object]
Watch = Callable[[Moment], bool]
TOLERANCE = 0.01
"""Largest accepted difference between the final weights of a run and of its replay, if a backend chose the order of the
run's sums. The difference is a fraction of the distance by which training moved the weights."""


@dataclass(frozen=True)
class Run:
    """The record of a run from one start or resume to the next."""

    segments: Sequence[Path]
    """Folder of the record of each membership."""
    memberships: Sequence[Sequence[Script]]
    """Records of the learners, by membership and rank."""

    @property
    def plan(self) -> MembershipStart:
        """The plan with which the run began."""
        return MembershipStart.decode(self.memberships[0][0].plan)

    @property
    def scripts(self) -> list[Script]:
        """The records of all learners in all memberships."""
        return [script for each in self.memberships for script in each]


def check_strategy(name: str, island: Island) -> None:
    """Raise ConfigError if a run with this strategy and these islands cannot be replayed."""
    if name in RACES:
        raise ConfigError(
            f"{name} cannot be replayed: its learners change single numbers of one memory at the same "
            "time, which no order of events describes"
        )
    if island != NO_ISLANDS:
        raise ConfigError(
            "a run with islands cannot be replayed: torch sums what their ranks exchange, in its own order"
        )


def check_follow(run: RunConfig) -> None:
    """Raise ConfigError or ReplayError if the learners of a run cannot keep to the order in `follow`."""
    path = cast(Path, run.follow)
    if path.resolve() == run.folder.resolve():
        raise ConfigError(f"follow: {path} is the folder of this run itself; set name to another one")
    check_strategy(run.strategy.name, run.island)
    scripts = _scripts_for(run)
    if len(scripts) != run.learners:
        raise ConfigError(f"follow: {path} has the record of {len(scripts)} learners; set learners to as many")
    for script in scripts:
        if NO_BATCH not in script.turns:
            raise ReplayError(f"follow: the record of learner {script.learner} in {path} ends before its run did")


def script_to_follow(run: RunConfig, learner: int) -> Script | None:
    """The record of a learner that the run follows; None if the run follows none."""
    return None if run.follow is None else _scripts_for(run)[learner]


def _scripts_for(run: RunConfig) -> Sequence[Script]:
    """The records, in `follow`, of the learners of the run that began where this one begins."""
    path, done = cast(Path, run.follow), 0
    if run.resume is not None:
        done = read_manifest(run.resume).position.num_done
    found = next((each for each in read_runs(existing(path)) if each.plan.position.num_done == done), None)
    if found is None:
        raise ConfigError(f"follow: no run recorded in {path} resumed after {done} mini-batches, as this one does")
    if len(found.memberships) > 1:
        raise ConfigError(
            f"follow: learners of {path} were lost or joined; learners can only keep to the order of a run without "
            "this, but `starling replay` replays any run"
        )
    return found.scripts


def job_as_recorded(job: Job, script: Script, device: torch.device) -> Job:
    """The job with the batch shares that the recorded learners measured. Raises ReplayError if this process computes
    other bits."""
    script.check_arithmetic(device)
    if job.batch_shares != "auto":
        return job
    return replace(job, batch_shares=dict(enumerate(MembershipStart.decode(script.plan).shares)))


def read_runs(folder: ExperimentFolder) -> list[Run]:
    """The recorded runs. Raises ConfigError if there are none, ReplayError if the record is damaged or has gaps."""
    found = segments(folder.seen)
    if not found:
        raise ConfigError(f"{folder.path}: nothing was recorded here; train with this version of Starling first")
    runs: list[Run] = []
    for place, segment in enumerate(found):
        scripts, num_missing = _scripts_in(segment)
        if not scripts:  # its learners were lost before they began
            continue
        if scripts[0].number == 0:
            runs.append(Run([segment], [scripts]))
        elif not runs:
            raise ReplayError(
                f"{segment}: the record begins with membership {scripts[0].number}; earlier ones are lost"
            )
        else:
            before = runs[-1]
            runs[-1] = Run([*before.segments, segment], [*before.memberships, scripts])
        if num_missing and place + 1 == len(found):
            raise ReplayError(f"{segment}: no record of {num_missing} of {len(scripts)} learners")
    if not runs:
        raise ReplayError(f"{found[0]}: no learner recorded its membership; the record is of an earlier version")
    return runs


def _scripts_in(segment: Path) -> tuple[list[Script], int]:
    """The records of the learners of a segment's membership, by rank, and the number of learners without a record."""
    scripts: dict[int, Script] = {}
    for learner, place, event in events_in(segment):
        script = scripts.setdefault(learner, Script(learner))
        script.add(event, place)
    begun = next((script for script in scripts.values() if script.members), None)
    if begun is None:
        return [], 0
    missing = [learner for learner in begun.members if learner not in scripts]
    scripts |= {learner: begun.without_events(learner) for learner in missing}
    return [scripts[learner] for learner in begun.members], len(missing)


@dataclass(frozen=True)
class Replayed:
    """The result of `starling.replay`."""

    outcome: Outcome | None
    """The outcome of the virtual engine, with the learners' final states. None if the replay ended before the end of
    the run."""
    runs: Sequence[Run]
    """The replayed runs: the first run of the experiment, and one more for each time that it was resumed."""
    losses: Sequence[float]
    """The median loss of the mini-batches of each epoch, where NaN counts as infinite."""
    difference: float | None = None
    """The largest difference between a learner's final weights in the replay and in the run, as a fraction of the
    distance by which training moved them. It is given if a backend chose the order in which it summed gradients. None
    if all weights are the same."""
    ended: RecordEnded | None = None
    """The reason why the replay ended before the end of the run. None if it did not, or if it was stopped on
    purpose."""

    @property
    def states(self) -> Mapping[int, int]:
        """The number of recorded hashes of weights that the replay reproduced, by learner. A replay that does not
        reproduce all of them raises an error."""
        return Counter(script.learner for run in self.runs for script in run.scripts for _ in script.states)


class States(Observer):
    """Observer that keeps the hashes of the states that a record contains, and the states at the position `wanted`,
    from which the next run resumes."""

    records, saves = True, False

    def __init__(self, saves: bool, wanted: Position | None, told: Callable[[int], object]) -> None:
        self.saves, self._wanted, self._told, self._num_steps = saves, wanted, told, 0
        self.losses: dict[int, list[float]] = defaultdict(list)
        """Losses of the mini-batches, by epoch."""
        self.found: dict[tuple[int, int], list[tuple[int, str]]] = defaultdict(list)
        """Number of steps and hash of each state, by membership and learner."""
        self._kept: dict[int, dict[int, list[LearnerState]]] = defaultdict(lambda: defaultdict(list))
        self._number = 0

    def on_step(self, report: StepReport) -> None:
        self._num_steps += 1
        self.losses[report.ticket.epoch].append(math.inf if math.isnan(report.loss) else report.loss)
        self._told(self._num_steps)

    def on_event(self, rank: int, kind: str, **fields: object) -> None:
        if kind == "membership":
            self._number = int(str(fields["number"]))
        if kind == "state":
            self.found[self._number, rank].append((int(str(fields["step"])), str(fields["sha256"])))

    def on_epoch(self, report: EpochReport, state: LearnerState) -> None:
        if state.is_complete:
            self.on_barrier(state)

    def on_barrier(self, state: LearnerState) -> None:
        if state.position == self._wanted:
            # as from a checkpoint
            self._kept[self._number][state.rank].append(LearnerState.decode(*state.copy().encode()))

    @property
    def checkpoints(self) -> Iterator[Checkpoint]:
        """Yield the checkpoints that could have been written at the `wanted` position. There may be several, because an
        epoch may end at a barrier, and a membership may end right after that."""
        for kept in self._kept.values():
            world = next(iter(kept.values()))[0].world
            for states in zip(*map(kept.__getitem__, range(world)), strict=False):
                yield CheckpointInMemory.of(states)


def replay(
    job: Job,
    experiment: Path | str,
    progress: OnProgress = lambda name, done, total: None,
    checkpoint: Path | str | None = None,
    watch: Watch | None = None,
    check: bool = True,
) -> Replayed:
    """Run an experiment again, in this process and in the recorded order, and check its weights.

    The replay hashes each learner's weights at the beginning, at each checkpoint and at the end, and compares the
    hashes with those that the learner's process recorded. The replay of a resumed run begins with the states that the
    replay of the run before has reached, or with `checkpoint`.

    Args:
        job: The job that was trained.
        experiment: The experiment's folder.
        progress: Called with the text `mini-batches`, the number of mini-batches computed so far, and their total
            number.
        checkpoint: The checkpoint from which the newest run resumed. If it is given, only the newest run is replayed.
        watch: Called after each gradient. The replay stops when `watch` returns True.
        check: Whether the weights must equal the recorded weights. If False, the job may have a different learning
            rate, or any other change that lets learners follow the recorded order.

    Raises:
        ReplayError: The record is damaged or was written by different code, this machine computes differently, or
            weights differ from the record.
        ConfigError: The strategy cannot be replayed, or there is no record.
        CheckpointError: The checkpoint is damaged.

    Example:
        >>> from starling.toy import regression
        >>> job = regression("adpsgd")
        >>> trained = starling.train(job, learners=2, name="again")  # doctest: +SKIP
        >>> sorted(starling.replay(job, trained.folder).states)  # doctest: +SKIP
        [0, 1]
    """
    runs = read_runs(ExperimentFolder(Path(experiment)))
    replayed = replay_runs(lambda run: job, runs, progress, checkpoint, watch, check)
    if check and replayed.ended is not None:
        raise replayed.ended
    return replayed


def replay_runs(
    job_of: Callable[[Run], Job],
    runs: Sequence[Run],
    progress: OnProgress = lambda name, done, total: None,
    checkpoint: Path | str | None = None,
    watch: Watch | None = None,
    check: bool = True,
) -> Replayed:
    """Replay successive runs, each of which resumed from a state of the run before. `job_of` returns the job of a run.
    Raises the same errors as `replay`, except that a record may end before its run did."""
    found: Iterable[Checkpoint] = ()
    if checkpoint is not None:
        runs, found = runs[-1:], [load(Path(checkpoint))]
    if not check and len(runs) > 1:
        raise ConfigError("the run was resumed: with a change, only the newest run is replayed; give its checkpoint")
    total, done = sum(len(script.batches) for run in runs for script in run.scripts), 0
    losses = defaultdict[int, list[float]](list)
    outcome: Outcome | None = None
    ended: RecordEnded | None = None
    difference: float | None = None
    for run, following in zip(runs, [*runs[1:], None], strict=True):
        job = job_of(run)
        check_strategy(job.strategy.name, job.island)
        before, wanted = done, None if following is None else following.plan.position

        def told(number: int, before: int = before) -> None:
            progress("mini-batches", before + number, total)

        observer, outcome, ended = States(run.scripts[0].saves, wanted, told), None, None
        with _as_recorded(run.scripts):
            engine = ReplayEngine(job, run.memberships, observer, _start(job, run, found))
            engine.watch = None if watch is None else _counted_from(before, watch)
            try:
                outcome = engine.run()
            except RecordEnded as error:
                ended = error
            except ReplayStopped:
                pass
        for epoch, found_losses in observer.losses.items():
            losses[epoch] += found_losses
        if outcome is None and ended is None:
            break
        if check:
            difference = _compare(job, run, observer, outcome if len(runs) == 1 else None)
        found = observer.checkpoints
        done += sum(len(script.batches) for script in run.scripts)
    return Replayed(outcome, runs, [median(each) for _, each in sorted(losses.items())], difference, ended)


def _counted_from(before: int, watch: Watch) -> Watch:
    """Return `watch` for moments whose numbers continue after those of earlier runs, which have `before` gradients."""
    return lambda moment: watch(replace(moment, number=before + moment.number))


class Watching:
    """Watches the gradients of learners in a replay, up to a chosen moment.

    `until` is the number of a gradient, or a condition on the figures of a gradient, such as `gradient>100`. If
    `learner` is given, `until` applies to that learner's gradients only. Infinity and NaN are greater than any number.
    With `draws`, each figure of each learner becomes a curve. `expressions` such as `largest=g.abs().max()` define
    further figures. They are Python expressions of the gradient `g`, the weights `w`, the `mean` of all learners'
    weights, the other figures, and `torch`.

    Raises ConfigError if `until` is neither a number nor a condition, if `learner` is given without `until`, or if an
    expression cannot be evaluated.
    """

    FIGURES = ("loss", "gradient", "weights", "distance", "staleness")

    def __init__(
        self, until: str | None, learner: int | None, draws: bool = False, expressions: Iterable[str] = ()
    ) -> None:
        self._codes: dict[str, CodeType] = {}
        for given in expressions:
            name, _, text = given.partition("=")
            if not name.strip().isidentifier() or name.strip() in self.FIGURES or not text:
                raise ConfigError(f"--watch {given}: give a new name and an expression, such as largest=g.abs().max()")
            try:
                self._codes[name.strip()] = compile(text.strip(), f"--watch {given}", "eval")
            except SyntaxError as error:
                raise ConfigError(f"--watch {given}: {error.msg}") from None
        self.names = (*self.FIGURES, *self._codes)
        if learner is not None and until is None:
            raise ConfigError("--learner: it says whose gradients --until means; give --until, too")
        self._learner, self.draws, self.newest = learner, draws, dict[int, Moment]()
        self.figures: dict[int, dict[str, float]] = {}
        """The figures of the newest gradient of each learner, by their names."""
        self._curves: Curves | None = None
        self._limits = {"number": math.inf}
        found = re.fullmatch(rf"({'|'.join(self.names)})\s*>\s*(\S+)", until or "")
        try:
            if found is not None:
                self._limits = {found[1]: float(found[2])}
            elif until is not None:
                self._limits = {"number": int(until) - 1}
        except ValueError:
            found = None
        if until is not None and found is None and not until.isdecimal():
            raise ConfigError(
                f"--until {until}: give the number of a gradient, or a condition on {', '.join(self.names)} such as "
                "gradient>100"
            )

    @contextmanager
    def drawing(self, folder: Path) -> Generator[None, None, None]:
        """Return a context in which curves are drawn into `folder`. They replace the curves of an earlier replay."""
        shutil.rmtree(folder, ignore_errors=True)
        with closing(Curves(folder)) as self._curves:
            yield

    def __call__(self, moment: Moment) -> bool:
        figures = self._figures(moment)
        self.newest[moment.learner], self.figures[moment.learner] = moment, figures
        if self._curves is not None:
            values = {f"replay/{name}": value for name, value in figures.items()}
            self._curves.add(f"learner-{moment.learner}", values, moment.number)
        if self._learner not in (None, moment.learner):
            return False
        return any(not (figures | {"number": moment.number})[name] <= limit for name, limit in self._limits.items())

    def _figures(self, moment: Moment) -> dict[str, float]:
        """Return the figures of a gradient. Raises ConfigError if an expression does not give a number."""
        found = {name: float(getattr(moment, name)) for name in self.FIGURES}
        for name, code in self._codes.items():
            try:
                found[name] = float(eval(code, {"torch": torch}, {**moment.vectors, **found}))  # noqa: S307 - the user's
            except Exception as error:
                raise ConfigError(f"{code.co_filename}: {type(error).__name__}: {error}") from None
        return found

    def show(self, console: Console) -> None:
        """Print the newest gradient of each learner. The most recent gradient of all is printed last, with its
        examples."""
        names = ("no.", "learner", "epoch", "batch", *self.names)
        table = Table(*(Column(name, overflow="fold") for name in names), box=None)
        newest = sorted(self.newest.values(), key=attrgetter("number"))
        for moment in newest:
            ticket, figures = moment.ticket, self.figures[moment.learner]
            whose = (moment.number, moment.learner, ticket.epoch + 1, ticket.index + 1)
            table.add_row(*map(str, whose), *(f"{value:.3g}" for value in figures.values()))
        console.print(table)
        if newest and newest[-1].ids:
            console.print(f"gradient {newest[-1].number} is of {', '.join(newest[-1].ids)}")


def replay_recipe(
    experiment: Path, checkpoint: Path | None, watching: Watching | None, changes: Sequence[str], console: Console
) -> None:
    """Replay the experiment of a recipe, and print the results of the checks. If there are `changes` to the recipe,
    replay the experiment once more with these changes."""
    folder = existing(experiment)

    def replayed(watch: Watch | None, *changes: str) -> Replayed:
        def job_of(run: Run) -> Job:
            path = run.segments[-1] / RECIPE
            path = path if path.is_file() else folder.config
            task = task_of(tree := apply_overrides(read_recipe(path), changes))
            return task.make_job(task.check_resolved(tree, str(path)), folder)

        with Bars(console) as bars:
            return replay_runs(job_of, read_runs(folder), bars, checkpoint, watch, check=not changes)

    with watching.drawing(folder.replay) if watching is not None and watching.draws else nullcontext():
        own = replayed(watching)
    if watching is not None:
        watching.show(console)
    if own.outcome is None and own.ended is None:
        console.print("the replay was stopped there")
        return
    output = Table("run", "member-\nship", "learner", "batches", "turns", "states")
    for number, run in enumerate(own.runs, 1):
        for script in run.scripts:
            counts = script.number, script.learner, len(script.batches), len(script.turns), len(script.states)
            output.add_row(*map(str, (number, *counts)))
    console.print(output)
    num_states = sum(own.states.values())
    same = f"{num_states} states, each with the same weights as in the run, bit for bit"
    if own.difference is not None:
        same = (
            f"torch chose the order of its sums; the final weights differ by {own.difference:.1e} of the distance "
            f"that training moved them (limit {TOLERANCE:g})"
        )
    console.print(f"replayed {experiment}: {same}")
    if changes:
        other, change = replayed(None, *changes), " ".join(changes)
        losses = Table("epoch", "median loss", f"with {change}")
        for epoch, pair in enumerate(zip(own.losses, other.losses, strict=True), 1):
            losses.add_row(str(epoch), *(f"{loss:.5g}" for loss in pair))
        console.print(losses)
        if own.losses == other.losses:
            console.print(
                f"{change} changes nothing in this run; the record determines learners, mini-batches and order"
            )
    if own.ended is not None:
        raise own.ended


def _start(job: Job, run: Run, checkpoints: Iterable[Checkpoint]) -> list[LearnerState] | None:
    """Return the states with which the learners of a run began, from the checkpoint that matches them. Return None if
    the run did not resume from a checkpoint."""
    if run.plan.position == Position():
        return None
    described, scripts, place = job.strategy.described(job.options), run.memberships[0], run.segments[0]
    for checkpoint in checkpoints:
        start = [checkpoint.start(rank, run.plan.world, described) for rank in range(run.plan.world)]
        hashes = [[(state.position.num_done, sha256_of(state.weights))] for state in start]
        if hashes == [script.states[:1] for script in scripts]:
            return [replace(state, minutes=run.plan.minutes) for state in start]
    if isinstance(checkpoints, list):
        raise ReplayError(f"{checkpoints[0].folder} is not the checkpoint from which the run of {place} resumed")
    raise ReplayError(
        f"{place}: the run resumed after {run.plan.position.num_done} mini-batches with weights that the replay of the "
        "run before has not reached; `--from` and the checkpoint from which it resumed replay it alone"
    )


@contextmanager
def _as_recorded(scripts: Sequence[Script]) -> Generator[None, None, None]:
    """Return a context in which this process computes in the same way as the learners did. Raises ReplayError if this
    is impossible."""
    threads = torch.get_num_threads()
    try:
        for script in scripts:
            torch.set_num_threads(int(script.arithmetic["threads"]))
            script.check_arithmetic(torch.device("cpu"))
        yield
    finally:
        torch.set_num_threads(threads)


def _compare(job: Job, run: Run, observer: States, outcome: Outcome | None) -> float | None:
    """Raise ReplayError unless the replay has the recorded states.

    If a backend chose the order of sums in the run, compare only `outcome` with the newest checkpoint, and return the
    largest difference of a learner's weights."""
    try:
        _compare_hashes(run, observer)
    except ReplayError:
        if outcome is None or all(script.sums_in_order for script in run.scripts):
            raise
        difference = _difference(job, outcome, latest(run.segments[0].parent.parent))
        if not difference <= TOLERANCE:
            raise ReplayError(
                f"the final weights differ by {difference:.2g} of the distance that training moved them, and rounding "
                f"explains at most {TOLERANCE:g}; the recipe, the data or the code differs"
            ) from None
        return difference
    return None


def _difference(job: Job, outcome: Outcome, checkpoint: Path) -> float:
    """Return the largest difference between a learner's weights and those in a checkpoint, as a fraction of the
    distance by which training moved the weights. The result is infinite if the checkpoint was not saved at the end of
    the run."""
    saved, states = load(checkpoint), outcome.states
    if saved.manifest.position != states[0].position or len(states) != saved.manifest.world:
        return math.inf
    begin = FlatModel(job.workload.make_model(), torch.device("cpu")).weights
    described, norm = job.strategy.described(job.options), torch.linalg.vector_norm
    found = [(each.weights, saved.start(each.rank, each.world, described).weights) for each in states]
    return max(float(norm(own - theirs) / norm(theirs - begin)) for own, theirs in found)


def _compare_hashes(run: Run, observer: States) -> None:
    """Raise ReplayError unless the hashes of the replay's states equal the recorded hashes."""
    for script in run.scripts:
        found = observer.found[script.number, script.learner]
        # a learner may have finished before others were lost, with a state that no replay computes; it then begins the
        # next membership with the weights of that state
        had_finished = NO_BATCH in script.turns and script.number < run.scripts[-1].number
        expected = script.states[: len(found)] if had_finished else script.states
        for number, (step, sha256) in enumerate(expected):
            if number >= len(found) or found[number] != (step, sha256):
                has = "has none"
                if number < len(found):
                    has = f"has {found[number][1][:12]} after {found[number][0]} steps"
                raise ReplayError(
                    f"learner {script.learner}: its state number {number + 1}, after {step} steps, has the hash "
                    f"{sha256[:12]}, but the replay {has}"
                )
