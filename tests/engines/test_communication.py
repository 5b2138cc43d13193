"""Who may use which communicator, and whose error is whose."""

import json
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

from starling.engines.processes.backend import ConnectionFailed, ReducingModel, communicating
from tests.contract.cases import CHOICES, LEARNING_RATE
from tests.warm_start import run_learners

BACKGROUNDS = ["hadpsgd", "adpsgd-pairs", "server-asynchronous", "server-summed"]
WORLD = 4


@pytest.fixture
def alone() -> Generator[None, None, None]:
    """A gloo group of this process alone."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_each_thread_has_communicators_of_its_own(tmp_path: Path) -> None:
    """On an accelerator's code path, every strategy with a background counts every gradient once, and the learners of
    a super-learner end with the same weights."""
    runs = [(f"{name}/{case}", list(range(WORLD))) for name in BACKGROUNDS for case in ("counted", "sgd")]
    command = [sys.executable, "-m", "tests.engines.device_process", json.dumps(runs), str(tmp_path)]
    run_learners(command, WORLD, tmp_path)

    def weights(number: int) -> Tensor:
        return torch.stack([load_file(tmp_path / f"{number}-{rank}.safetensors")["weights"] for rank in range(WORLD)])

    for number, name in enumerate(BACKGROUNDS):
        counted = weights(2 * number).double().mean(dim=0)
        expected = torch.full_like(counted, -LEARNING_RATE * 60 * CHOICES[name].share(WORLD))
        torch.testing.assert_close(counted, expected, rtol=1e-6, atol=0.0)
    first, second, third, fourth = weights(2 * BACKGROUNDS.index("hadpsgd") + 1)
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(third, fourth, rtol=1e-5, atol=1e-6)


class Complaining(nn.Module):
    """A model that complains in words like a network's, in forward or in backward."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.when = when

    def forward(self, points: Tensor) -> Tensor:
        if self.when == "forward":
            raise RuntimeError("gloo: Connection reset by peer, Timed out")
        made: Tensor = self.inner(points)
        if self.when == "backward":
            made.register_hook(complain)
        return made


def complain(_: Tensor) -> None:
    raise RuntimeError("gloo: Connection reset by peer, Timed out")


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_what_a_model_raises_is_never_taken_for_a_lost_peer(when: str, alone: None) -> None:
    """Whatever its words, even where gradients are averaged inside of backward."""
    model = ReducingModel(Complaining(when), None)
    with pytest.raises(RuntimeError, match="Connection reset by peer"), model.reducing():
        model.model(torch.ones(1, 2)).sum().backward()


def test_a_mean_that_fails_inside_of_backward_is_a_failed_connection(
    alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backend's own error keeps its name, although autograd passes it on."""

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("the other side hung up")

    model = ReducingModel(Complaining("never"), None)
    monkeypatch.setattr(dist, "all_reduce", broken)
    with pytest.raises(ConnectionFailed, match="hung up"), model.reducing():
        model.model(torch.ones(1, 2)).sum().backward()


def test_only_errors_of_the_runtime_are_a_backends() -> None:
    """A mistake in our own call stays what it is."""
    with pytest.raises(TypeError), communicating():
        raise TypeError("wrong argument")
    with pytest.raises(ConnectionFailed, match="first line"), communicating():
        raise RuntimeError("first line\nsecond line")
