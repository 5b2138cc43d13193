"""Docstrings beneath the fields of a class, which Python does not keep."""

import ast
import inspect
import textwrap
from functools import cache


@cache
def beneath_fields(kind: type) -> dict[str, str]:
    """The docstring of each field of a class and of the classes of Starling that it extends."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.partition(".")[0] == "starling":
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
