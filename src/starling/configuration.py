"""The base class of configuration models, and functions to compare configurations."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from starling.errors import CheckpointError


class Config(BaseModel):
    """A frozen section of a recipe, such as the options of a strategy. An unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)


ConfigT = TypeVar("ConfigT", bound=Config)


def read_saved(kind: type[ConfigT], path: Path) -> ConfigT:
    """The content of one of a recogniser's JSON files. Raises CheckpointError naming the file."""
    try:
        return kind.model_validate_json(path.read_text(encoding="utf-8"))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        problem = first["msg"].removeprefix("Value error, ")
        raise CheckpointError(f"{path} cannot be read: {place}{': ' if place else ''}{problem}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def canonical(content: Any) -> str:
    """A JSON value as text, independent of the order of keys."""
    return json.dumps(content, sort_keys=True)


def digest(content: Any) -> str:
    """SHA-256 of a JSON value in hexadecimal, independent of the order of keys."""
    return hashlib.sha256(canonical(content).encode()).hexdigest()


def differing(before: Any, now: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The dotted key and both values of each difference between two trees; None for a missing value."""
    if not (isinstance(before, dict) and isinstance(now, dict)):
        if before != now:
            yield key, before, now
        return
    for name in dict.fromkeys([*before, *now]):
        yield from differing(before.get(name), now.get(name), f"{key}.{name}" if key else name)
