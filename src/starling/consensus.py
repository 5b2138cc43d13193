"""How far learners are from agreeing."""

from collections.abc import Iterable

from torch import Tensor


def consensus_distance(weights: Iterable[Tensor], mean: Tensor) -> float:
    """(1/L) sum_l |w_l - mean|^2 of L learners' weights `[P]` and their mean `[P]`; one learner at a time in memory.

    Squares are summed in float64, so that large models lose nothing; not finite where weights are not.
    """
    total, count = 0.0, 0
    for each in weights:
        difference = (each - mean).double()
        total += float(difference @ difference)
        count += 1
    return total / count
