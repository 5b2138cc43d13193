"""A learner's own weights, changed by several threads."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from starling.errors import ConfigError
from starling.training.replica import OptimizerMemory, Replica

SIZE = 200_000


def replica(make_optimizer: Callable[..., Optimizer], size: int = SIZE) -> Replica:
    weights, gradients = torch.zeros(size), torch.zeros(size)
    parameter = nn.Parameter(weights)
    parameter.grad = gradients
    return Replica(weights, gradients, [parameter], make_optimizer, clip_norm=None)


def test_two_threads_that_change_the_weights_lose_no_update() -> None:
    """Steps in one thread, changes piece by piece in another: every one is there in the end, for every weight."""
    mine = replica(lambda parameters: torch.optim.SGD(parameters, lr=1.0))
    pieces = mine.pieces(SIZE // 7, optimizer_state=False)
    times, start = 200, threading.Barrier(2)

    def average() -> None:
        start.wait()
        for _ in range(times):
            for piece in pieces:
                mine.apply(torch.full((piece.stop - piece.start,), 4.0), piece)

    thread = threading.Thread(target=average)
    thread.start()
    start.wait()
    gradient = torch.full((SIZE,), -1.0)
    for _ in range(times):
        mine.step(gradient, 1.0)
    thread.join()
    assert torch.equal(mine.weights, torch.full((SIZE,), 5.0 * times))
    assert mine.version == 2 * times  # a change that comes in pieces is one change


def test_pieces_cover_weights_and_what_the_optimizer_remembers_once() -> None:
    """First the weights, then each moment; no piece crosses from one vector into the next."""
    mine = replica(lambda parameters: torch.optim.Adam(parameters, lr=0.1), size=10)
    for optimizer_state, vectors in ((False, 1), (True, 3)):
        pieces = mine.pieces(4, optimizer_state)
        assert [number for piece in pieces for number in range(piece.start, piece.stop)] == list(range(10 * vectors))
        assert all(piece.start // 10 == (piece.stop - 1) // 10 for piece in pieces)
    mine.apply(torch.ones(4), slice(10, 14))
    (state,) = mine.optimizer.state.values()
    assert state["exp_avg"].tolist() == [1.0] * 4 + [0.0] * 6
    assert not mine.weights.any()


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1),
        lambda parameters: torch.optim.Adam(parameters, lr=0.1, weight_decay=0.1),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
        lambda parameters: torch.optim.RMSprop(parameters, lr=0.1, momentum=0.9, centered=True),
    ],
)
def test_an_optimizer_whose_state_is_averaged_steps_as_ever(make_optimizer: Callable[..., Optimizer]) -> None:
    """Its state is made beforehand and lies in vectors, and not a bit of the weights is another for it."""

    def trained(averaged: bool) -> Tensor:
        mine = replica(make_optimizer, size=50)
        mine.weights.copy_(torch.linspace(-1.0, 1.0, 50))
        if averaged:
            mine.pieces(50, optimizer_state=True)
        for step in range(5):
            mine.step(torch.sin(torch.arange(50.0) + step), 0.5)
        return mine.weights

    assert torch.equal(trained(averaged=True), trained(averaged=False))


def test_second_moments_never_become_negative() -> None:
    """A change computed from an older, larger value could bring them below 0, and a square root to NaN."""
    mine = replica(lambda parameters: torch.optim.Adam(parameters, lr=0.1), size=4)
    mine.pieces(4, optimizer_state=True)
    mine.step(torch.ones(4), 1.0)
    mine.apply(torch.full((4,), -1.0), slice(8, 12))
    mine.step(torch.ones(4), 1.0)
    assert bool(torch.isfinite(mine.weights).all())


def test_an_optimizer_that_keeps_more_than_a_number_for_each_weight_is_refused() -> None:
    """NAdam's product of momenta belongs to no weight, and LBFGS keeps vectors of another kind."""
    parameter = nn.Parameter(torch.ones(4))
    parameter.grad = torch.zeros(4)
    with pytest.raises(ConfigError, match="NAdam keeps 'mu_product', which is not one number per weight"):
        OptimizerMemory(torch.optim.NAdam([parameter]), [parameter], lambda others: torch.optim.NAdam(others.values()))
