"""`strategy: auto`: the choice is made from measurements before the run, and takes the place of this strategy."""

from typing import Annotated

from pydantic import AfterValidator, Field

from starling.configuration import Config
from starling.errors import ConfigError
from starling.learner import Learner
from starling.strategies import Strategy

AUTO = "auto"
CANDIDATES = ("allreduce", "delay-by-one", "dpsgd", "adpsgd", "hadpsgd")
"""What `auto` chooses from, the plainest first. `hogwild` needs one machine, and `parameter-server` gives learners away
as servers."""


def _are_candidates(among: tuple[str, ...]) -> tuple[str, ...]:
    unknown = [name for name in among if name not in CANDIDATES]
    if unknown:
        raise ValueError(f"auto cannot choose {', '.join(unknown)}; it chooses among {', '.join(CANDIDATES)}")
    return among


class AutoOptions(Config):
    """The options of `strategy: auto`."""

    among: Annotated[tuple[str, ...], Field(min_length=1), AfterValidator(_are_candidates)] = CANDIDATES
    """The strategies to choose from."""
    seconds: float = Field(default=60.0, gt=0.0, le=600.0)
    """The longest that measuring should take. It takes less where the run is short: about 3 % of it."""


async def _unchosen(me: Learner, options: AutoOptions) -> None:
    raise ConfigError(
        "strategy: auto is chosen by `starling train` and `starling simulate` before the learners start; name a "
        "strategy here"
    )


def _may_average_gradients(options: AutoOptions) -> bool:
    """Whether a weighting of mini-batches may have an effect: the choice is made among those where it does."""
    return True


AUTO_STRATEGY = Strategy(
    AUTO,
    "measure the machines at hand, and choose one of the others",
    _unchosen,
    options=AutoOptions,
    averages_gradients=_may_average_gradients,
    kind="chosen by measuring",
)
"""A placeholder, for the checks that are made before the choice."""
