"""The strategies by name. Each file holds one algorithm and ends with its `Strategy`."""

import copyreg
from collections.abc import Mapping, Sequence
from typing import Any

from starling.registry import Registry
from starling.strategies.adpsgd import ADPSGD
from starling.strategies.allreduce import ALLREDUCE
from starling.strategies.async_local import AEASGD, ASYNC_DILOCO
from starling.strategies.base import NoOptions, Strategy, SyncGroups
from starling.strategies.delay_by_one import DELAY_BY_ONE
from starling.strategies.delayed import DELAYED
from starling.strategies.dpsgd import DPSGD
from starling.strategies.hadpsgd import HADPSGD
from starling.strategies.hogwild import HOGWILD
from starling.strategies.local import (
    BMUF,
    DILOCO,
    EASGD,
    LOCAL_SGD,
    NOLOCO,
    SLOWMO,
    SPARSELOCO,
    SPARTA,
    STREAMING_DILOCO,
)
from starling.strategies.parameter_server import PARAMETER_SERVER
from starling.strategies.sgp import SGP

__all__ = ["STRATEGIES", "NoOptions", "Strategy", "SyncGroups", "find_strategy", "strategy_names"]

_OWN = (
    *(ALLREDUCE, DELAY_BY_ONE, DPSGD, ADPSGD, HADPSGD, PARAMETER_SERVER, HOGWILD, DELAYED),
    *(LOCAL_SGD, BMUF, SLOWMO, DILOCO, STREAMING_DILOCO),
    *(NOLOCO, SPARSELOCO, EASGD, SPARTA),
    *(ASYNC_DILOCO, AEASGD, SGP),
)
STRATEGIES: Mapping[str, Strategy] = {strategy.name: strategy for strategy in _OWN}
"""Starling's own strategies by name."""


def _reduced(strategy: Strategy) -> str | tuple[Any, ...]:
    """How a strategy is pickled: Starling's own by name, any other by its fields."""
    if STRATEGIES.get(strategy.name) is strategy:
        return find_strategy, (strategy.name,)
    return object.__reduce_ex__(strategy, 2)


for kind in {type(strategy) for strategy in _OWN}:
    copyreg.pickle(kind, _reduced)


_REGISTRY = Registry(
    STRATEGIES, "starling.strategies", accepts=Strategy, wanted="a starling.Strategy", prefix="strategy: "
)


def strategy_names() -> list[str]:
    """The names that need no module: Starling's own strategies, then those of installed packages."""
    return _REGISTRY.names()


def find_strategy(name: str, also: Sequence[str] = ()) -> Strategy:
    """Find a strategy: a name in `STRATEGIES`, an entry point of the group `starling.strategies`, or `module:name`.

    Args:
        name: What to find.
        also: Names that the caller accepts besides, for the message about an unknown name.

    Raises:
        ConfigError: No strategy has this name; the message suggests the nearest one.
    """
    return _REGISTRY.find(name, also)
