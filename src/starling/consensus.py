"""The consensus of learners, summed in rank order, so that it has the same bits everywhere, and the learners' distance
from it."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

Places = Sequence[tuple[int, int]]
"""Pieces of the weights as pairs (start, stop), stop exclusive."""
ROUNDING = 1e-4
"""Largest difference between the weights of learners with one model, as a share of their norm: devices of different
kinds round differently in each step."""


def rank_ordered_mean(vectors: Iterable[Tensor]) -> Tensor:
    """(1/L) sum_l of L vectors of one shape, summed in the given order, with one vector at a time in memory."""
    total, count = torch.empty(0), 0
    for vector in vectors:
        total = vector.clone() if count == 0 else total.add_(vector)
        count += 1
    return total.div_(count)


def consensus(weights: Iterable[Tensor], kept: Sequence[Places]) -> Tensor:
    """The consensus `[P]`: the mean of all learners' weights `[P]`, or the model shards if any learner keeps one.

    `kept` lists the places of each learner's shards; a shard that several learners keep is averaged.
    """
    if not any(kept):
        return rank_ordered_mean(weights)
    total = counts = torch.empty(0)
    for each, places in zip(weights, kept, strict=True):
        if len(total) == 0:
            total, counts = torch.zeros_like(each), torch.zeros_like(each)
        for start, stop in places:
            total[start:stop] += each[start:stop]
            counts[start:stop] += 1
    return total.div_(counts)


def are_one_model(first: Tensor, other: Tensor) -> bool:
    """Whether two learners' weights `[P]` are the same, up to rounding. True if some are not finite."""
    if torch.equal(first, other):
        return True
    norm = torch.linalg.vector_norm
    most = ROUNDING * norm(first, dtype=torch.float64)
    return not bool(norm(first - other, dtype=torch.float64) > most)


def consensus_distance(weights: Iterable[Tensor], mean: Tensor) -> float:
    """(1/L) sum_l |w_l - mean|^2 of L learners' weights `[P]` and their mean `[P]`, with one learner at a time in
    memory.

    Squares are summed in float64 for accuracy on large models. Not finite if weights are not.
    """
    total, count = 0.0, 0
    for each in weights:
        total += float(torch.linalg.vector_norm(each - mean, dtype=torch.float64)) ** 2
        count += 1
    return total / count
