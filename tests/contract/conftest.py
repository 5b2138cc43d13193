"""Runs of the contract's cases on both engines."""

import json
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from starling.engines.virtual.cluster import Cluster, ComputeModel
from starling.engines.virtual.engine import VirtualEngine
from tests.contract.cases import CHOICES, EXCHANGES, cases
from tests.warm_start import run_learners

DISTINCT = (
    *("allreduce", "delayed", "delay-by-one", "dpsgd-pairs", "dpsgd-quasi-global", "dpsgd-d2", "dpsgd-tracking", "sgp"),
    *("gossip-pga", "dpsgd-int4", "a2cid2"),
    *("adpsgd-pairs", "adpsgd-ring", "hadpsgd", "local-sgd", "sparta", "diloco", "noloco"),
    *("post-local-sgd", "bmuf", "slowmo", "streaming-diloco", "decoupled-diloco", "easgd", "sparseloco", "ako"),
    *("server-hybrid", "server-asynchronous", "server-async-diloco", "server-aeasgd", "hogwild"),
)
"""A choice for each distinct coroutine: what `make test` runs on processes, too. The others are in `make test-all`."""
REPLICAS = ("allreduce", "delay-by-one", "dpsgd-pairs", "local-sgd", "server-hybrid", "hogwild")
"""A choice for each way to step: summed by a backend, late, alone and averaged, served, and in shared memory."""
OF_REPLICAS = ("accumulated", "not-finite", "unused", "thawed", "frozen")
"""What only these run on processes: it depends on the learner's course and replica, and not on the strategy."""
EXACT = ("sgd", "adam", "accumulated")
"""What exchanges, and super-learners of two, run to compare their bits."""
LARGER = (
    *("hadpsgd/", "adpsgd-pairs/", "adpsgd-random/", "a2cid2/one-slow", "a2cid2/descent"),
    *("server-summed/", "hogwild/"),
)
"""What four processes run, too: two super-learners of two, asynchronous learners with several neighbours or none."""
ALONE = ("sgd", "adam", "not-finite", "unused", "thawed")
"""What one process runs."""
IN_STEP = ("sgd", "adam", "accumulated", "same-data", "not-finite", "unused", "thawed", "weighted")
"""What only strategies run whose result does not depend on speeds."""
WIDE = ("adam", "same-data", "one-step", "no-step", "first-is-slow", "last-is-slow")
"""What runs on processes only in `make test-all`."""
MEMBERS = {3: (0, 1, 2), 2: (3, 4), 4: (0, 1, 2, 3), 1: (4,)}
"""Which processes run the cases of so many learners, in this order."""
WITHIN = 1100.0
"""Seconds that cases on processes may take: two minutes on two idle cores, many more on busy ones."""
Runner = Callable[[str, int], list[Tensor]]
"""From a case's name and the number of learners to their final weights `[P]`, by rank."""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Both engines must split their sums alike."""
    torch.set_num_threads(1)


def widely(names: Iterable[str]) -> list[Any]:
    """Choices as the values of a parameter, of which `make test` has one for each distinct coroutine."""
    return [name if name in DISTINCT else pytest.param(name, marks=pytest.mark.wide) for name in names]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests on processes that are not part of `make test`."""
    for item in items:
        given = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        is_real = given.get("engine") == "on_processes" or "on_processes" in getattr(item, "fixturenames", ())
        case = given.get("strategy", ""), given.get("variant", ""), given.get("learners", 2)
        if item.path.parent == Path(__file__).parent and is_real and _is_wide(*case):
            item.add_marker(pytest.mark.wide)


def _is_wide(choice: str, variant: str, world: int) -> bool:
    """Whether only `make test-all` runs a case of so many processes."""
    if choice == EXCHANGES.name:
        return world > 2
    others = choice in CHOICES and choice not in DISTINCT
    return others or variant in WIDE or world == 3 or (world == 4 and choice != "hadpsgd")


@pytest.fixture(scope="session")
def on_processes(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """The same five processes run all cases of `make test`, and again five the others; those of two beside those of
    three."""

    @cache
    def run_all(is_wide: bool) -> dict[tuple[str, int], list[Tensor]]:
        folder = tmp_path_factory.mktemp("processes")
        runs = [
            (name, members)
            for world, members in MEMBERS.items()
            for name in cases()
            if _is_asked_for(name, world) and _is_wide(*_parts(name), world) == is_wide
        ]
        command = [sys.executable, "-m", "tests.contract.learner_process", json.dumps(runs), str(folder)]
        run_learners(command, 1 + max(max(members) for members in MEMBERS.values()), folder, WITHIN)
        return {
            (name, len(members)): [
                load_file(folder / f"{number}-{rank}.safetensors")["weights"] for rank in range(len(members))
            ]
            for number, (name, members) in enumerate(runs)
        }

    return lambda name, world: run_all(_is_wide(*_parts(name), world))[name, world]


def _parts(name: str) -> tuple[str, str]:
    """The choice and the variant of a case."""
    choice, _, variant = name.partition("/")
    return choice, variant


def _is_asked_for(name: str, world: int) -> bool:
    """Whether a test asks for this case of so many processes."""
    choice, variant = _parts(name)
    if choice == EXCHANGES.name:
        return world in (2, 3) and variant in EXACT
    if variant in OF_REPLICAS and choice not in REPLICAS:
        return (choice, variant, world) == ("hadpsgd", "accumulated", 4)
    if variant == "frozen":
        return world == 2
    if world == 1:
        return variant in ALONE
    if world == 4:
        is_exact = choice == "hadpsgd" and variant in EXACT
        return is_exact or (name.startswith(LARGER) and variant not in ("still", *IN_STEP))
    return CHOICES[choice].is_synchronous or variant not in IN_STEP


@pytest.fixture(scope="session")
def on_virtual() -> Runner:
    """A case on a virtual cluster with unequal gradient times."""
    cluster = Cluster(compute=ComputeModel(distribution="uniform", seconds=0.1, spread=0.5))

    @cache
    def run(name: str, world: int) -> list[Tensor]:
        outcome = VirtualEngine(cases()[name].job(world), world, cluster).run()
        return [state.weights.clone() for state in outcome.states]

    return run
