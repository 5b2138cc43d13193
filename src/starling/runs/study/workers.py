"""Processes that compute cells side by side, one thread each; none is left behind."""

import json
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import yaml

from starling.errors import StarlingError, Stopped
from starling.runs.recipe.recipe import Recipe, check_recipe, dump_recipe
from starling.runs.study.cell import run_cell
from starling.runs.study.grid import Cell, Setting
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

    Raises what went wrong in a cell, with a note that names it.
    """
    if jobs == 1 or len(tasks) == 1:
        memory = Memory()
        for task in tasks:
            with _named(task.cell.name):
                result = run_cell(task.recipe, task.cell, task.ready, memory)
            yield result
        return
    with _started(min(jobs, len(tasks))) as workers:
        waiting = iter(tasks)
        busy: dict[Connection, Task] = {}
        for first, task in zip(workers, waiting, strict=False):
            _send(first, task)
            busy[first] = task
        while busy:
            for line in wait(list(busy)):
                if not isinstance(line, Connection):
                    continue
                task = busy.pop(line)
                result = _receive(line, workers[line], task)
                following = next(waiting, None)
                if following is not None:
                    _send(line, following)
                    busy[line] = following
                yield result


@contextmanager
def _started(count: int) -> Generator[dict[Connection, BaseProcess], None, None]:
    """Processes by the lines to them; all have ended behind."""
    context = multiprocessing.get_context("spawn")  # as loading processes: nothing of this one's threads is in them
    workers: dict[Connection, BaseProcess] = {}
    try:
        for number in range(count):
            ours, theirs = context.Pipe()
            process: BaseProcess = context.Process(
                target=_serve, args=(theirs,), name=f"starling-study-{number}", daemon=True
            )
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


def _send(line: Connection, task: Task) -> None:
    setting = task.cell.setting
    cell = [setting.model, setting.optimizer, setting.warmup, task.cell.arm, task.cell.workers, task.cell.seed]
    content = {"cell": cell, "recipe": dump_recipe(task.recipe), "ready": str(task.ready)}
    with suppress(OSError):  # the process has died: whoever waits for its answer says so
        line.send_bytes(json.dumps(content).encode())


def _receive(line: Connection, process: BaseProcess, task: Task) -> CellResult:
    try:
        content = json.loads(line.recv_bytes())
    except (EOFError, OSError):
        process.join(_GRACE)
        raise StarlingError(
            f"cell {task.cell.name}: the process that computed it ended with exit code {process.exitcode} and said "
            "nothing (killed, or out of memory?); run the study again with fewer study.jobs, what is done is kept"
        ) from None
    if "error" in content:
        raise _error(content["error"], content["message"], task.cell.name)
    return CellResult.model_validate(content["result"])


def _error(kind: str, message: str, name: str) -> StarlingError:
    kinds = {each.__name__: each for each in StarlingError.__subclasses__() if each is not Stopped}
    error = kinds[kind](message) if kind in kinds else StarlingError(f"{kind}: {message}")
    error.add_note(f"in cell {name}")
    return error


def _serve(line: Connection) -> None:
    """What a process does: cells, until the other end of the line is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches everybody; the one that started us ends us
    threading.Thread(target=_end_with_parent, name="starling-study-parent", daemon=True).start()
    memory = Memory()
    while True:
        try:
            content = json.loads(line.recv_bytes())
        except (EOFError, OSError):
            return
        line.send_bytes(json.dumps(_answer(content, memory)).encode())


def _end_with_parent() -> None:
    """End this process, in the middle of a cell, when the one that started it is gone."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _answer(content: dict[str, Any], memory: Memory) -> dict[str, Any]:
    try:
        model, optimizer, warmup, arm, workers, seed = content["cell"]
        cell = Cell(Setting(model, optimizer, warmup), arm, workers, seed)
        recipe = check_recipe(yaml.safe_load(content["recipe"]), cell.name)
        return {"result": run_cell(recipe, cell, Path(content["ready"]), memory).model_dump(mode="json")}
    except StarlingError as error:
        return {"error": type(error).__name__, "message": str(error)}
    except Exception as error:
        return {"error": type(error).__name__, "message": f"{error}\n{traceback.format_exc()}"}


@contextmanager
def _named(name: str) -> Generator[None, None, None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"in cell {name}")
        raise
