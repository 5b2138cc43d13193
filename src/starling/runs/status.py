"""`starling status`: the state of a running experiment, from another terminal."""

import os
import time
from pathlib import Path

from rich.console import Console
from rich.live import Live

from starling.errors import ConfigError, DataError, ProtocolError
from starling.launch.messages import Status, decode_status
from starling.report.status import describe
from starling.runs.experiment.folder import ExperimentFolder
from starling.timeouts import LOOK_EVERY, STATUS_FRESH


def status(experiment: Path, watch: bool, output: Console) -> None:
    """Print the state of an experiment; with `watch` again and again, until it ends or its launcher is gone.

    Raises ConfigError for a folder that is no experiment or never ran, and DataError for a damaged status.
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
    """What an experiment's launcher wrote last."""
    folder = ExperimentFolder(experiment)
    if not folder.config.is_file():
        raise ConfigError(f"{experiment}: no config.yaml here; give an experiment that `starling train` has written")
    try:
        return decode_status(folder.status.read_bytes())
    except FileNotFoundError:
        raise ConfigError(
            f"{experiment}: it has no status, since it never ran under `starling train`; simulations, and learners "
            "that torchrun or Slurm start, write none"
        ) from None
    except (OSError, ProtocolError) as error:
        raise DataError(
            f"{folder.status}: cannot be read ({error}); a running launcher soon writes it again"
        ) from error


def is_alive(status: Status) -> bool:
    """Whether the launcher that wrote a status still runs: its process is there, and wrote it a moment ago."""
    if time.time() - status.written < STATUS_FRESH:
        return _is_running(status.pid)
    return False


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it belongs to another user
        return True
    return True
