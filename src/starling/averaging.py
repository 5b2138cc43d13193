"""The mean that Starling computes itself: always summed in rank order, so that it has the same bits everywhere."""

from collections.abc import Iterable

import torch
from torch import Tensor


def rank_ordered_mean(vectors: Iterable[Tensor]) -> Tensor:
    """(1/L) sum_l of L vectors of one shape, summed in the given order, with one vector at a time in memory."""
    total, count = torch.empty(0), 0
    for vector in vectors:
        total = vector.clone() if count == 0 else total.add_(vector)
        count += 1
    return total.div_(count)
