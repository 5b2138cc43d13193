"""Applies `key=value` arguments to a recipe."""

import copy
from collections.abc import Sequence
from typing import Any

from starling.errors import ConfigError
from starling.recipe.file import Tree, parse_yaml

_SHORTHANDS = ("strategy",)  # keys whose plain value is short for {name: value}


def apply_overrides(tree: Tree, overrides: Sequence[str]) -> Tree:
    """A copy of `tree` with each `dotted.key=value` applied in order; values are YAML.

    Raises a ConfigError that lists every argument of another form, or whose key lies inside a plain value.
    """
    result = copy.deepcopy(tree)
    problems = []
    for argument in overrides:
        try:
            key, value = _split(argument)
            _put(result, key, value)
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    return result


def _split(argument: str) -> tuple[list[str], Any]:
    key, equals, text = argument.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"argument {argument!r}: must have the form key=value, such as learners=2 or budget.epochs=3")
    return parts, parse_yaml(text, f"argument {argument!r}")


def _put(tree: Tree, parts: list[str], value: Any) -> None:
    place = tree
    for depth, part in enumerate(parts[:-1], start=1):
        inner = place.get(part)
        if inner is None:
            inner = {}
        elif not isinstance(inner, dict):
            if ".".join(parts[:depth]) not in _SHORTHANDS:
                raise ConfigError(
                    f"argument {'.'.join(parts)}: {'.'.join(parts[:depth])} is the plain value {inner!r}, "
                    "so that no key can be set inside it"
                )
            inner = {"name": inner}
        place[part] = inner
        place = inner
    place[parts[-1]] = value
