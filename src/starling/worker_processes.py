"""Processes of this machine that work for this one. They end when it does, and leave Ctrl-C to it."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from traceback import format_exception
from typing import Any

from starling.errors import ConfigError, StarlingError

_GRACE = 5.0  # seconds that a process may take to end


@contextmanager
def worker_processes(
    work: Callable[..., Any], count: int, name: str, what: str, key: str
) -> Generator[dict[Connection, BaseProcess], None, None]:
    """A context with `count` processes that each have a copy of `work`, by the connections to them. The processes end
    with the context.

    A process calls `work` with the arguments that are sent to it, and sends the result: see `answer_of`. If a process
    cannot be started, mostly because `work` cannot be pickled, a ConfigError says that `what`, with which it works,
    cannot be sent, and that `key`, which requested the processes, may be left out.
    """
    context = multiprocessing.get_context("spawn")  # a fork would inherit the threads' locks
    workers: dict[Connection, BaseProcess] = {}
    try:
        for number in range(count):
            ours, theirs = context.Pipe()
            process: BaseProcess = context.Process(
                target=_serve, args=(theirs, work), name=f"{name}-{number}", daemon=True
            )
            try:
                process.start()
            except Exception as error:  # whatever pickle makes of a function that it cannot import
                ours.close()
                raise ConfigError(
                    f"{key}: {what} cannot be sent to {count} processes ({error}); define its functions at the top "
                    f"level of a module or of the script, or leave out {key}"
                ) from error
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


def answer_of(line: Connection, process: BaseProcess, which: str, advice: str) -> Any:
    """Return the answer of a process. Raises the error that the process sent, or an error that names the process
    (`which`) if it has ended."""
    try:
        answer = line.recv()
    except (EOFError, OSError):
        process.join(_GRACE)
        code = process.exitcode
        raise StarlingError(f"{which} ended with exit code {code} (killed, or out of memory?); {advice}") from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _serve(line: Connection, work: Callable[..., Any]) -> None:
    """Work until the other end of the connection is closed or the parent process is gone, even during the work."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes
    threading.Thread(target=_end_with_parent, name="starling-parent", daemon=True).start()
    with suppress(EOFError, OSError):
        while True:
            arguments = line.recv()
            try:
                answer = work(*arguments)
            except StarlingError as error:
                answer = error
            except Exception as error:  # which may not be picklable
                answer = StarlingError("".join(format_exception(error)))
            line.send(answer)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
