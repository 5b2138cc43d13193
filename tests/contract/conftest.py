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
from tests.contract.cases import cases

LARGER = ("hadpsgd/", "adpsgd-pairs/", "adpsgd-random/")
"""What four processes run, too: two super-learners of two, and asynchronous learners with several neighbours."""
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
        names = [name for name in cases() if world < 4 or name.startswith(LARGER)]
        command = [sys.executable, "-m", "tests.contract.learner_process", json.dumps(names), str(folder)]
        launch(command, world, folder)
        return {
            name: [load_file(folder / f"{number}-{rank}.safetensors")["weights"] for rank in range(world)]
            for number, name in enumerate(names)
        }

    return lambda name, world: run_all(world)[name]


@pytest.fixture(scope="session")
def on_virtual() -> Runner:
    """A case on a virtual cluster with unequal gradient times."""
    cluster = Cluster(compute=ComputeModel(distribution="uniform", seconds=0.1, spread=0.5))

    @cache
    def run(name: str, world: int) -> list[Tensor]:
        outcome = VirtualEngine(cases()[name].job(world), world, cluster).run()
        return [state.weights.clone() for state in outcome.states]

    return run
