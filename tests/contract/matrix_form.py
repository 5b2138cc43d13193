"""What oracles are made of: gradients as columns, and means of vectors that travel encoded, in NumPy."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from starling.strategies.parts.means import Compression, TopK

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]
Gradient = Callable[[Vector, int], Vector]
"""From weights `[P]` and the number of a mini-batch to the gradient `[P]`."""
Oracle = Callable[[Vector, Gradient, float, int, int], Matrix]
"""From the first weights `[P]`, the gradient, the learning rate, the numbers of learners and rounds to `[P, L]`."""


def columns(weights: Matrix, gradient: Gradient, k: int) -> Matrix:
    """The gradients of round `k`, `[P, L]`: learner l takes mini-batch k L + l at its own column."""
    learners = weights.shape[1]
    return np.stack([gradient(weights[:, rank], k * learners + rank) for rank in range(learners)], axis=1)


def copies(vector: Vector, learners: int) -> Matrix:
    """One vector as the weights of all learners, `[P, L]`."""
    return np.tile(vector[:, None], (1, learners))


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
    step = largest / {"int8": 127, "int4": 7, "int2": 1}[compression]
    return step * np.round(vector / step)


class EncodedMean:
    """Means of the learners' vectors, which travel encoded by C, with error feedback.

    `top_k`: each learner sends q_l = C(v_l + d_l) to all, and keeps d_l <- v_l + d_l - q_l. The mean is that of the q_l
    and is not encoded again (Stich et al. 2018, "Sparsified SGD with Memory", arXiv 1809.07599, Algorithm 2).

    Otherwise Tang et al. 2019, "DoubleSqueeze: Parallel Stochastic Gradient Descent with Double-Pass Error-Compensated
    Compression", arXiv 1905.05957, Algorithm 1: a worker sends q_l = C(v_l + d_l) and keeps d_l <- v_l + d_l - q_l; the
    server sends C(mean q_l + d) and keeps d <- mean q_l + d - C(mean q_l + d). The servers are the learners: each of
    them has a chunk of the vector, and what it gives itself for that chunk is not encoded.
    """

    def __init__(self, compression: Compression, size: int, learners: int) -> None:
        self.compression = compression
        self.of_workers = np.zeros((size, learners))
        """The d_l, one column a learner."""
        self.of_servers = np.zeros(size)
        """The d of each chunk's owner, one after the other: what the mean lacks."""

    def of(self, vectors: Matrix) -> Vector:
        """The mean of the columns, as all learners decode it."""
        size, learners = vectors.shape
        if self.compression == "none" or learners == 1:
            return vectors.mean(axis=1)
        owed = vectors + self.of_workers
        sent = np.empty_like(owed)
        if isinstance(self.compression, TopK):
            for rank in range(learners):
                sent[:, rank] = rounded(owed[:, rank], self.compression)
            self.of_workers = owed - sent
            return sent.mean(axis=1)
        mean, chunk = np.empty(size), -(-size // learners)
        for first in range(0, size, chunk):
            rows, owner = slice(first, first + chunk), first // chunk
            for rank in range(learners):
                own = owed[rows, rank]
                sent[rows, rank] = own if rank == owner else rounded(own, self.compression)
            owed_by_owner = sent[rows].mean(axis=1) + self.of_servers[rows]
            mean[rows] = rounded(owed_by_owner, self.compression)
            self.of_servers[rows] = owed_by_owner - mean[rows]
        self.of_workers = owed - sent
        return mean
