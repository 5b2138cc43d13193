"""Promise 38 on a device: kernels are held up on purpose, and everything is in order nevertheless."""

import threading

import pytest
import torch
from torch import nn

from starling.engines.processes.backend import Staging
from starling.engines.processes.threads import Worker
from starling.training.replica import Replica
from starling.training.streams import beside_this_thread

SIZE = 1 << 20
A_WHILE = 20_000_000
"""Clock cycles, about 10 ms."""


@pytest.fixture
def device(cuda: torch.device) -> torch.device:
    """The CPU will not do here."""
    return cuda


def replica(device: torch.device) -> Replica:
    weights, gradients = torch.zeros(SIZE, device=device), torch.zeros(SIZE, device=device)
    parameter = nn.Parameter(weights)
    parameter.grad = gradients
    return Replica(weights, gradients, [parameter], lambda given: torch.optim.SGD(given, lr=1.0), None)


def test_a_snapshot_on_another_stream_has_the_step_before_it(device: torch.device) -> None:
    """The step's kernels are still waiting when the snapshot is asked for."""
    mine, seen = replica(device), []
    beside = beside_this_thread(device)
    with torch.cuda.device(device):
        torch.cuda._sleep(A_WHILE)
    mine.apply(torch.ones(SIZE, device=device))

    def look() -> None:
        with beside:
            seen.append(mine.snapshot().cpu())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen[0].eq(1.0).all()


def test_the_background_does_not_wait_for_what_is_computed_meanwhile(device: torch.device) -> None:
    """A snapshot is there while the compute stream still works; `Event.query` tells that it does."""
    mine, still_busy = replica(device), []
    mine.apply(torch.ones(SIZE, device=device))
    beside, busy = beside_this_thread(device), torch.cuda.Event()
    torch.cuda._sleep(200 * A_WHILE)
    busy.record()

    def look() -> None:
        with beside:
            assert mine.snapshot().cpu().eq(1.0).all()
            still_busy.append(not busy.query())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert still_busy == [True]


def test_steps_and_changes_on_two_streams_lose_nothing(device: torch.device) -> None:
    """Hundreds of each, in two threads, piece by piece."""
    mine, times, beside = replica(device), 200, beside_this_thread(device)
    pieces = mine.pieces(SIZE // 7, optimizer_state=False)

    def average() -> None:
        with beside:
            for _ in range(times):
                for piece in pieces:
                    mine.apply(torch.full((piece.stop - piece.start,), 4.0, device=device), piece)

    thread = threading.Thread(target=average)
    thread.start()
    gradient = torch.full((SIZE,), -1.0, device=device)
    for _ in range(times):
        mine.step(gradient, 1.0)
    thread.join()
    assert mine.on_host().eq(5.0 * times).all()


def test_what_is_sent_is_complete_and_what_is_received_is_there(device: torch.device) -> None:
    """Through pinned memory and back, many pieces at once, each made behind a kernel that takes long."""
    sender = Worker("starling-staging")
    staging, arrived = Staging(device, sender), []
    torch.cuda._sleep(A_WHILE)
    made = [torch.full((SIZE,), float(number), device=device) for number in range(8)]
    begun = [staging.hand_over(each, lambda host: arrived.append(host.clone())) for each in made]
    for wait in begun:
        wait()
    assert all(host.eq(float(number)).all() for number, host in enumerate(arrived))
    back = [staging.to_device(host.pin_memory()) * 2.0 for host in arrived]
    assert all(each.eq(2.0 * number).all() for number, each in enumerate(back))
    sender.close()
