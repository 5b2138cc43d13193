"""Injected delays: slow learners, random jitter, pauses."""

import random
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from starling.chance import derive_seed
from starling.configuration import Config


def _times(factor: Any) -> Any:
    """Accept `10x` for 10."""
    return factor[:-1] if isinstance(factor, str) and factor.endswith("x") else factor


Factor = Annotated[float, BeforeValidator(_times), Field(ge=1.0)]
Rank = Annotated[int, Field(ge=0)]


class Pause(Config):
    """Makes a learner pause once."""

    learner: Rank
    """The learner that pauses."""
    after: int = Field(ge=1)
    """Gradients of this learner before the pause; counting restarts on resume."""
    seconds: float = Field(gt=0.0)
    """Length of the pause."""


class Stragglers(Config):
    """Learners that are slowed down on purpose: the `processes` engine sleeps, `virtual` advances its clock."""

    slow: dict[Rank, Factor] = Field(default_factory=dict)
    """By learner, the factor by which its gradients take longer, such as {0: 10x}."""
    jitter: float = Field(default=0.0, ge=0.0)
    """Each gradient is delayed by a random fraction of its time, exponentially distributed with this mean."""
    pauses: tuple[Pause, ...] = ()
    """Learners that pause once each."""


class Delays:
    """The delays of one learner; their random numbers depend on the seed and the learner."""

    def __init__(self, stragglers: Stragglers, seed: int, rank: int) -> None:
        self._factor = stragglers.slow.get(rank, 1.0)
        self._jitter = stragglers.jitter
        self._pauses: dict[int, float] = {}
        for pause in stragglers.pauses:
            if pause.learner == rank:
                self._pauses[pause.after] = self._pauses.get(pause.after, 0.0) + pause.seconds
        self._random = random.Random(derive_seed(seed, "stragglers", rank))
        self._num_gradients = 0

    def after(self, seconds: float) -> float:
        """Seconds to wait after a gradient that took `seconds`; call once for each gradient."""
        self._num_gradients += 1
        longer = seconds * (self._factor - 1.0)
        if self._jitter > 0.0:
            longer += self._factor * seconds * self._jitter * self._random.expovariate(1.0)
        return longer + self._pauses.get(self._num_gradients, 0.0)
