"""The base class of configuration models, the meanings of their fields, and functions to compare configurations."""

import ast
import hashlib
import inspect
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from starling.errors import CheckpointError


class Config(BaseModel):
    """A frozen section of a recipe, such as the options of a strategy. An unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)
    MOVED: ClassVar[Mapping[str, str]] = {}
    """Keys that no longer exist, each with its replacement, which the error about the key names."""

    @classmethod
    def alternatives(cls) -> Sequence[type["Config"]]:
        """The classes among which `model_validate` chooses by the value of a key; usually only this one."""
        return (cls,)


ConfigT = TypeVar("ConfigT", bound=Config)


def short_for(key: str) -> Any:
    """The validator of a section that may be written as a plain value, which is short for `{key: value}`."""

    def expanded(value: object) -> object:
        return {key: value} if isinstance(value, str | Path) else value

    return model_validator(mode="before")(expanded)


def read_saved(kind: type[ConfigT], path: Path) -> ConfigT:
    """The content of one of a recogniser's JSON files. Raises a CheckpointError that names the file."""
    try:
        return kind.model_validate_json(path.read_text(encoding="utf-8"))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        problem = first["msg"].removeprefix("Value error, ")
        raise CheckpointError(f"{path} cannot be read: {place}{': ' if place else ''}{problem}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def owners(model: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """The class of each field, by the field's name: the model, or the first of its `alternatives` that has it."""
    kinds = (model, *model.alternatives()) if issubclass(model, Config) else (model,)
    return {name: kind for kind in reversed(kinds) for name in kind.model_fields}


def canonical(content: Any) -> str:
    """A JSON value as text, independent of the order of keys."""
    return json.dumps(content, sort_keys=True)


def digest(content: Any) -> str:
    """SHA-256 of a JSON value in hexadecimal, independent of the order of keys."""
    return hashlib.sha256(canonical(content).encode()).hexdigest()


def differing(before: Any, now: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The dotted key and both values of each difference between two trees; None stands for a missing value."""
    if not (isinstance(before, dict) and isinstance(now, dict)):
        if before != now:
            yield key, before, now
        return
    for name in dict.fromkeys([*before, *now]):
        yield from differing(before.get(name), now.get(name), f"{key}.{name}" if key else name)


@cache
def beneath_fields(kind: type) -> dict[str, str]:
    """The docstring beneath each field of a class, including fields of the classes of Starling or of its own package
    that it extends. Python does not keep these docstrings."""
    found: dict[str, str] = {}
    packages = {"starling", kind.__module__.partition(".")[0]}
    for base in reversed(kind.__mro__):
        if base.__module__.partition(".")[0] in packages:
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
            found |= _beneath(tree) if isinstance(tree, ast.ClassDef) else {}
    return found


def _beneath(tree: ast.ClassDef) -> dict[str, str]:
    found = {}
    for field, following in zip(tree.body, tree.body[1:], strict=False):
        match field, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = inspect.cleandoc(text)
    return found
