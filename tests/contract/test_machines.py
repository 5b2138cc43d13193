"""The contract between machines, where nothing can be lent: by gloo alone, and mixed with links inside each machine."""

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.contract.cases import CHOICES, LEARNING_RATE
from tests.contract.conftest import Runner
from tests.warm_start import run_learners

SAME_BITS = ["allreduce-int8", "dpsgd-ring", "dpsgd-random", "delay-by-one", "exchanges"]
COUNTED = ["allreduce", "adpsgd-random", "adpsgd-bfloat16", "adpsgd-in-pieces", "hadpsgd", "server-asynchronous"]
WORLD = 4
Between = Callable[[str, str], Tensor]
"""From what the machines are, and a case, to the final weights `[L, P]`."""


@pytest.fixture(scope="module")
def between(tmp_path_factory: pytest.TempPathFactory) -> Between:
    runs = [f"{name}/sgd" for name in SAME_BITS] + [f"{name}/counted" for name in COUNTED]

    @cache
    def run_all(machines: str) -> Path:
        folder = tmp_path_factory.mktemp("machines")
        listed = json.dumps([(run, list(range(WORLD))) for run in runs])
        command = [sys.executable, "-m", "tests.contract.machines_process", machines, listed, str(folder)]
        run_learners(command, WORLD, folder)
        return folder

    def weights(machines: str, case: str) -> Tensor:
        folder, number = run_all(machines), runs.index(case)
        return torch.stack([load_file(folder / f"{number}-{rank}.safetensors")["weights"] for rank in range(WORLD)])

    return weights


every_pair = pytest.mark.parametrize("machines", ["four", "two"])


@pytest.mark.wide
@every_pair
@pytest.mark.parametrize("name", SAME_BITS)
def test_what_travels_between_machines_has_the_same_bits(
    name: str, machines: str, between: Between, on_virtual: Runner
) -> None:
    """Sums run in rank order, whether tensors travel or are lent."""
    expected = torch.stack(on_virtual(f"{name}/sgd", WORLD))
    assert torch.equal(between(machines, f"{name}/sgd"), expected)


@pytest.mark.wide
@every_pair
@pytest.mark.parametrize("name", COUNTED)
def test_no_update_is_lost_between_machines(name: str, machines: str, between: Between) -> None:
    """Every gradient is 1, so the mean of the weights counts the steps."""
    counted = between(machines, f"{name}/counted").double().mean(dim=0)
    expected = torch.full_like(counted, -LEARNING_RATE * 60 * CHOICES[name].share(WORLD))
    torch.testing.assert_close(counted, expected, rtol=2**-8 if "bfloat16" in name else 1e-6, atol=0.0)
