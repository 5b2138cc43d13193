"""NCCL: one learner on one device, and the loss of one of two learners on two.

Two NCCL ranks cannot share a device, so one device shows no sum of NCCL's over several learners.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

from starling.engines.processes import process_group as membership_group
from starling.engines.processes.backend import ReducingModel
from starling.engines.processes.handshake import Peers
from starling.engines.processes.place import Place
from starling.engines.processes.process_group import process_group
from starling.training.membership import Membership, MembershipFeed
from tests.launch.test_survivors import NUM_MINI_BATCHES, survive


@pytest.fixture
def device(cuda: torch.device) -> torch.device:
    """The CPU will not do here."""
    return cuda


def alone_watched() -> Peers:
    """One learner, which would outlive the loss of others."""
    return Peers(Place(0, 1, 0, 1, HashStore()), feed=MembershipFeed(0, Membership(0, (0,)), is_watched=True))


@pytest.fixture
def alone(device: torch.device) -> Iterator[None]:
    with process_group(alone_watched(), device):
        yield


def test_a_gradient_reduced_over_nccl_by_one_learner_is_its_own(device: torch.device, alone: None) -> None:
    """The code path of several devices, with one: buckets, hooks and the communicator are those of a run."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 8)).to(device)
    x = torch.randn(32, 64, device=device)
    expected = torch.autograd.grad(plain(x).square().mean(), list(plain.parameters()))
    group = dist.new_group([0], backend="nccl")
    membership_group.connect(group, device)
    reducing = ReducingModel(plain, group)
    for _ in range(3):  # DDP builds its buckets anew after the first
        plain.zero_grad()
        with reducing.reducing():
            reducing.model(x).square().mean().backward()
        for parameter, gradient in zip(plain.parameters(), expected, strict=True):
            assert torch.equal(parameter.grad, gradient)


def test_communicators_that_were_aborted_are_made_again(device: torch.device) -> None:
    """In the same process, over a store of the next membership; the watchdog lets the process live."""
    for _ in range(3):
        with process_group(alone_watched(), device) as connections:
            group = dist.new_group([0], backend="nccl")
            membership_group.connect(group, device)
            ones = torch.ones(4, device=device)
            dist.all_reduce(ones, group=group)
            assert ones.cpu().eq(1.0).all()
            connections.cut()
            connections.cut()  # again: nothing happens


@pytest.mark.cold
@pytest.mark.parametrize("victim", [0, 1])
def test_who_is_left_of_two_learners_on_nccl_finishes_the_budget(
    victim: int, two_devices: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits in a kernel when the other is killed, aborts, and goes on alone."""
    monkeypatch.setenv("STARLING_TEST_DEVICE", "cuda")
    harm, losses = survive("allreduce/ends", 2, victim, tmp_path)
    assert [loss.learner for loss in losses] == [victim]
    assert NUM_MINI_BATCHES <= harm.said[1 - victim]["num_done"] < NUM_MINI_BATCHES + 2
