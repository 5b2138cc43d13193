"""Whether learners that must begin with the same weights do."""

from collections.abc import Sequence

import torch
from torch import Tensor

from starling.checkpoint.state import LearnerState, has_common
from starling.consensus import ROUNDING
from starling.training.job import Job

_NUM_SUMS = 64


def must_begin_equal(job: Job, start: LearnerState | None) -> bool:
    """Whether learners that begin with such a state, or with none, must all have the same weights."""
    kept = {} if start is None else start.strategy
    return job.strategy.begins_equal(job.options, has_common(kept))


def sketch(weights: Tensor) -> list[float]:
    """Numbers by which learners compare their weights `[P]` without sending them: the norm, and sums of every 64th
    weight. Rounding changes them little, other weights much."""
    sums = torch.stack([weights[first::_NUM_SUMS].sum(dtype=torch.float64) for first in range(_NUM_SUMS)])
    return [float(torch.linalg.vector_norm(weights, dtype=torch.float64)), *sums.tolist()]


def are_apart(mine: Sequence[float], theirs: Sequence[float]) -> bool:
    """Whether the weights of two sketches differ by more than rounding."""
    most = ROUNDING * max(mine[0], theirs[0])
    return any(abs(one - other) > most for one, other in zip(mine, theirs, strict=True))


def different_weights(job: Job, learner: int, other: int) -> str:
    """The message that two learners begin with different weights."""
    return (
        f"learner {learner} and learner {other} begin with different weights, but under {job.strategy.name} all "
        "learners begin with the same; let make_model give every learner the same weights, for example after "
        "torch.manual_seed. After a resume, its checkpoint holds different ones: resume with another number of "
        "learners, which all begin with the mean"
    )
