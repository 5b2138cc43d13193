"""A comparison from its cells to its answer: missing cells are computed, finished ones are kept."""

import json
import signal
import threading
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from traceback import format_exception
from types import FrameType

from rich.console import Console

from starling.comparing.cell import run_cell
from starling.comparing.grid import Cell, Row, beyond
from starling.comparing.results import CellResult, Metric, ResultFolder
from starling.comparing.subject import Subject
from starling.comparing.table import Best, Comparison, choose
from starling.errors import ConfigError, StarlingError, Stopped
from starling.experiment.claim import describe_environment, unwritable
from starling.reporting.progress import Bars, Say, say_on
from starling.worker_processes import be_a_worker, exit_code_of, worker_processes

_LONGEST_GRID = 12
"""Rates of a row at which its grid stops growing."""


def run_comparison(subject: Subject, folder: Path, description: str, tell: Say, console: Console) -> Comparison:
    """Compute the cells that are missing, choose each row's rate, and write the answer.

    `folder` holds compare.yaml (the `description`), env.txt, ready/ (models before training), cells/ (one JSON file for
    each), runs/ (logs of real learners), table.md and results.json. The table goes to `tell`, everything else to
    `console`. What was stopped continues where it was; a cell of which anything has changed is computed again.
    """
    say, section = say_on(console), subject.section
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "compare.yaml").write_text(description, encoding="utf-8")
        (folder / "env.txt").write_text(describe_environment(), encoding="utf-8")
    except OSError as error:
        raise unwritable(folder, error) from error
    rates = {row: section.rates_of(section.all_arms[row.arm], subject.own_rate(row)) for row in section.rows}
    with _terminable(), Bars(console) as bars:
        cells = _Cells(subject, folder, say, bars)
        tuning = [
            _cell(row, rate, seed) for row in rates for rate in rates[row] for seed in section.seeds_of(row, True)
        ]
        others = sum(len(section.seeds_of(row, False)) for row in rates)
        results = cells.complete(tuning, others)
        best = _best(results, rates, subject.metric)
        while section.bracket and (grown := _grown(rates, best)):
            rates |= {row: tuple(sorted([*rates[row], rate])) for row, rate in grown.items()}
            tuning = [_cell(row, rate, seed) for row, rate in grown.items() for seed in section.seeds_of(row, True)]
            results += cells.complete(tuning, others)
            best = _best(results, rates, subject.metric)
        chosen = [_cell(row, best[row].rate, seed) for row in rates for seed in section.seeds_of(row, False)]
        results += cells.complete(chosen)
    comparison = Comparison(folder, section, subject.metric, best, results)
    _write(comparison)
    for line in [*comparison.markdown(), *comparison.warnings()]:
        tell(line)
    say(f"table.md and results.json are in {folder}; `starling report {folder}` draws the losses")
    return comparison


def _cell(row: Row, rate: float, seed: int) -> Cell:
    return Cell(setting=row.setting, arm=row.arm, learners=row.learners, rate=rate, seed=seed)


def _best(results: Sequence[CellResult], rates: Mapping[Row, Sequence[float]], metric: Metric) -> dict[Row, Best]:
    return {row: choose(found, rates[row], metric) for row, found in _by_row(results).items()}


def _grown(rates: Mapping[Row, Sequence[float]], best: Mapping[Row, Best]) -> dict[Row, float]:
    """The next rate of each row whose best lies at an end of its grid; none for grids that have grown long."""
    return {
        row: beyond(rates[row], found.edge)
        for row, found in best.items()
        if found.edge and len(rates[row]) < _LONGEST_GRID
    }


def _by_row(results: Iterable[CellResult]) -> dict[Row, list[CellResult]]:
    found: dict[Row, list[CellResult]] = {}
    for result in results:
        found.setdefault(result.cell.row, []).append(result)
    return found


class _Cells:
    """Completes cells: those that are finished are read, the others computed."""

    def __init__(self, subject: Subject, folder: Path, say: Say, bars: Bars) -> None:
        self._subject, self._folder = subject, folder
        self._results = ResultFolder(folder / "cells")
        self._say, self._bars = say, bars
        self._num_done = self._total = 0

    def complete(self, cells: Sequence[Cell], num_more: int = 0) -> list[CellResult]:
        """The results of cells, in their order; `num_more` will follow, which are not known yet."""
        digests = {cell: self._subject.digest(cell) for cell in cells}
        found = {cell: self._results.read(cell, digest) for cell, digest in digests.items()}
        results = {cell: result for cell, result in found.items() if result is not None}
        missing = self._ordered([cell for cell in cells if cell not in results])
        self._total = max(self._total, self._num_done + len(cells) + num_more)
        self._num_done += len(results)
        if cells:
            self._say(f"{self._folder.name}: {len(cells)} cells, {len(results)} of them done already")
        if missing:
            try:
                self._subject.prepare(missing, self._say, self._bars)
                with closing(self._computed({cell: digests[cell] for cell in missing})) as coming:
                    results |= {result.cell: result for result in coming}
            except (KeyboardInterrupt, Stopped) as error:
                number = getattr(error, "signal_number", None) or next(iter(error.args), signal.SIGINT)
                raise Stopped(f"stopped; {self._kept()}", number) from None
            except StarlingError as error:
                error.add_note(self._kept())
                raise
        return [results[cell] for cell in cells]

    def _ordered(self, cells: Sequence[Cell]) -> list[Cell]:
        """Seed after seed, so that early results say something; cells with the same mini-batches are neighbours."""
        keys = {cell: self._subject.batches_key(cell) for cell in cells}
        first = {key: place for place, key in reversed(list(enumerate(keys.values())))}
        seeds = list(dict.fromkeys(cell.seed for cell in cells))
        return sorted(cells, key=lambda cell: (seeds.index(cell.seed), first[keys[cell]]))

    def _computed(self, digests: dict[Cell, str]) -> Generator[CellResult, None, None]:
        """Each result as soon as it is there, once it is kept."""
        jobs, name = self._subject.section.jobs, self._folder.name
        self._bars(name, self._num_done, self._total)
        with closing(compute(self._subject, digests, jobs, self._folder / "runs")) as coming:
            for result in coming:
                self._results.write(result)
                self._num_done += 1
                self._bars(name, self._num_done, self._total)
                self._say(f"{self._num_done}/{self._total} {result.cell.name}: {self._outcome(result)}")
                yield result

    def _outcome(self, result: CellResult) -> str:
        if result.diverged:
            return f"diverged after {result.num_gradients} mini-batches, {result.cpu_seconds:.1f} s"
        scores = {"validation": result.valid, "test": result.test, "loss": result.loss}
        parts = [f"{name} {value:.4g}" for name, value in scores.items() if value is not None]
        return f"{', '.join(parts)}, staleness {result.mean_staleness:.1f}, {result.cpu_seconds:.1f} s"

    def _kept(self) -> str:
        where = self._results.path
        return f"{self._num_done} of {self._total} cells are kept in {where}; run the same command to continue"


@contextmanager
def _terminable() -> Generator[None, None, None]:
    """SIGTERM stops what is computed here as Ctrl-C does, with its number as the argument of the KeyboardInterrupt."""
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


def _write(comparison: Comparison) -> None:
    """Write table.md and results.json. Raises ConfigError for a folder that cannot be written."""
    folder = comparison.folder
    try:
        (folder / "table.md").write_text("\n".join(comparison.page()) + "\n", encoding="utf-8")
        text = json.dumps(comparison.content(), indent=1, allow_nan=False)
        (folder / "results.json").write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise unwritable(folder, error) from error


def compute(subject: Subject, cells: Mapping[Cell, str], jobs: int, runs: Path) -> Generator[CellResult, None, None]:
    """The results of all cells, given with their digests, as they come, from `jobs` processes; with one job from this
    process. Real learners log in the folder `runs`.

    An error in a cell is raised with a note that names the cell.
    """
    if jobs == 1 or len(cells) == 1:
        for cell, digest in cells.items():
            yield _checked(_answer(subject, cell, digest, runs), cell)
        return
    count = min(jobs, len(cells))

    def problem(error: Exception) -> ConfigError:
        return ConfigError(
            f"jobs: what is compared cannot be sent to {count} processes ({error}); define its functions at the top "
            "level of a module or of the script, or leave out jobs"
        )

    with worker_processes(_serve, (subject, runs), count, "starling-compare", problem) as workers:
        waiting = iter(cells.items())
        busy: dict[Connection, Cell] = {}
        idle = list(workers)
        while True:
            for line, (cell, digest) in zip(idle, waiting, strict=False):
                with suppress(OSError):  # the process has died, which `_receive` reports
                    line.send((cell, digest))
                busy[line] = cell
            if not busy:
                return
            idle = [line for line in wait(list(busy)) if isinstance(line, Connection)][:1]
            for line in idle:
                cell = busy.pop(line)
                yield _checked(_receive(line, workers[line], cell), cell)


def _receive(line: Connection, process: BaseProcess, cell: Cell) -> CellResult | Exception:
    try:
        answer: CellResult | Exception = line.recv()
    except (EOFError, OSError):
        return StarlingError(
            f"cell {cell.name}: the process that computed it ended with exit code {exit_code_of(process)} (killed, or "
            "out of memory?); run the same command again with fewer jobs, finished cells are kept"
        )
    return answer


def _checked(answer: CellResult | Exception, cell: Cell) -> CellResult:
    if isinstance(answer, Exception):
        answer.add_note(f"in cell {cell.name}")
        raise answer
    return answer


def _serve(line: Connection, subject: Subject, runs: Path) -> None:
    """Compute cells until the other end of the connection is closed."""
    be_a_worker()
    with suppress(EOFError, OSError):
        while True:
            cell, digest = line.recv()
            answer = _answer(subject, cell, digest, runs)
            if isinstance(answer, Exception) and not isinstance(answer, StarlingError):  # which may not be picklable
                answer = StarlingError("".join(format_exception(answer)))
            line.send(answer)


def _answer(subject: Subject, cell: Cell, digest: str, runs: Path) -> CellResult | Exception:
    try:
        return run_cell(subject, cell, digest, runs)
    except Exception as error:
        return error
