"""Who averages with whom: mixing matrices and what they promise.

A mixing matrix T `[L, L]` has one column per learner: column l holds the weights with which learner l mixes the
models of all (W <- W T). It conserves the mean when it is doubly stochastic: no entry negative, rows and columns
sum to 1.
"""

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]


def identity(world: int) -> Matrix:
    """Nobody talks to anybody, `[L, L]`."""
    return np.eye(world)


def complete(world: int) -> Matrix:
    """Everybody averages with everybody, 1/L each, `[L, L]`."""
    return np.full((world, world), 1.0 / world)


def is_doubly_stochastic(mixing: Matrix, tolerance: float = 1e-12) -> bool:
    """Whether a mixing matrix conserves the mean."""
    sums = np.concatenate([mixing.sum(axis=0), mixing.sum(axis=1)])
    return bool((mixing >= -tolerance).all() and np.allclose(sums, 1.0, rtol=0.0, atol=tolerance))


def spectral_gap(mixing: Matrix) -> float:
    """1 - max |lambda| over the eigenvalues other than the mean's: 1 mixes at once, 0 never.

    `mixing` `[L, L]` must be doubly stochastic; ValueError otherwise.
    """
    if not is_doubly_stochastic(mixing):
        raise ValueError("a spectral gap needs a doubly stochastic mixing matrix: rows and columns that sum to 1")
    world = len(mixing)
    moduli = np.abs(np.linalg.eigvals(mixing - complete(world)))
    return float(1.0 - moduli.max())
