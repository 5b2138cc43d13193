"""`starling status`: how a running experiment does, from another terminal."""

import os
import time
from pathlib import Path

from rich.console import Console
from rich.live import Live

from starling.errors import ConfigError, DataError
from starling.report.status import Status, describe
from starling.runs.experiment.folder import ExperimentFolder

FRESH_SECONDS = 10.0
"""A status that is older was not written by a launcher that is well: it writes one a second."""
REFRESH_SECONDS = 1.0


def status(experiment: Path, watch: bool, output: Console) -> None:
    """Print how an experiment does; with `watch` again and again, until it ends or its launcher is gone.

    Raises ConfigError for a folder that is no experiment, or never ran, and DataError for a status that is damaged.
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
            time.sleep(REFRESH_SECONDS)
            read = read_status(experiment)


def read_status(experiment: Path) -> Status:
    """What an experiment's launcher wrote last."""
    folder = ExperimentFolder(experiment)
    if not folder.config.is_file():
        raise ConfigError(f"{experiment}: no config.yaml here; give an experiment that `starling train` has written")
    try:
        return Status.decode(folder.status.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{experiment}: it has no status, for it never ran under `starling train`; simulations, and learners that "
            "torchrun or Slurm start, write none"
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(f"{folder.status}: cannot be read ({error}); a run that goes on writes it anew") from error


def is_alive(status: Status) -> bool:
    """Whether the launcher that wrote a status goes on: its process is there, and wrote it a moment ago."""
    if time.time() - status.written < FRESH_SECONDS:
        return _is_running(status.pid)
    return False


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is somebody else's
        return True
    return True
