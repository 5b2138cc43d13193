"""The speed with which learners agree without gradients: the spectra of mixing matrices."""

import math

import numpy as np

from starling.topology import TOLERANCE, Matrix, Topology

_ROUNDS_AVERAGED = 1024


def identity(world: int) -> Matrix:
    """The matrix under which no learner averages with another, `[L, L]`."""
    return np.eye(world)


def complete(world: int) -> Matrix:
    """The matrix under which all learners average with equal weights 1/L, `[L, L]`."""
    return np.full((world, world), 1.0 / world)


def is_doubly_stochastic(mixing: Matrix, tolerance: float = TOLERANCE) -> bool:
    """Whether a mixing matrix conserves the mean."""
    sums = np.concatenate([mixing.sum(axis=0), mixing.sum(axis=1)])
    return bool((mixing >= -tolerance).all() and np.allclose(sums, 1.0, rtol=0.0, atol=tolerance))


def spectral_gap(mixing: Matrix) -> float:
    """1 - max |lambda| over the eigenvalues except the mean's: with 1 one round mixes completely, with 0 none does.

    Args:
        mixing: A doubly stochastic matrix `[L, L]`.

    Raises:
        ValueError: The matrix is not doubly stochastic.
    """
    if not is_doubly_stochastic(mixing):
        raise ValueError("a spectral gap needs a doubly stochastic mixing matrix: rows and columns that sum to 1")
    world = len(mixing)
    moduli = np.abs(np.linalg.eigvals(mixing - complete(world)))
    return float(1.0 - moduli.max())


def mixing_product(topology: Topology, rounds: int, first: int = 0) -> Matrix:
    """The product of the matrices of `rounds` rounds from round `first` on, `[L, L]`: T_first T_(first+1) ..."""
    product = identity(topology.world)
    for k in range(first, first + rounds):
        product = product @ topology.matrix(k)
    return product


def expected_contraction(topology: Topology, rounds: int | None = None) -> float:
    """The factor by which a round shrinks the expected consensus distance in the slowest mode, without gradients.

    Equation::

        max eigenvalue of  mean_k T_k T_k^T  orthogonal to the mean

    With X `[P, L]` the deviations from the mean, a round turns |X|^2 into |X T_k|^2 = trace(X T_k T_k^T X^T). With
    factor 0 learners agree after one round, with 1 never. If rounds are drawn independently, the factors of successive
    rounds multiply. The rounds of `exponential` are not independent: together they contract far more than the product
    of their factors (`mixing_product`).

    Args:
        topology: The pattern.
        rounds: The number of rounds to average over. None uses one period of a pattern that repeats, which is exact, or
            1024 rounds of a random one, a slight overestimate that grows with L.
    """
    count = (topology.period or _ROUNDS_AVERAGED) if rounds is None else rounds
    if count < 1:
        raise ValueError(f"{count} rounds: an average needs at least 1")
    total = np.zeros((topology.world, topology.world))
    for k in range(count):
        mixing = topology.matrix(k)
        total += mixing @ mixing.T
    return float(max(0.0, np.linalg.eigvalsh(total / count - complete(topology.world)).max()))


def acceleration_constants(mixing: Matrix) -> tuple[float, float]:
    """The constants of A2CiD2, eta per round and alpha~, for averaging with the same neighbours in each round.

    Equation, with the Laplacian Lambda = 2 (I - T), in which an edge is the pair {i, j} that averages 2 T_ij times in
    each round, and Lambda^+ its pseudo-inverse::

        chi_1 = 1 / (second smallest eigenvalue of Lambda)
        chi_2 = max over edges  (e_i - e_j)^T Lambda^+ (e_i - e_j) / 2
        eta = 1 / (2 sqrt(chi_1 chi_2)),    alpha~ = sqrt(chi_1 / chi_2) / 2

    chi_1 is the lifetime of a difference, and chi_2 half of the largest resistance of an edge; chi_1 >= chi_2, and they
    are equal if all pairs average alike. Then alpha~ = 1/2, and nothing is accelerated; the same holds for one learner.

    Args:
        mixing: A symmetric, doubly stochastic matrix `[L, L]` of a connected graph.

    References:
        Nabli et al. 2023, arXiv 2306.08289, whose pairs average one at a time, at random.
    """
    if len(mixing) == 1:
        return 1.0, 0.5
    lasting = np.linalg.pinv(2.0 * (identity(len(mixing)) - mixing), hermitian=True)
    first, second = np.nonzero(np.triu(mixing, 1))
    resistance = lasting[first, first] + lasting[second, second] - 2.0 * lasting[first, second]
    chi_1, chi_2 = float(np.linalg.eigvalsh(lasting).max()), float(resistance.max()) / 2.0
    return 1.0 / (2.0 * math.sqrt(chi_1 * chi_2)), max(0.5, round(math.sqrt(chi_1 / chi_2) / 2.0, 9))


def accelerated_contraction(mixing: Matrix, rate: float, step: float) -> float:
    """`expected_contraction` of averaging with the same symmetric matrix in each round, accelerated by A2CiD2.

    Equation, with r the modulus of the largest eigenvalue of these matrices, one for each eigenvalue 1 - m of T except
    the mean's; c = (1 - exp(-2 eta)) / 2; and b = 2 alpha~ - 1::

        r^2,    (     1 - m - c b m          c    )
                ( -(1 - 2 c) b m          1 - 2 c )

    Each describes the effect of a round on the weights and on the lead of their momentum. It is the factor of a round
    in the long run: in the first rounds a difference may also grow.

    Args:
        mixing: A symmetric, doubly stochastic matrix `[L, L]`.
        rate: eta, per round.
        step: alpha~.
    """
    c, b = -0.5 * math.expm1(-2.0 * rate), 2.0 * step - 1.0
    m = 1.0 - np.linalg.eigvalsh(mixing)[:-1]
    rounds = np.empty((len(m), 2, 2))
    rounds[:, 0, 0], rounds[:, 0, 1] = 1.0 - m - c * b * m, c
    rounds[:, 1, 0], rounds[:, 1, 1] = -(1.0 - 2.0 * c) * b * m, 1.0 - 2.0 * c
    return float(np.abs(np.linalg.eigvals(rounds)).max(initial=0.0) ** 2)


def distance_of_noise(topology: Topology, rounds: int) -> float:
    """The consensus distance after `rounds` steps from equal weights, if each step adds independent noise to each
    learner.

    Equation, for W <- W T_k + U_k with U_k `[P, L]` independent, of variance s^2 in each column's norm::

        E (1/L) sum_l |w_l - mean|^2  =  s^2 trace(C) / L,    C <- T_k^T C T_k + (I - 1 1^T / L)

    With `complete` it is (L - 1) / L. A pattern that repeats one matrix with eigenvalues lambda_j has
    (1/L) sum_j 1 / (1 - lambda_j^2) after many rounds, so that it grows as its spectral gap closes. In SGD the noise is
    the learning rate times that of a mini-batch's gradient.

    Args:
        topology: The pattern.
        rounds: The number of steps, with a round in each.
    """
    apart = identity(topology.world) - complete(topology.world)
    covariance = np.zeros_like(apart)
    for k in range(rounds):
        mixing = topology.matrix(k)
        covariance = mixing.T @ covariance @ mixing + apart
    return float(np.trace(covariance)) / topology.world
