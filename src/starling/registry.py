"""Finds objects by name: parts of Starling, parts of installed packages, or `module:name`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from operator import attrgetter
from typing import Any, Generic, TypeVar

from starling.errors import ConfigError, did_you_mean

T = TypeVar("T")


@dataclass(frozen=True)
class Registry(Generic[T]):
    """All objects of one kind that a recipe or an argument can choose by name.

    A name refers to a part of Starling, to an entry point of an installed package, or, as `module:name`, to an object
    in a module that Python can import. If a package offers a name that Starling has, Starling's own part is used.

    Args:
        known: The parts of Starling, by name.
        group: The entry point group of other packages, such as `starling.strategies`.
        accepts: The class of this kind, or a function that says whether an imported object is of it.
        wanted: The description of this kind in error messages.
        prefix: The start of every error message, such as `strategy: `.
        outside: How error messages write `module:name`.
    """

    known: Mapping[str, T]
    group: str
    accepts: type[Any] | Callable[[object], bool] = field(kw_only=True)
    wanted: str = field(kw_only=True)
    prefix: str = field(default="", kw_only=True)
    outside: str = field(default="module:name", kw_only=True)

    def names(self) -> list[str]:
        """The names that can be chosen without a module: Starling's own, then those of installed packages."""
        return [*self.known, *(name for name in _installed(self.group) if name not in self.known)]

    def is_outside(self, name: str) -> bool:
        """Whether a name refers to an object that is not a part of Starling."""
        return name not in self.known and (":" in name or name in _installed(self.group))

    def find(self, name: str, also: Sequence[str] = ()) -> T:
        """The object of that name.

        Args:
            name: What to find.
            also: Names that the caller accepts besides, for the message about an unknown name.

        Raises:
            ConfigError: The name is unknown, cannot be imported, or refers to an object of another kind. The message
                says which, and suggests the nearest known name.
        """
        if name in self.known:
            return self.known[name]
        installed = _installed(self.group)
        if name in installed:
            module, attribute = installed[name].module, installed[name].attr
        else:
            module, _, attribute = name.partition(":")
        if not module or not attribute:
            known = ", ".join([*self.names(), *also, f"or {self.outside}"])
            raise ConfigError(f"{self.prefix}{name!r} is unknown; {self._hint(name, also)}known are {known}")
        found: T = self._load(name, module, attribute)
        if not (isinstance(found, self.accepts) if isinstance(self.accepts, type) else self.accepts(found)):
            raise ConfigError(f"{self.prefix}{name!r} is {_described(found)}, not {self.wanted}")
        return found

    def _load(self, name: str, module: str, attribute: str) -> Any:
        try:
            found: Any = import_module(module)
        except ImportError as error:
            raise ConfigError(
                f"{self.prefix}{name!r} cannot be imported: {error}; {self._hint(name)}"
                f"is {module.partition('.')[0]} installed, or on PYTHONPATH?"
            ) from error
        except Exception as error:  # the module's own code may raise anything
            raise ConfigError(
                f"{self.prefix}{name!r} cannot be imported: {module} raised {type(error).__name__}: {error}"
            ) from error
        try:
            return attrgetter(attribute)(found)
        except AttributeError:
            hint = did_you_mean(attribute, vars(found)) or self._hint(name)
            raise ConfigError(
                f"{self.prefix}{name!r} cannot be imported: {module} has no {attribute!r}; {hint}".rstrip("; ")
            ) from None

    def _hint(self, name: str, also: Sequence[str] = ()) -> str:
        return did_you_mean(name, [*self.names(), *also])


@cache
def _installed(group: str) -> dict[str, EntryPoint]:
    """The entry points of a group by name; cached, as reading them takes milliseconds per installed package."""
    return {entry.name: entry for entry in entry_points(group=group)}


def _described(found: object) -> str:
    kind = "class" if isinstance(found, type) else type(found).__name__
    return f"the {kind} {getattr(found, '__name__', repr(found))}"
