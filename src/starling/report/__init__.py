"""Reports about a run: log lines, the live display, curves, events, status, summary, and the HTML page.

The package may be called: `starling.report("exp/demo")` writes the page; see `starling.runs.report.report`.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """Importing a part of this package puts the package where the function `starling.report` is expected."""

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return import_module("starling.runs.report").report(*arguments, **named)


sys.modules[__name__].__class__ = _Callable
