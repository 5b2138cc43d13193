"""How far learners are from agreeing."""

from collections.abc import Iterable

import torch
from torch import Tensor


def consensus_distance(weights: Iterable[Tensor], mean: Tensor) -> float:
    """(1/L) sum_l |w_l - mean|^2 of L learners' weights `[P]` and their mean `[P]`; one learner at a time in memory.

    Squares are summed in float64, so that large models lose nothing; not finite where weights are not.
    """
    total, count = 0.0, 0
    for each in weights:
        total += float(torch.linalg.vector_norm(each - mean, dtype=torch.float64)) ** 2
        count += 1
    return total / count
