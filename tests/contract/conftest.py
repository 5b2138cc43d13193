"""Runs of the contract's cases on both engines."""

import json
import sys
from collections.abc import Callable
from functools import cache

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from starling.engines.cluster import Cluster, ComputeModel
from starling.engines.virtual import VirtualEngine
from starling.launch.launcher import launch
from tests.contract.cases import CHOICES, EXCHANGES, cases

LARGER = ("hadpsgd/", "adpsgd-pairs/", "adpsgd-random/", "server-summed/", "hogwild/")
"""What four processes run, too: two super-learners of two, asynchronous learners with several neighbours or none."""
ALONE = ("/sgd", "/adam")
"""What one process runs."""
IN_STEP = ("/sgd", "/adam", "/accumulated", "/same-data")
"""What only strategies run whose result does not depend on speeds."""
Runner = Callable[[str, int], list[Tensor]]
"""From a case's name and the number of learners to their final weights `[P]`, by rank."""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Both engines must split their sums alike."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def on_processes(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """All cases of one number of learners are run by the same processes, to pay their start once."""

    @cache
    def run_all(world: int) -> dict[str, list[Tensor]]:
        folder = tmp_path_factory.mktemp(f"processes-{world}")
        names = [name for name in cases() if _is_asked_for(name, world)]
        command = [sys.executable, "-m", "tests.contract.learner_process", json.dumps(names), str(folder)]
        launch(command, world, folder)
        return {
            name: [load_file(folder / f"{number}-{rank}.safetensors")["weights"] for rank in range(world)]
            for number, name in enumerate(names)
        }

    return lambda name, world: run_all(world)[name]


def _is_asked_for(name: str, world: int) -> bool:
    """Whether a test asks for this case of so many processes."""
    choice, _, _ = name.partition("/")
    if world == 1:
        return name.endswith(ALONE)
    if world == 4 and not name.startswith(LARGER):
        return False
    in_step = choice == EXCHANGES.name or choice == "hadpsgd" or CHOICES[choice].is_synchronous
    return in_step or not name.endswith(IN_STEP)


@pytest.fixture(scope="session")
def on_virtual() -> Runner:
    """A case on a virtual cluster with unequal gradient times."""
    cluster = Cluster(compute=ComputeModel(distribution="uniform", seconds=0.1, spread=0.5))

    @cache
    def run(name: str, world: int) -> list[Tensor]:
        outcome = VirtualEngine(cases()[name].job(world), world, cluster).run()
        return [state.weights.clone() for state in outcome.states]

    return run
