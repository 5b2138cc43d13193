"""Reading a recipe file: YAML, numbers as one writes them, no key twice, and the file that it builds on."""

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from starling.errors import ConfigError

Tree = dict[str, Any]


class _Loader(yaml.SafeLoader):
    """YAML's safe subset, except that 1e-3 is a number and a key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is given twice", node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML text. Raises ConfigError naming `where` it stands."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{where}{line}: not valid YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{where}: not valid YAML: {error}") from None


def read_recipe(path: Path) -> Tree:
    """The tree in a recipe file, laid over that of its `base:` (a path relative to the recipe), if it has one.

    Raises ConfigError for a file that is missing or not a YAML mapping, and for bases that go in a circle.
    """
    tree: Tree = {}
    seen: list[Path] = []
    while True:
        if path.resolve() in seen:
            raise ConfigError(f"recipe {seen[0]}: its `base` leads back to {path}; remove one of them")
        seen.append(path.resolve())
        own = _read_mapping(path)
        base = own.pop("base", None)
        tree = merge(own, tree)
        if base is None:
            return tree
        if not isinstance(base, str):
            raise ConfigError(f"recipe {path}: base must be the path of another recipe, got {base!r}")
        path = path.parent / base


def merge(below: Tree, above: Tree) -> Tree:
    """`above` laid over `below`: mappings are merged, everything else is replaced."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _read_mapping(path: Path) -> Tree:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"recipe {path}: no such file; `ls recipes` shows those that come with Starling") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"recipe {path}: cannot be read as UTF-8 text: {error}") from None
    tree = parse_yaml(text, f"recipe {path}")
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise ConfigError(f"recipe {path}: must be a YAML mapping of keys to values, such as `learners: 4`")
    return tree
