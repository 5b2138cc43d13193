"""The strategies by name. Each file holds one algorithm, and registers it."""

import copyreg
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from starling.errors import ConfigError
from starling.registry import Registry
from starling.strategies.base import REGISTERED, NoOptions, Strategy, SyncGroups

__all__ = ["STRATEGIES", "NoOptions", "Strategy", "SyncGroups", "find_strategy", "name_of", "strategy_names"]

_KINDS = ("all-reduce", "periodic", "gossip", "server", "shared memory")


class _Strategies(Mapping[str, Strategy]):
    """Starling's own strategies, by kind and name. A strategy is imported when it is requested; listing imports all."""

    def __init__(self) -> None:
        modules = (each.name for each in iter_modules(__path__) if not each.ispkg)
        self._names = {name.replace("_", "-") for name in modules if name not in ("base", "islands")}

    def __getitem__(self, name: str) -> Strategy:
        if name not in self._names:
            raise KeyError(name)
        import_module(f"{__name__}.{name.replace('-', '_')}")
        copyreg.pickle(type(REGISTERED[name]), _reduced)
        return REGISTERED[name]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._names, key=lambda name: (_KINDS.index(self[name].kind), name)))

    def __len__(self) -> int:
        return len(self._names)


def _reduced(strategy: Strategy) -> str | tuple[Any, ...]:
    """The pickled form of a strategy: the name of one of Starling's own strategies, the fields of any other
    strategy."""
    if REGISTERED.get(strategy.name) is strategy:
        return find_strategy, (strategy.name,)
    return object.__reduce_ex__(strategy, 2)


STRATEGIES: Mapping[str, Strategy] = _Strategies()
"""Starling's own strategies by name."""


_REGISTRY = Registry(
    STRATEGIES, "starling.strategies", accepts=Strategy, wanted="a starling.Strategy", prefix="strategy: "
)


def strategy_names() -> list[str]:
    """The names of strategies that need no module: Starling's own, followed by those of installed packages."""
    return _REGISTRY.names()


def find_strategy(name: str, also: Sequence[str] = ()) -> Strategy:
    """Find a strategy: a name in `STRATEGIES`, an entry point of the group `starling.strategies`, or `module:name`.

    Args:
        name: What to find.
        also: Further names that the caller accepts, for the message about an unknown name.

    Raises:
        ConfigError: No strategy has this name; the message suggests the nearest one.
    """
    return _REGISTRY.find(name, also)


def name_of(strategy: Strategy) -> str:
    """The name by which another process finds a strategy: its own if it is one of Starling's, otherwise `module:name`.

    Raises:
        ConfigError: No imported module has the strategy at its top level.
    """
    if REGISTERED.get(strategy.name) is strategy:
        return strategy.name
    for module in (strategy.run.__module__, *reversed(sys.modules)):  # the script, `__main__`, comes late
        for name, found in list(getattr(sys.modules.get(module), "__dict__", {}).items()):
            if type(found) is type(strategy) and found == strategy:
                return f"{module}:{name}"
    raise ConfigError(
        f"strategy: {strategy.name!r} cannot be found by learner processes; assign it to a name at the top level of a "
        "module or of the script"
    )
