"""Learners start without Dynamo, the front end of `torch.compile`, unless they compile something.

The first optimizer of a process imports `torch._dynamo`, which takes as long as importing torch. Torch imports
it for two things that matter only while Dynamo traces:

- A function marked with `torch._disable_dynamo`, such as `Optimizer.zero_grad`, asks Dynamo for an untraced version of
  itself, and keeps it in its attribute `__dynamo_disable`.
- An optimizer's `step` marks graph breaks before and after the actual step. In eager mode they do nothing.

`postpone_dynamo` stores the function itself in that attribute, and gives `step` the same code without graph breaks.
Both changes are undone just before `torch._dynamo` is first imported.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import _use_grad_for_differentiable

_DYNAMO = "torch._dynamo"
_KEPT = "__dynamo_disable"
_MARKED = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")


def postpone_dynamo() -> None:
    """Let torch's optimizers work without Dynamo until something imports it.

    The function does nothing if Dynamo is already imported, or if this version of torch imports it in a different way.
    """
    if _DYNAMO in sys.modules:
        return
    code = _use_grad_for_differentiable(lambda: None).__code__
    marked = [getattr(Optimizer, name, None) for name in _MARKED]
    is_known = code.co_freevars == ("func",) and "graph_break" in code.co_names
    if is_known and all(_KEPT in getattr(each, "__code__", code).co_names for each in marked):
        sys.meta_path.insert(0, _Postponed([each.__wrapped__ for each in marked if each], code))


class _Postponed(MetaPathFinder):
    """Keeps Dynamo away from `marked` functions and from the steps whose code is `with_breaks`.

    As the first finder on `sys.meta_path`, it sees the import of Dynamo before Dynamo is loaded.
    """

    def __init__(self, marked: Sequence[Callable[..., Any]], with_breaks: CodeType) -> None:
        self._marked = marked
        self._with_breaks = with_breaks
        steps = [kind.__dict__.get("step") for kind in Optimizer.__subclasses__()]
        self._steps = [step for step in steps if isinstance(step, FunctionType) and step.__code__ is with_breaks]
        for function in self._marked:
            setattr(function, _KEPT, function)
        for step in self._steps:
            step.__code__ = _without_breaks(step).__code__

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Undo the changes if Dynamo is imported; return None, so that the next finder looks for the module."""
        if fullname == _DYNAMO:
            sys.meta_path.remove(self)
            for function in self._marked:
                delattr(function, _KEPT)
            for step in self._steps:
                step.__code__ = self._with_breaks
        return None


def _without_breaks(func: Callable[..., Any]) -> FunctionType:
    """Return a copy of the wrapper that `_use_grad_for_differentiable` puts around an optimizer's step. The copy has no
    graph breaks."""

    def step(*args: Any, **kwargs: Any) -> Any:
        was_enabled = torch.is_grad_enabled()
        try:
            torch.set_grad_enabled(args[0].defaults["differentiable"])
            return func(*args, **kwargs)
        finally:
            torch.set_grad_enabled(was_enabled)

    return step  # type: ignore[return-value]
