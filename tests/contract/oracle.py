"""The strategies in naive matrix form, in NumPy: W_{k+1} = W_k T - a g(Phi_k), one column a learner."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from starling.topology import PATTERNS, complete, find_topology, identity
from starling.training.flat import trainable
from starling.workload import Ticket
from tests.contract.problems import TinyRegression

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]
Gradient = Callable[[Vector, int], Vector]
"""From weights `[P]` and the number of a mini-batch to the gradient `[P]`."""
Oracle = Callable[[Vector, Gradient, float, int, int], Matrix]
"""From the first weights `[P]`, the gradient, the learning rate, the numbers of learners and rounds to `[P, L]`."""


def allreduce(start: Vector, gradient: Gradient, learning_rate: float, learners: int, rounds: int) -> Matrix:
    """W <- W - a G 1 1^T / L: every column moves by the mean of all gradients."""
    weights = np.tile(start[:, None], (1, learners))
    for k in range(rounds):
        gradients = columns(weights, gradient, k)
        weights = weights @ identity(learners) - learning_rate * gradients @ complete(learners)
    return weights


def delay_by_one(start: Vector, gradient: Gradient, learning_rate: float, learners: int, rounds: int) -> Matrix:
    """W <- W 1 1^T / L - a G(W): the gradients are those of the weights before averaging."""
    weights = np.tile(start[:, None], (1, learners))
    for k in range(rounds):
        gradients = columns(weights, gradient, k)
        weights = weights @ complete(learners) - learning_rate * gradients
    return weights


def delayed(delay: int) -> Oracle:
    """W <- W - a G(W_{k-d}) 1 1^T / L: every mean of gradients waits for d rounds."""

    def run(start: Vector, gradient: Gradient, learning_rate: float, learners: int, rounds: int) -> Matrix:
        weights = np.tile(start[:, None], (1, learners))
        late: list[Matrix] = []
        for k in range(rounds):
            late.append(columns(weights, gradient, k) @ complete(learners))
            if len(late) > delay:
                weights = weights - learning_rate * late.pop(0)
        return weights - learning_rate * sum(late)

    return run


def dpsgd(pattern: str) -> Oracle:
    """W <- W T_k - a G(W), T_k after the pattern."""

    def run(start: Vector, gradient: Gradient, learning_rate: float, learners: int, rounds: int) -> Matrix:
        topology = find_topology(pattern, learners, seed=11)
        weights = np.tile(start[:, None], (1, learners))
        for k in range(rounds):
            gradients = columns(weights, gradient, k)
            weights = weights @ topology.matrix(k) - learning_rate * gradients
        return weights

    return run


def adpsgd(pattern: str) -> Oracle:
    """The same with gradients one mixing late, W <- (W - a G(Phi)) T_k with Phi <- W - a G(Phi): what ADPSGD does where
    all gradients take the same time, longer than a round, and one round passes for each."""

    def run(start: Vector, gradient: Gradient, learning_rate: float, learners: int, rounds: int) -> Matrix:
        topology = find_topology(pattern, learners, seed=11)
        weights = taken_at = np.tile(start[:, None], (1, learners))
        for k in range(rounds):
            stepped = weights - learning_rate * columns(taken_at, gradient, k)
            weights, taken_at = stepped @ topology.matrix(k), stepped
        return weights

    return run


def gradient_of_regression() -> Gradient:
    """The gradients of `TinyRegression`, in double precision, from autograd."""
    workload = TinyRegression()
    model = workload.make_model().double()
    parameters = trainable(model)

    def gradient(weights: Vector, number: int) -> Vector:
        nn.utils.vector_to_parameters(torch.from_numpy(weights), parameters)
        (points,) = workload.load(Ticket(number // 12, number % 12, number))
        loss = ((model(points.inputs.double()).squeeze(1) - points.targets.double()) ** 2).mean()
        return torch.cat([part.reshape(-1) for part in torch.autograd.grad(loss, parameters)]).numpy()

    return gradient


def columns(weights: Matrix, gradient: Gradient, k: int) -> Matrix:
    """The gradients of round `k`, `[P, L]`: learner l takes mini-batch k L + l at its own column."""
    learners = weights.shape[1]
    return np.stack([gradient(weights[:, rank], k * learners + rank) for rank in range(learners)], axis=1)


SYNCHRONOUS = {
    "allreduce": allreduce,
    "delay-by-one": delay_by_one,
    "server-hybrid": allreduce,
    "delayed": delayed(2),
} | {f"dpsgd-{pattern}": dpsgd(pattern) for pattern in PATTERNS}
ASYNCHRONOUS = {f"adpsgd-{pattern}": adpsgd(pattern) for pattern in PATTERNS}
