"""Processes that compute cells side by side, with one thread each."""

from collections.abc import Generator, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from traceback import format_exception

from starling.comparing.cell import run_cell
from starling.comparing.grid import Cell
from starling.comparing.memory import Memory
from starling.comparing.results import CellResult
from starling.comparing.subject import Subject
from starling.errors import ConfigError, StarlingError
from starling.worker_processes import be_a_worker, exit_code_of, worker_processes


def compute(subject: Subject, cells: Mapping[Cell, str], jobs: int, runs: Path) -> Generator[CellResult, None, None]:
    """The results of all cells, given with their digests, as they come, from `jobs` processes; with one job from this
    process. Real learners log in the folder `runs`.

    An error in a cell is raised with a note that names the cell.
    """
    if jobs == 1 or len(cells) == 1:
        memory = Memory()
        for cell, digest in cells.items():
            yield _checked(_answer(subject, cell, digest, runs, memory), cell)
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
    memory = Memory()
    with suppress(EOFError, OSError):
        while True:
            cell, digest = line.recv()
            answer = _answer(subject, cell, digest, runs, memory)
            if isinstance(answer, Exception) and not isinstance(answer, StarlingError):  # which may not be picklable
                answer = StarlingError("".join(format_exception(answer)))
            line.send(answer)


def _answer(subject: Subject, cell: Cell, digest: str, runs: Path, memory: Memory) -> CellResult | Exception:
    try:
        return run_cell(subject, cell, digest, runs, memory)
    except Exception as error:
        return error
