"""Recipe files, including the recipes in the package. They are YAML in which 1e-3 is a number and no key may be given
twice. A recipe is merged with its base and with `key=value` arguments."""

import copy
import re
import shutil
from collections.abc import Hashable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from starling.errors import ConfigError, did_you_mean, noted
from starling.files import writing

Tree = dict[str, Any]
SHIPPED = Path(__file__).parents[1] / "recipes"
"""Folder of the recipes in the package, which users may refer to by name."""
MAX_LENGTH = 1 << 20
"""Maximum length of a recipe, in characters."""
MAX_VALUES = 20_000
"""Maximum number of keys and values in a recipe after its YAML aliases are expanded."""
MAX_DEPTH = 50
"""Maximum depth of nesting."""


class _Loader(yaml.SafeLoader):
    """Loader of YAML's safe subset, except that 1e-3 is a number and a repeated key is an error."""

    def fetch_flow_collection_start(self, TokenClass: Any) -> None:  # noqa: N803 - PyYAML's own name
        if self.flow_level > MAX_DEPTH:  # checked here, because PyYAML's scanner is slow on deep nesting
            problem = f"nested more than {MAX_DEPTH} deep"
            raise yaml.scanner.ScannerError(None, None, problem, self.get_mark())
        super().fetch_flow_collection_start(TokenClass)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is given twice", node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def parse_yaml(text: str, where: str) -> Any:
    """Return the content of a YAML text. If the text is invalid, the ConfigError names its source, `where`."""
    if len(text) > MAX_LENGTH:
        raise ConfigError(f"{where}: {len(text):,} characters, but a recipe may have at most {MAX_LENGTH:,}")
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check_size(node, where)
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{where}{line}: not valid YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{where}: not valid YAML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{where}: not valid YAML: nested too deeply") from None
    except (LookupError, AttributeError, TypeError, ArithmeticError) as error:  # a tag on a value of another type
        raise ConfigError(f"{where}: not valid YAML: a tag does not fit its value ({error})") from None


def _check_size(root: yaml.Node, where: str) -> None:
    """Raise ConfigError if a document contains itself, or is too large or too deep after its aliases are expanded."""
    sizes: dict[int, int] = {}
    open_nodes: set[int] = set()

    def size(node: yaml.Node, depth: int) -> int:
        if id(node) in open_nodes:
            raise ConfigError(f"{where}, line {node.start_mark.line + 1}: an alias refers to a value that contains it")
        if depth > MAX_DEPTH:
            raise ConfigError(f"{where}, line {node.start_mark.line + 1}: nested more than {MAX_DEPTH} deep")
        if id(node) not in sizes:
            open_nodes.add(id(node))
            below = node.value if isinstance(node, yaml.CollectionNode) else []
            children = chain.from_iterable(below) if isinstance(node, yaml.MappingNode) else below
            sizes[id(node)] = 1 + sum(size(each, depth + 1) for each in children)
            open_nodes.remove(id(node))
        return sizes[id(node)]

    if size(root, 0) > MAX_VALUES:
        raise ConfigError(f"{where}: more than {MAX_VALUES:,} values with its aliases expanded; shorten it")


def read_recipe(path: Path) -> Tree:
    """Return the tree in a recipe file. If the recipe has a `base:` (a path relative to the recipe), its tree is merged
    over the tree of the base.

    Both the recipe and the base may also be names of recipes in the package. Raises ConfigError for a file that is
    missing or is not a YAML mapping, and for circular bases.
    """
    tree: Tree = {}
    for _, own in _with_bases(path):
        tree = merge(own, tree)
    return tree


def _with_bases(path: Path) -> Iterator[tuple[Path, Tree]]:
    """Yield the file of a recipe, the file of its base, the file of the base's base and so on, each with the keys that
    the file itself contains."""
    seen: list[Path] = []
    path = _located(path, str(path))
    while True:
        if path.resolve() in seen:
            raise ConfigError(f"recipe {seen[0]}: its `base` is circular: it leads back to {path}; remove one `base`")
        seen.append(path.resolve())
        own = _read_mapping(path)
        base: object = own.pop("base", None)
        yield path, own
        if base is None:
            return
        if not isinstance(base, str) or any(each == "\0" or "\ud800" <= each <= "\udfff" for each in base):
            raise ConfigError(f"recipe {path}: base must be the path or the name of another recipe, got {base!r}")
        path = _located(path.parent / base, base)


def _located(path: Path, name: str) -> Path:
    """Return the path of the package's recipe with this name. Return `path` if such a file exists, or if the package
    has no such recipe."""
    shipped = _shipped().get(name)
    return path if shipped is None or path.exists() else shipped


def merge(below: Tree, above: Tree) -> Tree:
    """Merge `above` over `below`. Mappings are merged recursively, unless both have a `kind` and the kinds differ. All
    other values are replaced."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            kinds = {str(each["kind"]) for each in (old, value) if "kind" in each}
            value = merge(old, value) if len(kinds) < 2 else value
        merged[key] = value
    return merged


def _read_mapping(path: Path) -> Tree:
    try:
        if path.exists() and not path.is_file():  # reading a device or a pipe may never end
            raise ConfigError(f"recipe {path}: cannot be read: not a regular file")
        with path.open("rb") as file:
            text = file.read(4 * MAX_LENGTH + 4).decode("utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"recipe {path}: no such file, and no recipe of the package; `starling recipes` lists those"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"recipe {path}: cannot be read as UTF-8 text: {error}") from None
    tree = parse_yaml(text, f"recipe {path}")
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise ConfigError(f"recipe {path}: must be a YAML mapping of keys to values, such as `learners: 4`")
    return tree


_SHORTHANDS = ("strategy",)  # keys whose plain value is short for {name: value}


def apply_overrides(tree: Tree, overrides: Sequence[str]) -> Tree:
    """Return a copy of `tree` to which each `dotted.key=value` has been applied in order. Values are YAML.

    Raises one ConfigError that lists every argument that does not have this form or whose key lies inside a plain
    value.
    """
    result = copy.deepcopy(tree)
    problems: list[str] = []
    for argument in overrides:
        with noted(problems, ConfigError):
            _apply(result, argument)
    if problems:
        raise ConfigError("\n".join(problems))
    return result


def _apply(tree: Tree, argument: str) -> None:
    key, equals, text = argument.partition("=")
    *outer, last = parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"argument {argument!r}: must have the form key=value, such as learners=2 or budget.epochs=3")
    value, place = parse_yaml(text, f"argument {argument!r}"), tree
    for depth, part in enumerate(outer, start=1):
        path, inner = ".".join(parts[:depth]), place.get(part)
        if inner is not None and not isinstance(inner, dict) and path not in _SHORTHANDS:
            raise ConfigError(
                f"argument {'.'.join(parts)}: {path} is the plain value {inner!r}, so that no key can be set inside it"
            )
        place[part] = inner if isinstance(inner, dict) else {} if inner is None else {"name": inner}
        place = place[part]
    place[last] = value


def summaries() -> dict[str, str]:
    """Return a summary of each recipe in the package, by name. The summary is the first line of the recipe's
    file, a comment."""
    return {name: file.read_text(encoding="utf-8").splitlines()[0].lstrip("# ") for name, file in _shipped().items()}


def copy_recipe(name: str, to: Path) -> list[Path]:
    """Copy a recipe and its bases into the folder `to`, and return the new files.

    Raises:
        ConfigError: There is no recipe of that name, a file exists already, or the folder cannot be written.
    """
    known = _shipped()
    if name not in known:
        raise ConfigError(f"recipe {name!r} is unknown; {did_you_mean(name, known)}known are {', '.join(known)}")
    sources = [path for path, _ in _with_bases(known[name])]
    copies = [to / path.name for path in sources]
    if existing := [str(copy) for copy in copies if copy.exists()]:
        raise ConfigError(f"{', '.join(existing)}: exists already; remove it, or copy to another folder")
    with writing(to, "copy to another folder"):
        to.mkdir(parents=True, exist_ok=True)
        for source, copy in zip(sources, copies, strict=True):
            shutil.copyfile(source, copy)
    return copies


def _shipped() -> dict[str, Path]:
    """Return the paths of the recipes in the package, by name."""
    return {path.stem: path for path in sorted(SHIPPED.glob("*.yaml"))}
