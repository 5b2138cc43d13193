"""Processes that compute cells side by side, with one thread each."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from traceback import format_exception

from starling.errors import StarlingError
from starling.runs.recipe.recipe import Recipe
from starling.runs.study.cell import run_cell
from starling.runs.study.config import Cell
from starling.runs.study.memory import Memory
from starling.runs.study.results import CellResult

_GRACE = 5.0  # seconds that a process may take to end


@dataclass(frozen=True)
class Task:
    """A cell to compute."""

    cell: Cell
    recipe: Recipe
    ready: Path
    """The folder in which its model is set up."""


def compute(tasks: Sequence[Task], jobs: int) -> Generator[CellResult, None, None]:
    """The results of all tasks as they come, from `jobs` processes; with one job from this process.

    An error in a cell is raised with a note that names the cell.
    """
    if jobs == 1 or len(tasks) == 1:
        memory = Memory()
        for task in tasks:
            yield _checked(_answer(task, memory), task)
        return
    with _started(min(jobs, len(tasks))) as workers:
        waiting = iter(tasks)
        busy: dict[Connection, Task] = {}
        idle = list(workers)
        while True:
            for line, task in zip(idle, waiting, strict=False):
                with suppress(OSError):  # the process has died, which `_receive` reports
                    line.send(task)
                busy[line] = task
            if not busy:
                return
            idle = [line for line in wait(list(busy)) if isinstance(line, Connection)][:1]
            for line in idle:
                task = busy.pop(line)
                yield _checked(_receive(line, workers[line], task), task)


@contextmanager
def _started(count: int) -> Generator[dict[Connection, BaseProcess], None, None]:
    """Processes by the connections to them; all have ended afterwards."""
    context = multiprocessing.get_context("spawn")  # a fork would inherit the threads' locks
    workers: dict[Connection, BaseProcess] = {}
    try:
        for number in range(count):
            ours, theirs = context.Pipe()
            name = f"starling-study-{number}"
            process: BaseProcess = context.Process(target=_serve, args=(theirs,), name=name, daemon=True)
            process.start()
            theirs.close()
            workers[ours] = process
        yield workers
    finally:
        for line, process in workers.items():
            line.close()
            process.terminate()
        for process in workers.values():
            process.join(_GRACE)
            if process.is_alive():
                process.kill()


def _receive(line: Connection, process: BaseProcess, task: Task) -> CellResult | Exception:
    try:
        answer: CellResult | Exception = line.recv()
    except (EOFError, OSError):
        process.join(_GRACE)
        return StarlingError(
            f"cell {task.cell.name}: the process that computed it ended with exit code {process.exitcode} (killed, or "
            "out of memory?); run the study again with fewer study.jobs, finished cells are kept"
        )
    return answer


def _checked(answer: CellResult | Exception, task: Task) -> CellResult:
    if isinstance(answer, Exception):
        answer.add_note(f"in cell {task.cell.name}")
        raise answer
    return answer


def _serve(line: Connection) -> None:
    """Compute cells until the other end of the connection is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends this one
    threading.Thread(target=_end_with_parent, name="starling-study-parent", daemon=True).start()
    memory = Memory()
    with suppress(EOFError, OSError):
        while True:
            answer = _answer(line.recv(), memory)
            if isinstance(answer, Exception) and not isinstance(answer, StarlingError):  # which may not be picklable
                answer = StarlingError("".join(format_exception(answer)))
            line.send(answer)


def _end_with_parent() -> None:
    """End this process, in the middle of a cell, when its parent is gone."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _answer(task: Task, memory: Memory) -> CellResult | Exception:
    try:
        return run_cell(task.recipe, task.cell, task.ready, memory)
    except Exception as error:
        return error
