"""The base class of configuration models. The module also reads the descriptions of their fields, compares
configurations, and describes all problems of a configuration, with one line for each problem."""

import ast
import hashlib
import inspect
import json
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails

from starling.errors import CheckpointError, ConfigError, did_you_mean, nearest


class Config(BaseModel):
    """A frozen section of a recipe, such as the options of a strategy. An unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)
    MOVED: ClassVar[Mapping[str, str]] = {}
    """Keys that no longer exist, each with its replacement. The error about such a key names the replacement."""

    @classmethod
    def alternatives(cls) -> Sequence[type["Config"]]:
        """Return the classes among which `model_validate` chooses by the value of a key. By default, this class is the
        only one."""
        return (cls,)


class PublicConfig(Config):
    """A section that users also construct in Python. Wrong arguments raise one ConfigError that lists all problems."""

    def __init__(self, **given: Any) -> None:
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise refused(describe(error, type(self), given), type(self).__name__) from None

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # a model that contains it lists problems itself


ConfigT = TypeVar("ConfigT", bound=Config)


def accepts(function: Callable[..., Any], *arguments: Any) -> bool:
    """Return whether a function can be called with these arguments."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    return True


def short_for(key: str) -> Any:
    """Return a validator for a section that may be written as a plain value. The plain value is short for
    `{key: value}`."""

    def expanded(value: object) -> object:
        return {key: value} if isinstance(value, str | Path) else value

    return model_validator(mode="before")(expanded)


def read_saved(kind: type[ConfigT], path: Path) -> ConfigT:
    """Return the content of a JSON file that belongs to a recogniser. If the file cannot be read, raises a
    CheckpointError that names it."""
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
    """Return the class that defines each field, by the field's name. The class is the model itself, or the first of its
    `alternatives` that has the field."""
    kinds = (model, *model.alternatives()) if issubclass(model, Config) else (model,)
    return {name: kind for kind in reversed(kinds) for name in kind.model_fields}


def canonical(content: Any) -> str:
    """Return a JSON value as text that does not depend on the order of keys."""
    return json.dumps(content, sort_keys=True)


def digest(content: Any) -> str:
    """Return the SHA-256 digest of a JSON value in hexadecimal. It does not depend on the order of keys."""
    return hashlib.sha256(canonical(content).encode()).hexdigest()


def differing(before: Any, now: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the dotted key and both values for each difference between two trees. None stands for a missing value."""
    if not (isinstance(before, dict) and isinstance(now, dict)):
        if before != now:
            yield key, before, now
        return
    for name in dict.fromkeys([*before, *now]):
        yield from differing(before.get(name), now.get(name), f"{key}.{name}" if key else name)


@cache
def beneath_fields(kind: type) -> dict[str, str]:
    """Return the docstring beneath each field of a class, by field name. The result includes inherited fields if the
    base class belongs to Starling or to the package of `kind`. Docstrings are read from the source code, because Python
    does not keep docstrings of fields."""
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


ModelT = TypeVar("ModelT", bound=BaseModel)
_MAX_SHOWN = 60  # characters of a wrong value


class ProblemsError(ValueError):
    """Error of a validator that finds several problems. Each of its lines names a key, which may differ from the
    validator's own key, and describes a problem."""


def describe(error: ValidationError, model: type[BaseModel], tree: Any, prefix: str = "") -> list[str]:
    """Return one line for each problem that pydantic found in `tree`, with the dotted key, the problem and a
    suggestion.

    `prefix` is the dotted path of `tree` itself, such as `strategy.`.
    """
    known = {prefix + key: kinds for key, kinds in known_keys(model).items()}
    moved = {prefix + key: words for key, words in getattr(model, "MOVED", {}).items()}
    lines: dict[str, list[str]] = {}
    for detail in error.errors(include_url=False):
        cause = detail.get("ctx", {}).get("error")
        if isinstance(cause, ProblemsError):
            lines |= {line: [] for line in cause.args}
            continue
        path = prefix + ".".join(_path(detail, tree))
        said = lines.setdefault(path.rstrip("."), [])
        words = moved.get(path) or _words(detail, path, known)
        if words not in said:
            said.append(words)
    return [": ".join(filter(None, (path, "; or ".join(said)))) for path, said in lines.items()]


def checked(kind: type[ModelT], tree: Any, where: str, prefix: str = "") -> ModelT:
    """Validate `tree`, whose dotted path is `prefix`, and return the model. Raises one ConfigError that begins with
    `where` and lists all problems."""
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        raise refused(describe(error, kind, tree, prefix), where) from None


def refused(problems: Sequence[str], where: str) -> ConfigError:
    """Return the error that lists problems, one per line."""
    count = f"{len(problems)} problems" if len(problems) > 1 else "a problem"
    return ConfigError(f"{where}: {count}\n" + "\n".join(f"  {problem}" for problem in problems))


def known_keys(model: type[BaseModel]) -> dict[str, list[tuple[str, str]]]:
    """Return the dotted keys of `model` and of the models inside it. If only some kinds of a model have a key, its
    value lists the choices that lead to these kinds. Each choice is a key and its value, such as `kind` and `tsv`."""
    found: dict[str, list[tuple[str, str]]] = {}
    for kind in model.alternatives() if issubclass(model, Config) else (model,):
        for name, field in kind.model_fields.items():
            key = field.alias or name
            found.setdefault(key, []).extend(_choosing(kind))
            for inner in _models_in(field.annotation):
                for below, kinds in known_keys(inner).items():
                    found.setdefault(f"{key}.{below}", []).extend(kinds)
    return found


def _choosing(kind: type[BaseModel]) -> list[tuple[str, str]]:
    """Return a list with the key whose value chooses this class among others, and that value. It may be empty."""
    for name, field in kind.model_fields.items():
        if get_origin(field.annotation) is Literal and len(values := get_args(field.annotation)) == 1:
            return [(name, str(values[0]))]
    return []


def suggestion(path: str, known: Collection[str]) -> str:
    """Return `; did you mean KEY?` for an unknown dotted key. If it resembles no known key, return a text that lists
    the known keys of its section."""
    path = ".".join(part for part in path.split(".") if not part.isdecimal())  # places in a list
    parent, _, name = path.rpartition(".")
    beside = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == parent}
    elsewhere = [key for key in known if key.rpartition(".")[2] == name]
    near = beside.get(nearest(name, beside) or "") or next(iter(elsewhere), None) or nearest(path, known)
    if near:
        return f"; did you mean {near}?"
    return f"; known are {', '.join(beside)}" if beside else ""


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (Union, UnionType, Annotated, tuple):
        for argument in get_args(annotation):
            yield from _models_in(argument)


def _path(detail: ErrorDetails, tree: Any) -> list[str]:
    """Return the keys that lead to a problem, without pydantic's names for the members of a union."""
    parts, place = [], tree
    *leading, last = detail["loc"] or ("",)
    for part in leading:
        inner = _inside(place, part)
        if inner is not _NOTHING:
            parts.append(str(part))
            place = inner
    if detail["type"] == "missing" or _inside(place, last) is not _NOTHING:
        parts.append(str(last))
    if detail["type"].startswith("union_tag"):
        parts.append(detail["ctx"]["discriminator"].strip("'"))
    return parts


_NOTHING = object()


def _inside(place: Any, part: str | int) -> Any:
    if isinstance(place, dict):
        return place.get(part, _NOTHING)
    if isinstance(place, list | tuple) and isinstance(part, int) and part < len(place):
        return place[part]
    return _NOTHING


def _words(detail: ErrorDetails, path: str, known: Mapping[str, Sequence[tuple[str, str]]]) -> str:
    if detail["type"] == "extra_forbidden":
        if kinds := known.get(path):
            return f"only for {kinds[0][0]}: {', '.join(dict.fromkeys(value for _, value in kinds))}; leave it out"
        return f"unknown key{suggestion(path, known)}"
    if detail["type"] in ("missing", "union_tag_not_found"):
        return "missing; a recipe must set it"
    if detail["type"] in ("model_type", "model_attributes_type", "dict_type", "path_type"):
        wanted = "a path" if detail["type"] == "path_type" else "a mapping of keys to values"
        return f"must be {wanted}, got {_shown(detail['input'])}"
    if detail["type"] == "union_tag_invalid":
        tags = [tag.strip("'") for tag in detail["ctx"]["expected_tags"].split(", ")]
        hint = did_you_mean(detail["ctx"]["tag"], tags)
        return f"{detail['ctx']['tag']!r} is unknown; {hint}known are {', '.join(tags)}"
    if detail["type"] == "value_error":
        return detail["msg"].removeprefix("Value error, ")
    message = detail["msg"][0].lower() + detail["msg"][1:]
    return f"{message}, got {_shown(detail['input'])}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…"
