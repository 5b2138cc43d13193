"""The base class of topologies."""
# ruff: noqa: A002 - `round` is the name of an averaging round, as on the learner

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from starling.errors import ConfigError

Matrix = NDArray[np.float64]


class Topology(ABC):
    """Which learners mix whose models in each round: the T_k of W <- W T_k, as each learner's sources and targets.

    The methods are pure functions of round and rank, so learners agree without communication, and may ask for rounds in
    any order.

    Args:
        world: L, the number of learners, at least 1.

    Raises:
        ConfigError: `world` is below 1.
        ValueError: Raised by the methods for a round below 0 or a rank outside [0, world).
    """

    period: int | None = None
    """The number of rounds after which the pattern repeats; None: it never repeats, or the period is unknown."""

    def __init__(self, world: int) -> None:
        if world < 1:
            raise ConfigError(f"topology: {world} learners; a topology needs at least 1")
        self.world = world
        """L, the number of learners."""

    @abstractmethod
    def sources(self, round: int, rank: int) -> Mapping[int, float]:
        """The learners whose models `rank` mixes into its own in `round`, each with its weight, ascending by rank.

        Its own weight is 1 minus their sum. Empty: it does not take part in the round.
        """

    @abstractmethod
    def targets(self, round: int, rank: int) -> Sequence[int]:
        """The learners that mix the model of `rank` into their own in `round`, ascending."""

    def kept(self, round: int, rank: int) -> float:
        """The share of its own model that `rank` keeps in `round`: 1 minus the weights with which others mix it. Where
        averaging conserves the mean, it is also its own weight."""
        return max(0.0, 1.0 - sum(self.sources(round, peer)[rank] for peer in self.targets(round, rank)))

    def matrix(self, round: int) -> Matrix:
        """The matrix T of `round`, `[L, L]`: column l holds the weights with which learner l mixes all models."""
        mixing = np.zeros((self.world, self.world))
        for rank in range(self.world):
            taken = self.sources(round, rank)
            mixing[list(taken), rank] = list(taken.values())
            mixing[rank, rank] = max(0.0, 1.0 - sum(taken.values()))
        return mixing

    def _check(self, round: int, rank: int) -> None:
        if round < 0 or not 0 <= rank < self.world:
            raise ValueError(
                f"round {round}, learner {rank}: rounds are numbered from 0, and learners are 0 to {self.world - 1}"
            )
