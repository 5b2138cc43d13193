"""The program of a learner that writes its weights at each barrier. `cut_process.py STRATEGY OPTIONS LINKED FOLDER`"""

import json
import sys
from pathlib import Path

import torch

from starling.checkpoint.state import LearnerState
from starling.engines.processes import links
from starling.engines.processes.member import run_learner
from starling.launch.rendezvous import find_place
from starling.training.job import Observer
from starling.training.speeds import Stragglers
from tests.checkpoint.cut_cases import job


class Written(Observer):
    """Writes the weights at each barrier to a file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_barrier(self, state: LearnerState) -> None:
        path = self._folder / f"{state.position.num_done}-{state.rank}.json"
        path.write_text(json.dumps(state.weights.tolist()), encoding="utf-8")


def main(strategy: str, options: str, linked: str, folder: str) -> None:
    torch.set_num_threads(1)
    if linked != "linked":
        links._machine = lambda: None
    place = find_place(timeout_seconds=60)
    stragglers = Stragglers(slow={1: 3.0}, jitter=2.0)
    mine = job(strategy, json.loads(options), stragglers=stragglers, seed=3)
    run_learner(mine, place, torch.device("cpu"), "same", Written(Path(folder)), timeout_seconds=60.0)


if __name__ == "__main__":
    main(*sys.argv[1:])
