"""Sums that are ours run in rank order, on both engines."""

from collections.abc import Sequence

from torch import Tensor


def rank_ordered_mean(vectors: Sequence[Tensor]) -> Tensor:
    """(1/L) sum_l vectors[l], `[P]`, summed in the order of ranks."""
    total = vectors[0].clone()
    for vector in vectors[1:]:
        total.add_(vector)
    return total.div_(len(vectors))
