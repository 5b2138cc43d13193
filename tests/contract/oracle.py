"""The strategies in naive matrix form, in NumPy: W_{k+1} = W_k T - a g(Phi_k), one column a learner."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from starling.strategies.compression import Compression, TopK
from starling.topology import PATTERNS, find_topology
from starling.topology.analysis import complete, identity
from starling.training.flat import trainable
from starling.workload import Ticket
from tests.contract.cases import CHOICES, PERIODIC
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


def rounded(vector: Vector, compression: Compression) -> Vector:
    """What the receivers of an encoded vector decode; at most 256 numbers."""
    largest = np.abs(vector).max()
    if isinstance(compression, TopK) and compression.bits == 2:
        largest = rounded(vector, TopK(top_k=compression.top_k))
        scale = np.abs(vector).max() / 3
        return np.sign(largest) * scale * np.where(np.abs(largest) > 2 * scale, 3, 1)
    if isinstance(compression, TopK):
        kept = np.argsort(-np.abs(vector), kind="stable")[: max(1, round(compression.top_k * len(vector)))]
        return np.where(np.isin(np.arange(len(vector)), kept), vector, 0.0)
    if compression == "none" or largest == 0.0:
        return vector
    if compression == "bfloat16":
        return torch.from_numpy(vector).float().bfloat16().double().numpy()
    step = largest / {"int8": 127, "int4": 7}[compression]
    return step * np.round(vector / step)


def mean_of_encoded(vectors: Matrix, residuals: Matrix, compression: Compression) -> Vector:
    """Each owner's chunk: q_l = C(v_l + e_l) to the owner, C(mean + e) back to all; `residuals` `[P, L]` change."""
    size, learners = vectors.shape
    if compression == "none" or learners == 1:
        return vectors.mean(axis=1)
    padded, errors = np.zeros((2, -(-size // learners) * learners, learners))
    padded[:size], errors[:size] = vectors, residuals
    mean = np.zeros(len(padded))
    for owner, rows in enumerate(np.split(np.arange(len(padded)), learners)):
        sent = padded[rows] + errors[rows]
        sent[:, owner] = padded[rows, owner]
        decoded = np.stack([rounded(each, compression) for each in sent.T], axis=1)
        decoded[:, owner] = sent[:, owner]
        summed = decoded.mean(axis=1) + errors[rows, owner]
        mean[rows] = rounded(summed, compression)
        errors[rows] = sent - decoded
        errors[rows, owner] = summed - mean[rows]
    residuals[:] = errors[:size]
    return mean[:size]


def allreduce_of_encoded(compression: Compression) -> Oracle:
    """The same with the mean of gradients that travel encoded."""

    def run(start: Vector, gradient: Gradient, learning_rate: float, learners: int, rounds: int) -> Matrix:
        weights = np.tile(start[:, None], (1, learners))
        residuals = np.zeros_like(weights)
        for k in range(rounds):
            mean = mean_of_encoded(columns(weights, gradient, k), residuals, compression)
            weights = weights - learning_rate * mean[:, None]
        return weights

    return run


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


def adapt_first(pattern: str) -> Oracle:
    """W <- (W - a G(W)) T_k."""

    def run(start: Vector, gradient: Gradient, learning_rate: float, learners: int, rounds: int) -> Matrix:
        topology = find_topology(pattern, learners, seed=11)
        weights = np.tile(start[:, None], (1, learners))
        for k in range(rounds):
            weights = (weights - learning_rate * columns(weights, gradient, k)) @ topology.matrix(k)
        return weights

    return run


def quasi_global(pattern: str, beta: float, mu: float) -> Oracle:
    """X' = (X - a (beta M + G)) T_k, M <- (1 - mu) M + mu (X - X') / a."""

    def run(start: Vector, gradient: Gradient, learning_rate: float, learners: int, rounds: int) -> Matrix:
        topology = find_topology(pattern, learners, seed=11)
        weights = np.tile(start[:, None], (1, learners))
        momentum = np.zeros_like(weights)
        for k in range(rounds):
            moved = beta * momentum + columns(weights, gradient, k)
            following = (weights - learning_rate * moved) @ topology.matrix(k)
            momentum = (1 - mu) * momentum + mu * (weights - following) / learning_rate
            weights = following
        return weights

    return run


def d2(pattern: str) -> Oracle:
    """X_(k+1) = (2 X_k - X_(k-1) - a (G_k - G_(k-1))) S with S = (I + T) / 2, X_1 = (X_0 - a G_0) S."""

    def run(start: Vector, gradient: Gradient, learning_rate: float, learners: int, rounds: int) -> Matrix:
        half = (identity(learners) + find_topology(pattern, learners, seed=11).matrix(0)) / 2
        weights = before = np.tile(start[:, None], (1, learners))
        gradients_before = np.zeros_like(weights)
        for k in range(rounds):
            gradients = columns(weights, gradient, k)
            following = 2 * weights - before - learning_rate * (gradients - gradients_before)
            weights, before, gradients_before = following @ half, weights, gradients
        return weights

    return run


def tracking(pattern: str) -> Oracle:
    """Y <- Y T_k + G_k - G_(k-1), X <- X T_k - a Y."""

    def run(start: Vector, gradient: Gradient, learning_rate: float, learners: int, rounds: int) -> Matrix:
        topology = find_topology(pattern, learners, seed=11)
        weights = np.tile(start[:, None], (1, learners))
        estimate, gradients_before = np.zeros((2, *weights.shape))
        for k in range(rounds):
            gradients = columns(weights, gradient, k)
            estimate = estimate @ topology.matrix(k) + gradients - gradients_before
            weights, gradients_before = weights @ topology.matrix(k) - learning_rate * estimate, gradients
        return weights

    return run


def push_sum(pattern: str, overlap: bool = False) -> Oracle:
    """X <- (X - a G(Z)) P_k, u <- u P_k, Z = X / u. With an overlap, what leaves the diagonal arrives a step later."""

    def run(start: Vector, gradient: Gradient, learning_rate: float, learners: int, rounds: int) -> Matrix:
        topology = find_topology(pattern, learners, seed=11, is_balanced=False)
        held = np.vstack([np.tile(start[:, None], (1, learners)), np.ones((1, learners))])  # X and, below it, u
        under_way = np.zeros_like(held)
        for k in range(rounds):
            held[:-1] -= learning_rate * columns(held[:-1] / held[-1], gradient, k)
            held, shares = held + under_way, topology.matrix(k)
            kept = np.diag(np.diag(shares))
            under_way = held @ (shares - kept)
            held = held @ kept
            if not overlap:
                held, under_way = held + under_way, np.zeros_like(held)
        held = held + under_way
        return held[:-1] / held[-1]

    return run


def choco(pattern: str, compression: Compression, gamma: float, mean_every: int = 0) -> Oracle:
    """Q = C(W - Y), Y <- Y + Q, S <- S + Q T, W <- W + gamma (S - Y) - a G(W); in the first round Q = W. In every
    `mean_every`-th round W <- W 1 1^T / L - a G(W)."""

    def run(start: Vector, gradient: Gradient, learning_rate: float, learners: int, rounds: int) -> Matrix:
        mixing = find_topology(pattern, learners, seed=11).matrix(0)
        weights = np.tile(start[:, None], (1, learners))
        public, mixture = np.zeros((2, *weights.shape))
        for k in range(rounds):
            gradients = columns(weights, gradient, k)
            if mean_every and (k + 1) % mean_every == 0:
                weights = weights @ complete(learners) - learning_rate * gradients
                continue
            sent = np.stack([rounded(each, compression) for each in (weights - public).T], axis=1) if k else weights
            public, mixture = public + sent, mixture + sent @ mixing
            weights = weights + gamma * (mixture - public) - learning_rate * gradients
        return weights

    return run


def allreduce_of_factors(rank: int, shapes: Sequence[tuple[int, int]]) -> Oracle:
    """PowerSGD: P = orthogonalise(mean M Q), Q_l = M_l^T P, and P mean(Q)^T for the mean of each matrix; `shapes` are
    those of the matrices, with 0 columns for a vector that is averaged as it is."""

    def run(start: Vector, gradient: Gradient, learning_rate: float, learners: int, rounds: int) -> Matrix:
        weights = np.tile(start[:, None], (1, learners))
        if learners == 1:
            return allreduce(start, gradient, learning_rate, learners, rounds)
        residuals = np.zeros_like(weights)
        size = rank * sum(columns for _, columns in shapes)
        random = torch.randn(size, generator=torch.Generator().manual_seed(11)).double().numpy()
        bases = np.split(random, np.cumsum([rank * columns for _, columns in shapes])[:-1])
        for k in range(rounds):
            moved = columns(weights, gradient, k)
            mean, first = moved.mean(axis=1), 0
            for number, (rows, width) in enumerate(shapes):
                place = slice(first, first := first + rows * max(1, width))
                if width == 0:
                    continue
                matrices = (moved + residuals)[place].T.reshape(learners, rows, width)
                left, _ = np.linalg.qr((matrices @ bases[number].reshape(width, rank)).mean(axis=0))
                right = np.swapaxes(matrices, 1, 2) @ left
                residuals[place] = (matrices - left @ np.swapaxes(right, 1, 2)).reshape(learners, -1).T
                bases[number] = right.mean(axis=0).reshape(-1)
                mean[place] = (left @ right.mean(axis=0).T).reshape(-1)
            weights = weights - learning_rate * mean[:, None]
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


def local(
    every: int,
    rate: float = 1.0,
    momentum: float | None = 0.0,
    nesterov: bool = False,
    divided_by_rate: bool = False,
    warm_up: int = 0,
    fragments: int = 1,
    overlap: int = 0,
    blend: float = 0.0,
    optimizer_state: str = "local",
    elastic: bool = False,
    share: float = 1.0,
    compression: Any = "none",
    among: str = "all",
    pull: float | None = None,
    feedback: float = 1.0,
) -> Oracle:
    """X <- X - a G(X), and every H steps D = theta - X 1 / L, v <- beta v + D, theta and X as the options say.

    Plain SGD has no state, so that what becomes of the state does not matter. With a compression, D is the mean of
    theta - X that travels encoded. Elastic: X <- X + (eta / L) (theta - X), both as they were tau steps ago. With a
    share, k random rows of X take their mean.
    """
    if among == "pairs":
        return noloco(every, rate, momentum or 0.0, rate if pull is None else pull, warm_up)
    if isinstance(compression, dict):
        compression = TopK(**compression)

    def run(start: Vector, gradient: Gradient, learning_rate: float, learners: int, rounds: int) -> Matrix:
        weights, theta, v = np.tile(start[:, None], (1, learners)), start.copy(), np.zeros_like(start)
        beta = 1 - 1 / learners if momentum is None else momentum
        size = -(-len(start) // fragments)
        pieces = [slice(first, min(first + size, len(start))) for first in range(0, len(start), size)]
        begun = [every * (number + 1) // len(pieces) for number in range(len(pieces))]
        sent: dict[int, Vector] = {}
        residuals = np.zeros_like(weights)
        apart: dict[int, Matrix] = {}

        def send(number: int) -> None:
            piece = pieces[number]
            moved = theta[piece, None] - weights[piece]
            residuals[piece] *= feedback
            apart[number], sent[number] = moved, mean_of_encoded(moved, residuals[piece], compression)

        def average_a_share(steps: int) -> None:
            generator = torch.Generator().manual_seed(11 * 1_000_003 + steps)
            k = max(1, round(share * len(start)))
            for number, chance in enumerate(torch.rand(k, generator=generator, dtype=torch.float64).tolist()):
                first, last = (each * len(start) // k for each in (number, number + 1))
                weights[first + int(chance * (last - first))] = weights[first + int(chance * (last - first))].mean()

        def agree(number: int, alpha: float | None) -> None:
            piece, a = pieces[number], learning_rate if divided_by_rate else 1.0
            difference = sent.pop(number) / a
            v[piece] = beta * v[piece] + difference
            theta[piece] -= rate * a * (difference + beta * v[piece] if nesterov else v[piece])
            if elastic and alpha is not None:
                weights[piece] += rate / learners * apart[number]
                return
            alpha = alpha or 0.0
            weights[piece] = alpha * weights[piece] + (1 - alpha) * theta[piece, None]

        for k in range(rounds):
            gradients = columns(weights, gradient, k)
            if k < warm_up:
                weights -= learning_rate * mean_of_encoded(gradients, residuals, compression)[:, None]
                theta = weights.mean(axis=1)
                if k + 1 == warm_up:
                    residuals[:] = 0.0
                continue
            weights -= learning_rate * gradients
            steps = k + 1 - warm_up
            for number in list(sent):
                if (steps - begun[number]) % every == overlap % every:
                    agree(number, blend)
            for number, first in enumerate(begun):
                if steps >= first and (steps - first) % every == 0 and share < 1.0:
                    average_a_share(k + 1)
                elif steps >= first and (steps - first) % every == 0:
                    send(number)
                    if overlap == 0:
                        agree(number, blend)
        for number in list(sent):
            agree(number, blend)
        is_partial = len(pieces) > 1 or overlap or elastic or share < 1.0
        if rounds > warm_up and (is_partial or (rounds - warm_up) % every):
            for number in range(len(pieces)):
                send(number)
                agree(number, None)
        return weights

    return run


def noloco(every: int, rate: float, momentum: float, pull: float, warm_up: int) -> Oracle:
    """With T_k of random pairs: M <- mu M + eta (X - Theta) T_k + gamma (Theta T_k - Theta), Theta <- Theta + M."""

    def run(start: Vector, gradient: Gradient, learning_rate: float, learners: int, rounds: int) -> Matrix:
        topology = find_topology("pairs", learners, seed=11)
        weights = np.tile(start[:, None], (1, learners))
        theta, m = weights.copy(), np.zeros_like(weights)
        for k in range(rounds):
            gradients = columns(weights, gradient, k)
            if k < warm_up:
                weights = theta = weights - learning_rate * gradients @ complete(learners)
                continue
            weights = weights - learning_rate * gradients
            number, steps_left = divmod(k + 1 - warm_up, every)
            if steps_left and k + 1 < rounds:
                continue
            pair = topology.matrix(number + (steps_left > 0))
            m = momentum * m + rate * (weights - theta) @ pair + pull * (theta @ pair - theta)
            weights = theta = theta + m
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


def periodic(name: str) -> Oracle:
    """`local` with the options of a choice, the strategy's own defaults among them."""

    def run(start: Vector, gradient: Gradient, learning_rate: float, learners: int, rounds: int) -> Matrix:
        options = CHOICES[name].options(learners).model_dump()
        return local(**options)(start, gradient, learning_rate, learners, rounds)

    return run


SYNCHRONOUS: dict[str, Oracle] = {
    "allreduce": allreduce,
    "allreduce-int8": allreduce_of_encoded("int8"),
    "allreduce-low-rank": allreduce_of_factors(1, [(4, 5), (4, 0), (4, 0), (1, 0)]),
    "delay-by-one": delay_by_one,
    "server-hybrid": allreduce,
    "delayed": delayed(2),
    "dpsgd-int4": choco("ring", "int4", 0.75, mean_every=5),
    "dpsgd-quasi-global": quasi_global("ring", 0.8, 0.2),
    "dpsgd-d2": d2("ring"),
    "dpsgd-tracking": tracking("pairs"),
    "sgp": push_sum("exponential"),
    "sgp-overlap": push_sum("exponential", overlap=True),
} | {f"dpsgd-{pattern}": dpsgd(pattern) for pattern in PATTERNS}
SYNCHRONOUS |= {name: periodic(name) for name in PERIODIC}
ASYNCHRONOUS = {f"adpsgd-{pattern}": adpsgd(pattern) for pattern in PATTERNS}


def ring_eigenvalues(world: int) -> Vector:
    """Eigenvalues of `ring`'s matrix, `[L]`: (1 + 2 cos(2 pi j / L)) / 3 for L >= 3; 1 and 0 for L = 2.

    j = 0 is the mean. The spectral gap shrinks as 1/L^2: lambda_1 is about 1 - 4 pi^2 / (3 L^2).
    """
    eigenvalues: Vector = (1 + 2 * np.cos(2 * np.pi * np.arange(world) / world)) / 3
    if world == 2:
        eigenvalues[1] = 0.0
    return eigenvalues


def random_ring_contraction(world: int) -> float:
    """`expected_contraction` of `random_ring`: 1/3 - 2 / (3 (L - 1)) for L >= 3, otherwise 0.

    E[T T^T] is invariant under permutations, so all its eigenvalues except the mean's are equal: (|T|^2 - 1) / (L - 1),
    with |T|^2 = L/3 the sum of the squared entries of a ring's matrix.
    """
    return (world - 3) / (3 * (world - 1)) if world >= 3 else 0.0


def pairs_contraction(world: int) -> float:
    """`expected_contraction` of `pairs`: (1 - 1 / (L - 1)) / 2 for even L, 1/2 for odd L >= 3, 0 for one learner.

    As for `random_ring`, with |T|^2 = L/2 for even L, and (L + 1) / 2 for odd L, where one learner is not paired.
    """
    if world % 2:
        return 0.5 if world > 1 else 0.0
    return (world - 2) / (2 * (world - 1))
