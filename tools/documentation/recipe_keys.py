"""Every key of a recipe, read from the typed tree that checks recipes: type, limits, default, unit and description."""

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from starling.comparing.grid import CompareConfig
from starling.configuration import beneath_fields, owners
from starling.recipe.run import AUTO_STRATEGY, StrategyChoice
from starling.speech.recipe import Recipe
from starling.strategies import STRATEGIES

_SUFFIXES = {
    "seconds": "s",
    "minutes": "min",
    "bytes": "bytes",
    "megabytes": "MB",
    "db": "dB",
    "snr": "dB",
    "freq": "Hz",
    "words_per_minute": "words/min",
}
"""The units of keys that end with these words, alone or after an underscore."""
_SAID = {
    r"bytes per second": "bytes/s",
    r"(maximum )?seconds|the longest time": "s",
    r"minutes": "min",
    r"hz\b": "Hz",
    r"db\b": "dB",
}
"""The units of keys whose descriptions begin with these words, in lower case."""


@dataclass(frozen=True)
class Key:
    """One key of a recipe."""

    path: str
    """Dotted path of the key; a part in angle brackets stands for any name."""
    type: str
    default: str
    unit: str
    description: str


@dataclass(frozen=True)
class Section:
    """The keys of one mapping of a recipe."""

    path: str
    """Path of the mapping; empty for the top level."""
    condition: str
    """The kind of mapping, if there are several, such as `kind: tsv`; otherwise empty."""
    description: str
    keys: tuple[Key, ...]

    @property
    def title(self) -> str:
        """The heading of the section."""
        if not self.path:
            return "Top level"
        return f"`{self.path}`, `{self.condition}`" if self.condition else f"`{self.path}`"


_BASE = Key(
    "base",
    "path",
    "`null`",
    "",
    "The path of another recipe, relative to this one. Its keys apply where this recipe does not set them.",
)
"""The only key that no longer exists when the tree is checked: `read_recipe` merges the two files."""
_COMPARED = Key("compare", "mapping", "`null`", "", "What `starling compare` compares; other commands refuse it.")


def sections() -> list[Section]:
    """All sections of a recipe, from the top, each before those inside it."""
    top, *inner = _sections(Recipe, "")
    every = [replace(top, keys=(_BASE, *top.keys, _COMPARED)), *inner, *_sections(CompareConfig, "compare")]
    return list(dict.fromkeys(every))  # several architectures have the same sections


def page() -> str:
    """The Markdown tables of the page of recipe keys."""
    parts = []
    for section in sections():
        parts.append(f"## {section.title}\n\n{section.description}\n")
        parts.append("| key | type | default | unit | meaning |\n|---|---|---|---|---|")
        parts[-1] += "".join(f"\n{_row(key)}" for key in section.keys) + "\n"
    return "\n".join(parts)


def _row(key: Key) -> str:
    cells = [f"`{key.path}`", key.type, key.default, key.unit, key.description]
    return "| " + " | ".join(each.replace("|", "\\|") for each in cells) + " |"


def _sections(
    model: type[BaseModel], path: str, condition: str = "", above: frozenset[type[BaseModel]] = frozenset()
) -> Iterator[Section]:
    """The sections of a model and of the models inside it. A model inside itself (`above`) is not described again."""
    keys, inner = [], []
    for name, owner in owners(model).items():
        field = owner.model_fields[name]
        below = f"{path}.{name}" if path else name
        found = list(_mappings(field.annotation, below))
        inner += found
        keys.append(_key(owner, name, field, below, [kind for _, kind in found]))
    yield Section(path, condition, _description(model), tuple(keys))
    above |= {model}
    inner = [each for each in inner if each[1] not in above]
    for below, kind in inner:
        if kind is not StrategyChoice:
            beside = [each for place, each in inner if place == below]
            yield from _sections(
                kind, below, _kind(kind) if len(beside) > 1 or "kind" in kind.model_fields else "", above
            )
        elif below == "strategy":
            shared: dict[tuple[Key, ...], Section] = {}  # mappings at keys of several strategies
            for strategy in (*STRATEGIES.values(), AUTO_STRATEGY):
                section, *within = _sections(strategy.options, below, f"name: {strategy.name}")
                shared = {each.keys: each for each in within} | shared
                summary = f"{strategy.summary[0].upper()}{strategy.summary[1:]}."
                name = Key(f"{below}.name", f"`{strategy.name}`", "required", "", "Chooses these keys.")
                yield replace(section, description=summary, keys=(name, *section.keys))
            yield from shared.values()


def _mappings(annotation: Any, path: str) -> Iterator[tuple[str, type[BaseModel]]]:
    """The path and the model of each mapping that may stand at a key."""
    annotation = _plain(annotation)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield path, annotation
    elif origin in (Union, UnionType):
        for argument in arguments:
            yield from _mappings(argument, path)
    elif origin is tuple and arguments[-1] is Ellipsis:
        yield from _mappings(arguments[0], f"{path}[]")
    elif origin in (dict, Mapping):
        yield from _mappings(arguments[1], f"{path}.<NAME>")


def _kind(model: type[BaseModel]) -> str:
    """The mark that distinguishes a model from others in its place: `kind: tsv`, or its own required key."""
    for name, field in model.model_fields.items():
        if get_origin(field.annotation) is Literal and len(values := get_args(field.annotation)) == 1:
            return f"{name}: {values[0]}"
    if "kind" in model.model_fields:
        return ""
    return next((name for name, field in model.model_fields.items() if field.is_required()), "")


def _plain(annotation: Any) -> Any:
    """An annotation without `Annotated`."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return annotation


def _description(model: type[BaseModel]) -> str:
    """The docstring of a model, without the name of its section, which is the heading."""
    return re.sub(r"[;,] the `[\w.]+:` section of a recipe|; `data\.\w+`", "", inspect.cleandoc(model.__doc__ or ""))


def _key(model: type[BaseModel], name: str, field: FieldInfo, path: str, inside: list[type[BaseModel]]) -> Key:
    description = field.description or beneath_fields(model).get(name, "")
    if not description and name == "kind":
        description = "Chooses these keys."
    if not description and inside:
        description = _description(inside[0]).partition("\n\n")[0]
    description = re.sub(r"\bNone(:| uses| means)", r"null\1", " ".join(description.split()))
    if description and not re.match(r"[\w-]+:", description):  # the meaning of a value
        description = description[0].upper() + description[1:]
    unit = _unit(path, description, _type(field.annotation))
    return Key(path, _type(field.annotation, field.metadata), _default(field), unit, description)


def _unit(path: str, description: str, kind: str) -> str:
    if "number" not in kind and "integer" not in kind:
        return ""
    name = path.rpartition(".")[2]
    named = next((unit for suffix, unit in _SUFFIXES.items() if name == suffix or name.endswith(f"_{suffix}")), "")
    said = next((unit for words, unit in _SAID.items() if re.match(words, description.lower())), "")
    return named or said


_NAMES = {int: "integer", float: "number", str: "text", bool: "true or false", Path: "path", NoneType: "null"}


def _type(annotation: Any, metadata: list[Any] | tuple[Any, ...] = ()) -> str:
    """An annotation in words, with the limits in its metadata."""
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        flat = [each for extra in more for each in (extra.metadata if isinstance(extra, FieldInfo) else [extra])]
        return _type(inner, [*flat, *metadata])
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        words = [_type(each, metadata if each is not NoneType else ()) for each in arguments]
        return " or ".join(dict.fromkeys(words))
    if origin is Literal:
        return " or ".join(f"`{each}`" for each in arguments)
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return f"list of {_type(arguments[0])}"
        return f"{len(arguments)} of {_type(arguments[0])}"
    if origin in (dict, Mapping):
        return f"mapping of {_type(arguments[0])} to {_type(arguments[1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "text or mapping" if annotation is StrategyChoice else "mapping"
    return " ".join([_NAMES.get(annotation, "any value"), *_limits(metadata)])


def _limits(metadata: list[Any] | tuple[Any, ...]) -> list[str]:
    signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
    found = []
    for each in metadata:
        for name, sign in signs.items():
            limit = getattr(each, name, None)
            if isinstance(each, annotated_types.BaseMetadata) and limit is not None:
                found.append(f"{sign} {limit:g}" if isinstance(limit, int | float) else f"{sign} {limit}")
    return [", ".join(found)] if found else []


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, StrategyChoice):
        value = value.name
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json", exclude_defaults=True)
    if isinstance(value, tuple):
        value = [each.model_dump(mode="json") if isinstance(each, BaseModel) else each for each in value]
    if isinstance(value, Path):
        value = str(value)
    text = yaml.safe_dump(value, default_flow_style=True, width=1000, allow_unicode=True)
    return f"`{text.removesuffix('...' + chr(10)).strip()}`"
