"""Starts the programs that benchmarks measure, and leaves none of them behind."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.runs import Outcome, Run, Seconds, read_weights, relative_distance, weights_file
from starling.launch.launcher import launch, this_machine
from starling.launch.link import VARIABLE
from starling.launch.process import Machines

Outcomes = list[list[Outcome]]
"""Outcomes by round, then by rank."""
LIMIT: Seconds = 300.0
"""Seconds that programs may take together."""


def learner_command(runs: Sequence[Run], folder: Path) -> list[str]:
    """The command of a learner's program that makes `runs`."""
    return [sys.executable, "-m", "benchmarks.learner", json.dumps([asdict(run) for run in runs]), str(folder)]


def launched(runs: Sequence[Run], folder: Path, machines: Machines = this_machine) -> Outcomes:
    """Make `runs` one after another in the same processes, started by Starling's launcher."""
    with tempfile.TemporaryDirectory(dir=folder) as own:
        launch(learner_command(runs, Path(own)), max(run.world for run in runs), Path(own), machines=machines)
        return read_outcomes(runs, Path(own))


def read_outcomes(runs: Sequence[Run], folder: Path) -> Outcomes:
    """The records of the learners of `runs`, by run and rank."""
    found: Outcomes = [[] for _ in runs]
    for rank in range(max(run.world for run in runs)):
        noted = json.loads((folder / f"outcomes-{rank}.json").read_text())
        for place, values in enumerate(noted):
            if values is not None:
                found[place].append(Outcome(**values))
    for number, outcomes in enumerate(found):
        files = [weights_file(folder, number, rank) for rank in range(len(outcomes))]
        if all(file.exists() for file in files):
            distance = relative_distance([read_weights(file) for file in files])
            found[number] = [replace(outcome, distance=distance) for outcome in outcomes]
    return found


def alternately(runs: Mapping[str, Run], rounds: int, make: Callable[[Sequence[Run]], Outcomes]) -> dict[str, Outcomes]:
    """Make each run once in every round, in an order that changes from round to round."""
    names = [name for number in range(rounds) for name in (list(runs) if number % 2 == 0 else reversed(list(runs)))]
    found: dict[str, Outcomes] = {name: [] for name in runs}
    for name, outcomes in zip(names, make([runs[name] for name in names]), strict=True):
        found[name].append(outcomes)
    return found


@dataclass(frozen=True)
class Program:
    """A program to start, with variables added to those of this process."""

    command: Sequence[str]
    variables: Mapping[str, object]


def run_side_by_side(programs: Sequence[Program], log_folder: Path, limit: Seconds = LIMIT) -> None:
    """Run programs until all have ended successfully. None outlives this call, nor this process if it listens to its
    link.

    Raises `RuntimeError` with the end of the log of the first program that fails, or if they take longer than `limit`.
    """
    processes: list[subprocess.Popen[bytes]] = []
    lines: list[socket.socket] = []
    deadline = time.monotonic() + limit
    try:
        for number, program in enumerate(programs):
            ours, theirs = socket.socketpair()
            lines.append(ours)
            with theirs, _log(log_folder, number).open("wb") as log:
                variables = {**program.variables, VARIABLE: theirs.fileno()}
                process = subprocess.Popen(
                    list(program.command),
                    env={**os.environ, **{name: str(value) for name, value in variables.items()}},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            processes.append(process)
        while any(process.poll() is None for process in processes):
            failed = [number for number, process in enumerate(processes) if process.poll()]
            if failed or time.monotonic() > deadline:
                break
            _wait_a_little(processes)
        for number, process in enumerate(processes):
            if process.poll():
                raise RuntimeError(
                    f"program {number} ended with exit code {process.returncode}:\n{_end_of(_log(log_folder, number))}"
                )
        if any(process.poll() is None for process in processes):
            raise RuntimeError(f"programs did not end within {limit:g} s: {programs[0].command}")
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        for line in lines:
            line.close()


def _wait_a_little(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    """Wait briefly for the first running process to end; another one may fail meanwhile."""
    running = next((process for process in processes if process.poll() is None), None)
    if running is not None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.wait(timeout=0.1)


def _log(folder: Path, number: int) -> Path:
    return folder / f"program-{number}.log"


def _end_of(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-20:])
