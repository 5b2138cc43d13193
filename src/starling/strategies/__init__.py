"""The strategies by name. Each file holds one algorithm, and registers it."""

import copyreg
from collections.abc import Mapping, Sequence
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from starling.registry import Registry
from starling.strategies.base import REGISTERED, NoOptions, Strategy, SyncGroups

__all__ = ["STRATEGIES", "NoOptions", "Strategy", "SyncGroups", "find_strategy", "strategy_names"]

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
_KINDS = ("all-reduce", "periodic", "gossip", "server", "shared memory")
STRATEGIES: Mapping[str, Strategy] = dict(sorted(REGISTERED.items(), key=lambda each: _KINDS.index(each[1].kind)))
"""Starling's own strategies by name."""


def _reduced(strategy: Strategy) -> str | tuple[Any, ...]:
    """The reduced form in which a strategy is pickled: Starling's own by name, any other by its fields."""
    if STRATEGIES.get(strategy.name) is strategy:
        return find_strategy, (strategy.name,)
    return object.__reduce_ex__(strategy, 2)


for kind in {type(strategy) for strategy in STRATEGIES.values()}:
    copyreg.pickle(kind, _reduced)


_REGISTRY = Registry(
    STRATEGIES, "starling.strategies", accepts=Strategy, wanted="a starling.Strategy", prefix="strategy: "
)


def strategy_names() -> list[str]:
    """The names that need no module: those of Starling's own strategies, then those of installed packages."""
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
