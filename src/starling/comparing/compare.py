"""`starling compare` for recipes, and `starling.compare` for any PyTorch model and data.

This module computes the missing cells of a comparison, keeps finished cells, and writes the results.
"""

import json
import math
import os
import shutil
import signal
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import fmean
from types import FrameType
from typing import Any

import torch
from rich.console import Console
from torch import nn

from starling.checkpoint.files import read_manifest
from starling.checkpoint.state import LearnerState
from starling.comparing.grid import Cell, CellResult, CompareConfig, Metric, Point, Rate, Row, beyond, chosen_arms
from starling.comparing.subject import Comparable, JobSubject, Scorer, Subject, compared_by
from starling.comparing.table import Best, Comparison, choose
from starling.configuration import checked
from starling.engines.virtual.cluster import Cluster
from starling.engines.virtual.engine import VirtualEngine
from starling.errors import ConfigError, NonFiniteError, StarlingError, Stopped, require
from starling.events import read_events
from starling.experiment.claim import describe_environment
from starling.experiment.launching import refuse_if_importing
from starling.experiment.record import read_timeline
from starling.experiment.simulate import Simulated
from starling.experiment.task import task_of
from starling.experiment.train import train_quietly
from starling.files import writing
from starling.launch.messages import Stretch
from starling.recipe import Tree, apply_overrides, read_recipe
from starling.reporting.epochs import SPENT, Tally, mean_staleness, merged, share
from starling.reporting.progress import Bars, Say, say_on
from starling.training.job import EpochReport, Job, Observer, StepReport
from starling.worker_processes import answer_of, worker_processes

_LONGEST_GRID = 12
"""Number of rates of a row at which its grid stops growing."""


def load_comparison(
    path: Path, overrides: Sequence[str] = (), strategies: Sequence[str] = (), **options: Any
) -> Subject:
    """Return the comparison that a recipe file describes, with `key=value` overrides.

    `strategies` names the arms to compare: arms of its `compare:` section; any other name is that of a strategy.
    `options` of that section that are not None replace the recipe's options. Raises one `ConfigError` that lists all
    problems.
    """
    tree: Tree = apply_overrides(read_recipe(path), overrides)
    task = task_of(tree)
    task.require("starling compare")
    if not isinstance(task, Comparable):
        raise ConfigError(f"recipe {path}: its task has no comparison of recipes; use starling.compare in Python")
    given = {key: value for key, value in options.items() if value is not None}
    section = tree.get("compare")
    if strategies:
        given["arms"] = chosen_arms(section, strategies)
    if given:
        tree["compare"] = {**(section if isinstance(section, dict) else {}), **given}
    return task.comparison(tree, str(path))


def compare(
    job: Job | Callable[[int], Job],
    strategies: Sequence[str] | Mapping[str, str | Mapping[str, Any]],
    learners: int | Sequence[int] = 4,
    *,
    rates: Sequence[Rate] = (),
    seeds: Sequence[int] = (1, 2, 3),
    validate: Scorer | None = None,
    test: Scorer | None = None,
    higher_is_better: bool = False,
    limits: tuple[float | None, float | None] = (None, None),
    cluster: Cluster | None = None,
    threads: int = 1,
    name: str = "compare",
    exp: Path | str = "exp",
    key: str = "",
    console: Console | None = None,
    **options: Any,
) -> Comparison:
    """Compare strategies on any job, each at its own best learning rate. The same call continues an interrupted
    comparison.

    Args:
        job: The job to train, or a function that creates the job for a seed. A function is needed unless the job's
            workload is a `DataWorkload`.
        strategies: Names of strategies, or arms by label. An arm is a name, or a mapping with `strategy`, `learners`,
            `rates`, `seeds`, `summary` and fields of the job.
        learners: The numbers of learners.
        rates: The grid over which each arm is tuned, as learning rates, or as multiples of the job's learning rate
            (`"0.5x"`).
        seeds: The seeds of the initial weights, the order of the data and the times of the cluster.
        validate: The score by which rates are chosen, as a function of the trained model, or as a workload, whose mean
            loss is the score.
        test: The score by which arms are compared, in the same form as `validate`. No choice depends on it. None uses
            the validation result.
        higher_is_better: Whether larger results are better, as for accuracies.
        limits: The results at which everything is right, and at which everything is wrong. Arms with such results are
            not compared.
        cluster: The simulated cluster, which determines the speeds of machines and links.
        threads: The number of threads of a simulated cell, or of each real learner.
        name: The folder inside `exp` that keeps every finished cell.
        exp: The folder of experiments.
        key: Anything else on which results depend. Change it after a change that the job's settings, first losses and
            scores do not show.
        console: The console for progress; None uses standard error.
        options: `baseline`, `target`, `engine`, `jobs`, `tuning_seeds`, `bracket`, `by`, as in the `compare` section of
            a recipe.

    Raises:
        ConfigError: Some settings cannot work. The error lists all problems and is raised before anything is computed.
        Stopped: SIGINT or SIGTERM was received. Finished cells are kept.

    Example:
        >>> table = starling.compare(job, ["allreduce", "adpsgd"], [4, 16], rates=["0.5x", 1, "2x"])  # doctest: +SKIP
        >>> pandas.DataFrame(table.rows())  # doctest: +SKIP
    """
    require("compare", "starling.compare")
    refuse_if_importing("starling.compare")
    scored = "test" if test is not None else "validation" if validate is not None else "training loss"
    metric = Metric(name=scored, higher_is_better=higher_is_better, all_right=limits[0], all_wrong=limits[1])
    given = {"learners": learners, "rates": rates, "seeds": seeds, "arms": _arms(strategies), **options}
    section, folder = checked(CompareConfig, given, "starling.compare"), Path(exp) / name
    metric = compared_by(section, metric)
    subject = JobSubject(job, section, metric, folder, validate, test, cluster or Cluster(), threads, key)
    subject.check()
    return run_comparison(subject, lambda line: None, console or Console(stderr=True))


def _arms(strategies: Sequence[str] | Mapping[str, str | Mapping[str, Any]]) -> Tree:
    if not isinstance(strategies, Mapping):
        return chosen_arms(None, [strategies] if isinstance(strategies, str) else strategies)
    return {label: {"strategy": arm} if isinstance(arm, str) else dict(arm) for label, arm in strategies.items()}


def run_comparison(subject: Subject, tell: Say, console: Console) -> Comparison:
    """Compute the missing cells, choose each row's rate, and write the results.

    The subject's folder contains compare.yaml (the description of the comparison), env.txt, ready/ (models before
    training), cells/ (one JSON file for each cell), runs/ (logs of real learners), table.md and results.json. The table
    is passed to `tell`; all other output is printed on `console`. A comparison that was stopped continues where it
    stopped. A cell is computed again if anything on which it depends has changed.
    """
    say, section, folder = say_on(console), subject.section, subject.folder
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "compare.yaml").write_text(subject.described, encoding="utf-8")
        (folder / "env.txt").write_text(describe_environment(), encoding="utf-8")
    rates = {row: section.rates_of(row, subject.own_rate(row)) for row in section.rows}
    with _terminable(), Bars(console) as bars:
        cells = _Cells(subject, say, bars)
        others = sum(len(section.seeds_of(row, False)) for row in rates)
        results: list[CellResult] = []
        best: dict[Row, Best] = {}
        new: Mapping[Row, Sequence[float]] = rates
        while new:
            tuning = {row: section.seeds_of(row, True) for row in new}
            tried = [row.cell(rate, seed) for row, own in new.items() for rate in own for seed in tuning[row]]
            results += cells.complete(tried, others)
            for row, own in rates.items():
                best[row] = choose([each for each in results if each.cell.row == row], own, subject.metric)
            new = {row: [beyond(rates[row], best[row].edge)] for row in rates if section.bracket and best[row].edge}
            new = {row: own for row, own in new.items() if len(rates[row]) < _LONGEST_GRID}
            rates |= {row: tuple(sorted([*rates[row], *own])) for row, own in new.items()}
        chosen = [row.cell(best[row].rate, seed) for row in rates for seed in section.seeds_of(row, False)]
        results += cells.complete(chosen)
    comparison = Comparison(folder, section, subject.metric, best, results)
    with writing(folder):
        (folder / "table.md").write_text("\n".join(comparison.page()) + "\n", encoding="utf-8")
        text = json.dumps(comparison.content(), indent=1, allow_nan=False)
        (folder / "results.json").write_text(text + "\n", encoding="utf-8")
    for line in [*comparison.markdown(shutil.get_terminal_size().columns), *comparison.warnings()]:
        tell(line)
    say(f"table.md and results.json are in {folder}; `starling report {folder}` draws the losses")
    return comparison


class _Cells:
    """Completes cells. Finished cells are read, and the other cells are computed."""

    def __init__(self, subject: Subject, say: Say, bars: Bars) -> None:
        self._subject, self._folder = subject, subject.folder
        self._kept = subject.folder / "cells"
        self._say, self._bars = say, bars
        self._num_done = self._total = 0

    def complete(self, cells: Sequence[Cell], num_more: int = 0) -> list[CellResult]:
        """Return the results of cells in the given order. `num_more` cells, which are not known yet, will follow."""
        digests = {cell: self._subject.digest(cell) for cell in cells}
        found = {cell: CellResult.read(self._kept, cell, digest) for cell, digest in digests.items()}
        results = {cell: result for cell, result in found.items() if result is not None}
        missing = self._ordered([cell for cell in cells if cell not in results])
        self._total = max(self._total, self._num_done + len(cells) + num_more)
        self._num_done += len(results)
        if cells:
            self._say(f"{self._folder.name}: {len(cells)} cells, {len(results)} of them done already")
        if missing:
            try:
                self._subject.prepare(missing, self._say, self._bars)
                results |= self._computed({cell: digests[cell] for cell in missing})
            except (KeyboardInterrupt, Stopped) as error:
                number = getattr(error, "signal_number", None) or next(iter(error.args), signal.SIGINT)
                raise Stopped(f"stopped; {self._advice()}", number) from None
            except StarlingError as error:
                error.add_note(self._advice())
                raise
        return [results[cell] for cell in cells]

    def _ordered(self, cells: Sequence[Cell]) -> list[Cell]:
        """Return the cells seed after seed, so that early results are already informative. Cells with the same
        mini-batches are neighbours."""
        keys = {cell: self._subject.batches_key(cell) for cell in cells}
        first = {key: place for place, key in reversed(list(enumerate(keys.values())))}
        seeds = list(dict.fromkeys(cell.seed for cell in cells))
        return sorted(cells, key=lambda cell: (seeds.index(cell.seed), first[keys[cell]]))

    def _computed(self, digests: dict[Cell, str]) -> dict[Cell, CellResult]:
        """Compute and return the results of cells. Each result is written as soon as it is computed."""
        jobs, name = self._subject.section.jobs, self._folder.name
        results = {}
        self._bars(name, self._num_done, self._total)
        with closing(compute(self._subject, digests, jobs, self._folder / "runs")) as coming:
            for result in coming:
                result.write(self._kept)
                results[result.cell] = result
                self._num_done += 1
                self._bars(name, self._num_done, self._total)
                self._say(f"{self._num_done}/{self._total} {result.cell.name}: {self._outcome(result)}")
        return results

    def _outcome(self, result: CellResult) -> str:
        if result.diverged:
            return f"diverged after {result.num_gradients} mini-batches, {result.cpu_seconds:.1f} s of CPU time"
        scores = {"validation": result.valid, "test": result.test, "loss": result.loss}
        parts = [f"{name} {value:.4g}" for name, value in scores.items() if value is not None]
        return f"{', '.join(parts)}, staleness {result.mean_staleness:.1f}, {result.cpu_seconds:.1f} s of CPU time"

    def _advice(self) -> str:
        return f"{self._num_done} of {self._total} cells are kept in {self._kept}; run the same command to continue"


@contextmanager
def _terminable() -> Generator[None, None, None]:
    """Within this context, SIGTERM stops the computation in this process as Ctrl-C does. The number of the signal is
    the argument of the `KeyboardInterrupt`."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def compute(subject: Subject, cells: Mapping[Cell, str], jobs: int, runs: Path) -> Generator[CellResult, None, None]:
    """Yield the results of all cells, which are given with their digests, in the order in which `jobs` processes
    compute them. If `jobs` is 1, this process computes them. Real learners write their logs to the folder `runs`.
    """
    if jobs == 1 or len(cells) == 1:
        for cell, digest in cells.items():
            yield run_cell(subject, cell, digest, runs)
        return
    work, count = partial(run_cell, subject, runs=runs), min(jobs, len(cells))
    with worker_processes(work, count, "starling-compare", "what is compared", "jobs") as workers:
        waiting, idle = iter(cells.items()), list(workers)
        busy: dict[Connection, Cell] = {}
        while True:
            for line, (cell, digest) in zip(idle, waiting, strict=False):
                with suppress(OSError):  # the process has died, which `answer_of` reports
                    line.send((cell, digest))
                busy[line] = cell
            if not busy:
                return
            ready = wait(list(busy))
            line = next(line for line in busy if line in ready)
            cell, idle = busy.pop(line), [line]
            which, advice = f"cell {cell.name}: the process that computed it", "run the same command again with"
            yield answer_of(line, workers[line], which, f"{advice} fewer jobs, finished cells are kept")


CURVE_POINTS = 50
LAST = 0.9
"""Fraction of the budget after which losses count as the last losses."""


class Watcher(Observer):
    """An observer that collects the figures that a comparison reports about a run."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.seconds = 0.0
        self.consensus_distance: float | None = None
        self._num_samples = 0
        self._ends: list[Stretch] = []

    def on_step(self, report: StepReport) -> None:
        self._num_samples += report.num_examples
        self.seconds = 60.0 * report.minutes
        self.points.append(Point(report.fraction, self._num_samples, self.seconds, report.loss))

    def on_epoch(self, report: EpochReport, state: LearnerState) -> None:
        tally = Tally()
        tally.end_epoch(report, 0)
        self._ends.append(tally.progress(tally.all).so_far)
        if report.consensus_distance is not None and math.isfinite(report.consensus_distance):
            self.consensus_distance = report.consensus_distance

    def measured(self) -> dict[str, Any]:
        """Return the fields of a result."""
        every = merged(self._ends)
        workers = merged(each for each in self._ends if each.batches)  # a server waits for nothing
        return {
            **_trained_on(self.points),
            "num_gradients": len(self.points),
            "seconds": self.seconds,
            "consensus_distance": self.consensus_distance,
            "mean_staleness": mean_staleness(every.staleness),
            "largest_staleness": max(every.staleness, default=0),
            "bytes_sent": every.bytes_sent,
            **{key: share(workers, key) for key in SPENT},
        }


def _trained_on(points: Sequence[Point]) -> dict[str, Any]:
    """Return the fields of a result about the training loss, given the loss of each mini-batch, and about the
    samples."""
    finite = [point for point in points if math.isfinite(point.loss)]
    last = [point.loss for point in finite if point.share >= LAST]
    parts: dict[int, list[Point]] = {}
    for point in finite:
        parts.setdefault(min(int(point.share * CURVE_POINTS), CURVE_POINTS - 1), []).append(point)
    curve = [
        Point((part + 0.5) / CURVE_POINTS, *(fmean([point[field] for point in own]) for field in (1, 2, 3)))
        for part, own in sorted(parts.items())
    ]
    num_samples = points[-1].samples if points else 0
    return {"loss": fmean(last) if last else None, "curve": tuple(curve), "num_samples": num_samples}


def run_cell(subject: Subject, cell: Cell, digest: str, runs: Path) -> CellResult:
    """Train and score a cell. If numbers stop being finite, the cell's result is `diverged`.

    A run of real learners uses the folder `runs`, which keeps the log of the run but no checkpoint. An error is raised
    with a note that names the cell.
    """
    begin = _cpu_seconds()
    is_virtual = subject.section.engine == "virtual"
    try:
        job = replace(subject.job(cell), most_not_finite=1)
        model, measured = _simulated(subject, job, cell) if is_virtual else _trained(subject, job, cell, runs)
        if model is not None and not all(bool(torch.isfinite(each).all()) for each in model.state_dict().values()):
            model = None
        scores = {} if model is None else subject.score(cell, model)
    except Exception as error:
        error.add_note(f"in cell {cell.name}")
        raise
    if not all(math.isfinite(value) for value in scores.values()):
        model, scores = None, {}
    return CellResult(
        cell=cell, digest=digest, diverged=model is None, **scores, **measured, cpu_seconds=_cpu_seconds() - begin
    )


def _simulated(subject: Subject, job: Job, cell: Cell) -> tuple[nn.Module | None, dict[str, Any]]:
    """Simulate a cell. Return the consensus model, or None if it diverged, and the measured fields of the result."""
    # results must not depend on the number of cores
    torch.set_num_threads(subject.engine(cell).get("threads") or 1)
    watcher, model = Watcher(), None
    with suppress(NonFiniteError):
        outcome = VirtualEngine(job, cell.learners, subject.cluster(cell), watcher).run()
        model, watcher.seconds = Simulated(job, outcome).model(), outcome.seconds
    return model, watcher.measured()


def _trained(subject: Subject, job: Job, cell: Cell, runs: Path) -> tuple[nn.Module | None, dict[str, Any]]:
    folder, trained = runs / cell.name, None
    with suppress(NonFiniteError):
        trained = train_quietly(job, cell.learners, name=cell.name, exp=runs, engine=subject.engine(cell))
    measured = _measured(folder)
    if trained is None:
        return None, measured
    model, seconds = trained.model(), 60.0 * read_manifest(trained.checkpoint).minutes
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return model, measured | {"seconds": seconds}


def _measured(folder: Path) -> dict[str, Any]:
    """Return the fields of a result, given the folder with a run's record of its mini-batches and its events."""
    events, stretches = read_events(folder / "log" / "events.jsonl"), read_timeline(folder / "seen")
    total, done, samples = sum(each.batches for each in stretches), 0, 0
    points = []
    for each in stretches:
        samples += each.examples
        points.append(Point(done / total, samples, each.end, each.loss))
        done += each.batches
    ends = [end for event in events if event["kind"] == "epoch" for end in event["learners"].values()]
    workers = [end for end in ends if end["steps"]]
    steps, seconds = (sum(end[key] for end in workers) for key in ("steps", "seconds"))
    distances = [event["consensus_distance"] for event in events if event["kind"] == "checkpoint"]
    return {
        **_trained_on(points),
        "num_gradients": total,
        "seconds": points[-1].seconds if points else 0.0,
        "consensus_distance": distances[-1] if distances else None,
        "mean_staleness": sum(end["mean_staleness"] * end["steps"] for end in workers) / max(1, steps),
        "largest_staleness": max((end["largest_staleness"] for end in workers), default=0),
        "bytes_sent": sum(end["bytes_sent"] for end in ends),
        **{key: 100.0 * sum(end[key] for end in workers) / seconds if seconds else 0.0 for key in SPENT},
    }


def _cpu_seconds() -> float:
    """Return the processor time of this process and of the child processes for which it has waited."""
    return sum(os.times()[:4])
