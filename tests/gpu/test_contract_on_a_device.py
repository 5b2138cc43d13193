"""The contract's cases with learners that share one CUDA device, and so communicate by gloo through host memory."""

import json
import sys
from functools import cache

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.contract.cases import CHOICES, cases
from tests.contract.conftest import Runner, on_virtual
from tests.contract.test_asynchronous import check_that_all_updates_count
from tests.contract.test_contract import flat, in_the_plain_loop
from tests.warm_start import run_learners

__all__ = ["on_virtual"]
MEMBERS = {2: (0, 1), 4: (0, 1, 2, 3), 1: (0,)}
VARIANTS = {1: ("sgd", "adam"), 2: ("sgd", "adam", "still", "counted", "accumulated"), 4: ("still", "counted")}
every_strategy = pytest.mark.parametrize("strategy", CHOICES)


@pytest.fixture(scope="module")
def on_device(device: torch.device, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """All cases are run by the same four processes."""

    @cache
    def run_all() -> dict[tuple[str, int], list[Tensor]]:
        folder = tmp_path_factory.mktemp("device")
        runs = [
            (f"{choice}/{variant}", members)
            for world, members in MEMBERS.items()
            for choice in CHOICES
            for variant in VARIANTS[world]
        ]
        command = [sys.executable, "-m", "tests.contract.learner_process", json.dumps(runs), str(folder), device.type]
        run_learners(command, 4, folder, is_cold=True)
        return {
            (name, len(members)): [load_file(folder / f"{number}-{rank}.safetensors")["weights"] for rank in members]
            for number, (name, members) in enumerate(runs)
        }

    return lambda name, world: run_all()[name, world]


@every_strategy
@pytest.mark.parametrize("variant", VARIANTS[1])
def test_one_learner_on_a_device_is_the_plain_loop_to_the_bit(
    strategy: str, variant: str, device: torch.device, on_device: Runner
) -> None:
    """The same model, on the same device, without Starling."""
    expected = in_the_plain_loop(variant, device)
    (weights,) = on_device(f"{strategy}/{variant}", 1)
    if "server" in strategy or strategy == "hogwild":  # their optimizer steps in host memory
        torch.testing.assert_close(weights, expected, rtol=0.0, atol=1e-5)
    else:
        assert torch.equal(weights, expected)


@pytest.mark.parametrize("strategy", [name for name, choice in CHOICES.items() if choice.is_synchronous])
@pytest.mark.parametrize("variant", ["sgd", "adam", "accumulated"])
def test_a_device_and_the_virtual_engine_agree(
    strategy: str, variant: str, on_device: Runner, on_virtual: Runner
) -> None:
    """To rounding: a device rounds sums of its own. Adam divides by what was rounded."""
    found, expected = (torch.stack(run(f"{strategy}/{variant}", 2)) for run in (on_device, on_virtual))
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-4 if variant == "adam" else 1e-5)


@every_strategy
@pytest.mark.parametrize("learners", [2, 4])
def test_mixing_on_a_device_conserves_the_mean(strategy: str, learners: int, on_device: Runner) -> None:
    """A snapshot that is read before a change is complete, or a change that is lost, moves it."""
    start = flat(cases()[f"{strategy}/still"].job(learners).workload.make_model())
    mean = torch.stack(on_device(f"{strategy}/still", learners)).mean(dim=0)
    torch.testing.assert_close(mean, start, rtol=0.0, atol=1e-6)


@every_strategy
@pytest.mark.parametrize("learners", [2, 4])
def test_steps_and_averaging_on_a_device_lose_no_update(strategy: str, learners: int, on_device: Runner) -> None:
    """As on the other engines."""
    check_that_all_updates_count(strategy, on_device(f"{strategy}/counted", learners), are_processes=True)
