"""`starling status`: shows the state of an experiment from another terminal."""

import os
import time
from pathlib import Path

from rich.console import Console
from rich.live import Live

from starling.errors import ConfigError, DataError, ProtocolError
from starling.experiment.folder import existing
from starling.launch.messages import Status, decode_file
from starling.reporting.status import describe
from starling.timeouts import LOOK_EVERY, STATUS_FRESH


def status(experiment: Path, watch: bool, output: Console) -> None:
    """Print the state of an experiment; with `watch`, update it until the run ends or its launcher is gone.

    Raises ConfigError if the folder is not an experiment or has no status, DataError if the status is damaged.
    """
    read = read_status(experiment)
    if not watch:
        output.print(describe(read, time.time(), is_alive(read)), highlight=False)
        return
    with Live(console=output, auto_refresh=False) as live:
        while True:
            alive = is_alive(read)
            live.update(describe(read, time.time(), alive), refresh=True)
            if read.stage == "ended" or not alive:
                return
            time.sleep(LOOK_EVERY)
            read = read_status(experiment)


def read_status(experiment: Path) -> Status:
    """The last status that an experiment's launcher has written."""
    folder = existing(experiment)
    try:
        return decode_file(Status, folder.status.read_bytes())
    except FileNotFoundError:
        raise ConfigError(
            f"{experiment}: no status.json, because it never ran under `starling train`; simulations, and learners "
            "that torchrun or Slurm start, do not write one"
        ) from None
    except (OSError, ProtocolError) as error:
        raise DataError(
            f"{folder.status}: cannot be read ({error}); a running launcher rewrites it every second"
        ) from error


def is_alive(status: Status) -> bool:
    """Whether the launcher that wrote a status still runs: the status is recent, and the process exists, where this
    machine can tell."""
    if time.time() - status.written < STATUS_FRESH:
        return status.machine not in ("", os.uname().nodename) or _is_running(status.pid)
    return False


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # the process exists and belongs to another user
        return True
    return True
