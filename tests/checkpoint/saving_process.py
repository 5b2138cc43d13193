"""Saves the states of two learners again and again, killed at another step each time.

    python -m tests.checkpoint.saving_process FOLDER

`FOLDER/earlier` holds an experiment. For k = 1, 2, … a process copies it to `FOLDER/<k>`, saves there, and kills itself
before its k-th step; the first that comes to its end is the last one.
"""

import os
import shutil
import signal
import sys
from itertools import count
from pathlib import Path

import torch

from starling.workload import Ticket
from tests.checkpoint.steps import Steps
from tests.checkpoint.test_checkpoints import save_all


def kill_at(step: int, experiment: Path) -> bool:
    """Save in a process that is killed at a step; whether it was."""
    process = os.fork()
    if process == 0:
        try:
            with Steps(step, lambda: os.kill(os.getpid(), signal.SIGKILL)).counted():
                save_all(experiment, 2, Ticket(2, 0, 16), keep=1)
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if status not in (0, -signal.SIGKILL):
        sys.exit(f"step {step}: the process ended with {status}")
    return status != 0


def main(folder: Path) -> None:
    """Be killed everywhere."""
    torch.set_num_threads(1)
    save_all(folder / "before", 2, Ticket(2, 0, 16))  # what torch imports late is imported once, and not by each
    for step in count(1):
        shutil.copytree(folder / "earlier", folder / str(step))
        if not kill_at(step, folder / str(step)):
            return


if __name__ == "__main__":
    main(Path(sys.argv[1]))
