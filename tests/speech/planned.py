"""Epochs of a planner for tests."""

from collections.abc import Iterator

from starling.speech.batch_plan import MiniBatch
from starling.speech.training.plan import Planner


def epoch_of(planner: Planner, epoch: int = 0) -> Iterator[MiniBatch]:
    """The mini-batches of an epoch, in order."""
    return (planner.batch(epoch, index) for index in range(planner.num_batches(epoch)))
