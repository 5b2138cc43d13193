"""Planners for tests, and their epochs."""

from collections.abc import Iterator

import numpy as np

from starling.speech.batch_plan import BatchConfig, MiniBatch, ShardWindows
from starling.speech.training.plan import Planner


def planner_of(durations: np.ndarray, shards: np.ndarray, config: BatchConfig, seed: int) -> Planner:
    """A planner of one set, which deals each utterance once per epoch."""
    return Planner(durations, ShardWindows(shards, config.window, seed), config, seed, seed)


def epoch_of(planner: Planner, epoch: int = 0) -> Iterator[MiniBatch]:
    """The mini-batches of an epoch, in order."""
    return (planner.batch(epoch, index) for index in range(planner.num_batches(epoch)))
