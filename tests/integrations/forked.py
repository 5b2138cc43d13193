"""Processes forked from one that has loaded a host's library, which takes seconds."""

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress

from starling.launch.launcher import loopback_store


def in_processes(world: int, work: Callable[[int], None], has_agent: bool = True, within: float = 200.0) -> list[int]:
    """Run `work(rank)` in so many processes: their exit codes. TimeoutError if one does not end; none is left.

    With an agent, as under torchrun, that holds the store; without one, as when started by hand, learner 0 does.
    """
    with ExitStack() as stack:
        port = stack.enter_context(loopback_store()) if has_agent else _free_port()
        started: list[int] = []
        for rank in range(world):
            sys.stdout.flush()
            sys.stderr.flush()
            number = os.fork()
            if number == 0:
                _become(rank, world, port, has_agent, work)
            started.append(number)
        codes: dict[int, int] = {}
        deadline = time.monotonic() + within
        try:
            while len(codes) < world:
                for rank, number in enumerate(started):
                    ended, status = os.waitpid(number, os.WNOHANG) if rank not in codes else (0, 0)
                    if ended:
                        codes[rank] = os.waitstatus_to_exitcode(status)
                if time.monotonic() > deadline:
                    raise TimeoutError(f"after {within:g} s only {sorted(codes)} of {world} processes have ended")
                time.sleep(0.02)
        finally:
            for rank, number in enumerate(started):
                if rank not in codes:
                    with suppress(ProcessLookupError):
                        os.kill(number, signal.SIGKILL)
                        os.waitpid(number, 0)
    return [codes[rank] for rank in range(world)]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _become(rank: int, world: int, port: int, has_agent: bool, work: Callable[[int], None]) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE=str(has_agent),
    )
    code = 1
    try:
        work(rank)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
