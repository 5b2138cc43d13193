"""The strategies in naive matrix form, in NumPy: W_{k+1} = W_k T - a g(Phi_k), one column a learner."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from starling.strategies.parts.means import Compression
from starling.topology import PATTERNS, Topology, complete, find_topology, identity
from starling.training.flat import trainable
from starling.workload import Ticket
from tests.contract.cases import CHOICES, PERIODIC
from tests.contract.matrix_form import EncodedMean, Gradient, Matrix, Oracle, Vector, columns, rounded
from tests.contract.oracle_periodic import periodic
from tests.contract.problems import TinyRegression


def allreduce(start: Vector, gradient: Gradient, learning_rate: float, learners: int, rounds: int) -> Matrix:
    """W <- W - a G 1 1^T / L: every column moves by the mean of all gradients."""
    weights = np.tile(start[:, None], (1, learners))
    for k in range(rounds):
        gradients = columns(weights, gradient, k)
        weights = weights @ identity(learners) - learning_rate * gradients @ complete(learners)
    return weights


def allreduce_of_encoded(compression: Compression) -> Oracle:
    """The same with the mean of gradients that travel encoded."""

    def run(start: Vector, gradient: Gradient, learning_rate: float, learners: int, rounds: int) -> Matrix:
        weights = np.tile(start[:, None], (1, learners))
        mean = EncodedMean(compression, len(start), learners)
        for k in range(rounds):
            weights = weights - learning_rate * mean.of(columns(weights, gradient, k))[:, None]
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
    """W <- W T_k - a G(W), T_k after the pattern.

    Lian et al. 2017, arXiv 1705.09056, Algorithm 1, for all nodes together as in its section 4: X_(k+1) = X_k W -
    gamma dF(X_k; xi_k).
    """

    def run(start: Vector, gradient: Gradient, learning_rate: float, learners: int, rounds: int) -> Matrix:
        topology = find_topology(pattern, learners, seed=11)
        weights = np.tile(start[:, None], (1, learners))
        for k in range(rounds):
            gradients = columns(weights, gradient, k)
            weights = weights @ topology.matrix(k) - learning_rate * gradients
        return weights

    return run


def adapt_first(pattern: str) -> Oracle:
    """W <- (W - a G(W)) T_k.

    Koloskova et al. 2020, arXiv 2003.10422, Algorithm 1 with one local step: x_i^(t+1/2) = x_i^t - eta g_i^t,
    x_i^(t+1) = sum_j w_ij x_j^(t+1/2).
    """

    def run(start: Vector, gradient: Gradient, learning_rate: float, learners: int, rounds: int) -> Matrix:
        topology = find_topology(pattern, learners, seed=11)
        weights = np.tile(start[:, None], (1, learners))
        for k in range(rounds):
            weights = (weights - learning_rate * columns(weights, gradient, k)) @ topology.matrix(k)
        return weights

    return run


def quasi_global(pattern: str, beta: float, mu: float) -> Oracle:
    """X' = (X - a (beta M + G)) T_k, M <- (1 - mu) M + mu (X - X') / a.

    Lin et al. 2021, arXiv 2102.04761, Algorithm 1 (QG-DSGDm): m_i^t = beta m^_i^(t-1) + g_i^t,
    x_i^(t+1) = sum_j w_ij (x_j^t - eta m_j^t), d_i^t = (x_i^t - x_i^(t+1)) / eta, m^_i^t = mu m^_i^(t-1) + (1 - mu)
    d_i^t. Its mu is 1 - mu here.
    """

    def run(start: Vector, gradient: Gradient, learning_rate: float, learners: int, rounds: int) -> Matrix:
        topology = find_topology(pattern, learners, seed=11)
        weights = np.tile(start[:, None], (1, learners))
        momentum = np.zeros_like(weights)
        for k in range(rounds):
            local = beta * momentum + columns(weights, gradient, k)
            following = (weights - learning_rate * local) @ topology.matrix(k)
            direction = (weights - following) / learning_rate
            weights, momentum = following, (1 - mu) * momentum + mu * direction
        return weights

    return run


def d2(pattern: str) -> Oracle:
    """X_(k+1) = (2 X_k - X_(k-1) - a (G_k - G_(k-1))) S with S = (I + T) / 2, X_1 = (X_0 - a G_0) S.

    Tang et al. 2018, arXiv 1803.07068, Algorithm 1: x_(1/2) = x_0 - gamma g_0, later x_(t+1/2) = 2 x_t - x_(t-1) -
    gamma g_t + gamma g_(t-1), and x_(t+1) = sum_j W_ij x_(t+1/2), with W = S, the averaging of Yuan et al. 2019,
    arXiv 1702.05122, Algorithm 1 (exact diffusion).
    """

    def run(start: Vector, gradient: Gradient, learning_rate: float, learners: int, rounds: int) -> Matrix:
        half = (identity(learners) + find_topology(pattern, learners, seed=11).matrix(0)) / 2
        past: list[tuple[Matrix, Matrix]] = []  # of each step, X and G
        weights = np.tile(start[:, None], (1, learners))
        for k in range(rounds):
            past.append((weights, columns(weights, gradient, k)))
            stepped = past[-1][0] - learning_rate * past[-1][1]
            if k:
                stepped += past[-1][0] - past[-2][0] + learning_rate * past[-2][1]
            weights = stepped @ half
        return weights

    return run


def tracking(pattern: str) -> Oracle:
    """Y <- Y T_k + G_k - G_(k-1), X <- X T_k - a Y.

    Nedic et al. 2017, arXiv 1607.03218, Algorithm 1 (DIGing): x(k+1) = W(k) x(k) - alpha y(k), y(k+1) = W(k) y(k) +
    grad f(x(k+1)) - grad f(x(k)), y(0) = grad f(x(0)), but with W(k+1) for y(k): one round mixes both vectors.
    """

    def run(start: Vector, gradient: Gradient, learning_rate: float, learners: int, rounds: int) -> Matrix:
        topology = find_topology(pattern, learners, seed=11)
        weights = np.tile(start[:, None], (1, learners))
        estimate = gradients = columns(weights, gradient, 0)
        for k in range(rounds):
            if k:
                following = columns(weights, gradient, k)
                estimate, gradients = estimate @ topology.matrix(k) + following - gradients, following
            weights = weights @ topology.matrix(k) - learning_rate * estimate
        return weights

    return run


def push_sum(pattern: str, overlap: bool = False) -> Oracle:
    """X <- (X - a G(Z)) P_k, u <- u P_k, Z = X / u. With an overlap, what leaves the diagonal arrives a step later.

    Assran et al. 2019, arXiv 1811.10792, Algorithm 1 (SGP); Algorithm 2 with tau = 1 (overlap).
    """

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


def gossip_pga(pattern: str, every: int, adapts_first: bool = False) -> Oracle:
    """W <- (W - a G(W)) T_k, or W <- W T_k - a G(W), with T_k = 1 1^T / L in every H-th step.

    Chen et al. 2021, arXiv 2105.09080, Algorithm 1: x_i^(k+1/2) = x_i^k - gamma g_i; x_i^(k+1) is the mean of all
    x_j^(k+1/2) if mod(k + 1, H) = 0, otherwise sum_j w_ij x_j^(k+1/2). The other order is that of `dpsgd`.
    """

    def run(start: Vector, gradient: Gradient, learning_rate: float, learners: int, rounds: int) -> Matrix:
        topology = find_topology(pattern, learners, seed=11)
        weights = np.tile(start[:, None], (1, learners))
        for k in range(rounds):
            mixing = complete(learners) if (k + 1) % every == 0 else topology.matrix(k)
            step = learning_rate * columns(weights, gradient, k)
            weights = (weights - step) @ mixing if adapts_first else weights @ mixing - step
        return weights

    return run


def choco(pattern: str, compression: Compression, gamma: float, adapts_first: bool = False) -> Oracle:
    """Q = C(W - Y), Y <- Y + Q, W <- W + gamma (Y T - Y) - a G(W), or the step before; in the first round Q = W.

    Koloskova et al. 2019, arXiv 1902.00340, Algorithm 2 (CHOCO-SGD): x_i^(t+1/2) = x_i^t - eta g_i^t,
    q_i = Q(x_i^(t+1/2) - x^_i), x^_j <- x^_j + q_j, x_i^(t+1) = x_i^(t+1/2) + gamma sum_j w_ij (x^_j - x^_i). There x^
    begins at 0. The other order is that of `dpsgd`.
    """

    def run(start: Vector, gradient: Gradient, learning_rate: float, learners: int, rounds: int) -> Matrix:
        mixing = find_topology(pattern, learners, seed=11).matrix(0)
        weights = np.tile(start[:, None], (1, learners))
        public = np.zeros_like(weights)
        for k in range(rounds):
            step = learning_rate * columns(weights, gradient, k)
            if adapts_first:
                weights = weights - step
            sent = [rounded(each, compression) if k else each for each in (weights - public).T]
            public = public + np.stack(sent, axis=1)
            weights = weights + gamma * (public @ mixing - public)
            if not adapts_first:
                weights = weights - step
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
    """Gradients one mixing late, W <- (W - a G(Phi)) T_k with Phi <- W - a G(Phi).

    Lian et al. 2018, arXiv 1710.06952, Algorithm 1 and section 4, X_(k+1) = X_k W_k - gamma dg(X^_k; xi, i_k), where
    X^_k is an older X, for all learners that step at once: all gradients take the same time, longer than a round, and
    one round passes for each.
    """

    def run(start: Vector, gradient: Gradient, learning_rate: float, learners: int, rounds: int) -> Matrix:
        topology = find_topology(pattern, learners, seed=11)
        weights = taken_at = np.tile(start[:, None], (1, learners))
        for k in range(rounds):
            stepped = weights - learning_rate * columns(taken_at, gradient, k)
            weights, taken_at = stepped @ topology.matrix(k), stepped
        return weights

    return run


def ako(parts: int, combine: str = "mean") -> Oracle:
    """w_l <- w_l - b g_l; in round k learner l sends part (l + k) mod p of its steps, as far as it has not sent it, to
    all others, who add it. b is a / L to take the mean of the learners' gradients, or a to take their sum.

    Watcharapichat et al. 2016, "Ako: Decentralised Deep Learning with Partial Gradient Exchange", SoCC, section 3: the
    partial gradient exchange, where all gradients take the same time, longer than a round, and one round passes for
    each: the next gradient is taken at the weights after a learner's own step and before the round. At the end all that
    has not been sent is.
    """

    def run(start: Vector, gradient: Gradient, learning_rate: float, learners: int, rounds: int) -> Matrix:
        weights = taken_at = np.tile(start[:, None], (1, learners))
        unsent = np.zeros_like(weights)
        part_of_row = np.arange(len(start)) // -(-len(start) // parts)
        step_size = learning_rate / learners if combine == "mean" else learning_rate
        for k in range(rounds):
            step = -step_size * columns(taken_at, gradient, k)
            weights, unsent = weights + step, unsent + step
            taken_at = weights
            sent = np.where(part_of_row[:, None] == (np.arange(learners) + k) % parts, unsent, 0.0)
            weights, unsent = weights + from_others(sent), unsent - sent
        return weights + from_others(unsent)

    return run


def from_others(sent: Matrix) -> Matrix:
    """The sum of what all other learners send."""
    return sent.sum(axis=1, keepdims=True) - sent


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


SYNCHRONOUS: dict[str, Oracle] = {
    "allreduce": allreduce,
    "allreduce-int8": allreduce_of_encoded("int8"),
    "allreduce-low-rank": allreduce_of_factors(1, [(4, 5), (4, 0), (4, 0), (1, 0)]),
    "delay-by-one": delay_by_one,
    "server-hybrid": allreduce,
    "delayed": delayed(2),
    "dpsgd-int4": choco("ring", "int4", 0.75),
    "gossip-pga": gossip_pga("ring", 5),
    "dpsgd-quasi-global": quasi_global("ring", 0.8, 0.2),
    "dpsgd-d2": d2("ring"),
    "dpsgd-tracking": tracking("pairs"),
    "sgp": push_sum("exponential"),
    "sgp-overlap": push_sum("exponential", overlap=True),
} | {f"dpsgd-{pattern}": dpsgd(pattern) for pattern in PATTERNS}
SYNCHRONOUS |= {name: periodic(CHOICES[name].strategy.name, CHOICES[name].options(2)) for name in PERIODIC}
ASYNCHRONOUS = {f"adpsgd-{pattern}": adpsgd(pattern) for pattern in PATTERNS}
ASYNCHRONOUS |= {"ako": ako(3), "ako-sum": ako(3, "sum")}


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


def expected_contraction(topology: Topology, rounds: int | None = None) -> float:
    """The factor by which a round reduces the expected squared distance in the slowest mode: the largest eigenvalue of
    the mean of T T^T orthogonal to the mean. By default, over a period of a pattern that repeats, which is exact."""
    numbers = range(rounds or topology.period or 1024)
    average = np.mean([topology.matrix(k) @ topology.matrix(k).T for k in numbers], axis=0)
    return float(max(0.0, np.linalg.eigvalsh(average - complete(topology.world)).max()))


def pairs_contraction(world: int) -> float:
    """`expected_contraction` of `pairs`: (1 - 1 / (L - 1)) / 2 for even L, 1/2 for odd L >= 3, 0 for one learner.

    As for `random_ring`, with |T|^2 = L/2 for even L, and (L + 1) / 2 for odd L, where one learner is not paired.
    """
    if world % 2:
        return 0.5 if world > 1 else 0.0
    return (world - 2) / (2 * (world - 1))
