"""The consensus of learners and the learners' distance from it. The consensus is summed in rank order, so that it is
bit-identical everywhere."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

Places = Sequence[tuple[int, int]]
"""Pieces of the weights, as pairs (start, stop) in which `stop` is exclusive."""
ROUNDING = 1e-4
"""Largest difference between the weights of learners that count as having the same model, as a fraction of the weights'
norm. Differences arise because devices of different kinds round differently in each step."""


def rank_ordered_mean(vectors: Iterable[Tensor]) -> Tensor:
    """Return the mean of L vectors of the same shape. The vectors are added in the given order, with only one of them
    in memory at a time."""
    total, count = torch.empty(0), 0
    for count, vector in enumerate(vectors, 1):
        total = vector.clone() if count == 1 else total.add_(vector)
    return total.div_(count)


def consensus(weights: Iterable[Tensor], kept: Sequence[Places]) -> Tensor:
    """Return the consensus `[P]`. It is the mean of all learners' weights `[P]`; if any learner keeps a model shard, it
    consists of the model shards instead.

    `kept` lists the places of each learner's shards. A shard that several learners keep is averaged.
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
    """Return whether the weights `[P]` of two learners are the same up to rounding. Return True if any weights are
    non-finite."""
    if torch.equal(first, other):
        return True
    norm = torch.linalg.vector_norm
    most = ROUNDING * norm(first, dtype=torch.float64)
    return not bool(norm(first - other, dtype=torch.float64) > most)


def consensus_distance(weights: Iterable[Tensor], mean: Tensor) -> float:
    """Return (1/L) sum_l |w_l - mean|^2 for the weights w_l `[P]` of L learners and their mean `[P]`. Only one
    learner's weights are in memory at a time.

    Squares are summed in float64 for accuracy on large models. The result is non-finite if any weights are.
    """
    squares = [float(torch.linalg.vector_norm(each - mean, dtype=torch.float64)) ** 2 for each in weights]
    return sum(squares) / len(squares)
