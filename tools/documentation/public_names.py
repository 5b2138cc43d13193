"""The public names of `starling`, as a page for mkdocstrings, and those that lack a docstring."""

import inspect
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

import starling
from starling.configuration import beneath_fields
from tools.documentation.links import ROOT

INTEGRATIONS = (
    "lightning.StarlingStrategy",
    "huggingface.StarlingTrainer",
    "huggingface.StarlingArguments",
    "accelerate.StarlingSGD",
)
"""Public names that need another library and are imported from their modules."""


def page() -> str:
    """Directives for mkdocstrings: functions, classes, data, example jobs, networks, and integrations."""
    parts = []
    for title, names in _groups().items():
        parts += [f"## {title}\n", *(f"::: starling.{name}\n" for name in names)]
    parts += ["## An example job\n", "::: starling.toy.regression\n"]
    parts += ["## Your own network\n", "::: starling.speech.models.Architecture\n"]
    parts += ["## Integrations\n", *(f"::: starling.integrations.{name}\n" for name in INTEGRATIONS)]
    return "\n".join(parts)


def overview() -> str:
    """Tables of the public names, with the first line of each docstring and a link to the source."""
    parts = []
    for title, names in _groups().items():
        parts += [f"## {title}\n", "| name | meaning |\n|---|---|", *map(_row, names), ""]
    return "\n".join(parts)


def _row(name: str) -> str:
    found = _public(name)
    said, module = inspect.cleandoc(found.__doc__ or "").split("\n\n")[0].replace("\n", " "), inspect.getmodule(found)
    sentence = re.split(r"(?<=\.) ", said)[0]
    if module is None:
        return f"| `starling.{name}` | {sentence} |"
    source = Path(inspect.getfile(module)).relative_to(ROOT).as_posix()
    return f"| [`starling.{name}`](../../{source}) | {sentence} |"


def _groups() -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {"Functions": [], "Classes": [], "Data": []}
    for name in starling.__all__:
        found = _public(name)
        kind = "Classes" if inspect.isclass(found) else "Functions" if inspect.isfunction(found) else "Data"
        groups[kind].append(name)
    return groups


def _public(name: str) -> Any:
    """The definition of a public name."""
    return starling.__getattr__(name)


def undocumented() -> list[str]:
    """The public names, and the public members of public classes, that have no docstring."""
    found = []
    for name in starling.__all__:
        public = _public(name)
        if not (public.__doc__ or "").strip():
            found.append(f"starling.{name}")
        if inspect.isclass(public):
            found += [f"starling.{name}.{member}" for member in _undocumented_members(public)]
    return found


def _undocumented_members(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        if not base.__module__.startswith("starling."):
            continue
        for name, member in list(vars(base).items()):
            own = inspect.unwrap(getattr(member, "__func__", member))
            is_code = inspect.isfunction(own) or isinstance(member, property)
            if is_code and not name.startswith("_") and not (inspect.getdoc(getattr(kind, name)) or "").strip():
                yield name
    if is_dataclass(kind) or issubclass(kind, BaseModel):
        described = beneath_fields(kind)
        fields = kind.model_fields if issubclass(kind, BaseModel) else kind.__dataclass_fields__
        for name, field in fields.items():
            if not name.startswith("_") and name not in described and not getattr(field, "description", None):
                yield name
