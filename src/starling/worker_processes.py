"""Processes of this machine that work for this one: they end when it does, and leave Ctrl-C to it."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

_GRACE = 5.0  # seconds that a process may take to end


@contextmanager
def worker_processes(
    serve: Callable[..., None],
    arguments: Iterable[Any],
    count: int,
    name: str,
    problem: Callable[[Exception], Exception],
) -> Generator[dict[Connection, BaseProcess], None, None]:
    """`count` processes that run `serve(line, *arguments)`, by the connections to them; all have ended afterwards.

    `serve` calls `be_a_worker` first, and returns when its `line` is closed. If a process cannot be started, mostly
    because the arguments cannot be pickled, what `problem` makes of the reason is raised.
    """
    context = multiprocessing.get_context("spawn")  # a fork would inherit the threads' locks
    workers: dict[Connection, BaseProcess] = {}
    try:
        for number in range(count):
            ours, theirs = context.Pipe()
            process: BaseProcess = context.Process(
                target=serve, args=(theirs, *arguments), name=f"{name}-{number}", daemon=True
            )
            try:
                process.start()
            except Exception as error:  # whatever pickle makes of a function that it cannot import
                ours.close()
                raise problem(error) from error
            finally:
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


def be_a_worker() -> None:
    """Ignore Ctrl-C, which reaches all processes, and end this one, in the middle of its work, when its parent is
    gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="starling-parent", daemon=True).start()


def exit_code_of(process: BaseProcess) -> int | None:
    """The exit code of a process that has closed its connection."""
    process.join(_GRACE)
    return process.exitcode


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
