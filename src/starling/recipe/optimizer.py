"""The recipe's `optimizer:` section: any optimizer of `torch.optim`, by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from starling.budget import Schedule
from starling.configuration import Config
from starling.errors import did_you_mean

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

KNOWN_TO_WORK = ("adam", "adamw", "sgd")
"""Without options, these need no trial step, so that commands which do not train can read a recipe without torch."""


class OptimizerConfig(Config):
    """The optimizer of each learner, and its learning rate; the `optimizer:` section of a recipe."""

    name: str = "adamw"
    """A class of `torch.optim`, in upper or lower case."""
    lr: float = Field(default=1e-3, ge=0.0)
    """The peak learning rate; the schedule multiplies it."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the class, such as momentum or weight_decay."""
    clip_norm: float | None = Field(default=5.0, gt=0.0)
    """Gradients with a larger 2-norm are scaled down to this norm; null: never."""
    schedule: Schedule = Field(default_factory=lambda: Schedule(warmup=0.05))
    """How the learning rate follows the budget."""

    @model_validator(mode="after")
    def _works(self) -> OptimizerConfig:
        if self.options or self.name.lower() not in KNOWN_TO_WORK:
            _try(self._kind(), self.lr, self.options)
        return self

    def maker(self) -> Callable[[list[nn.Parameter]], Optimizer]:
        """A function that makes a learner's optimizer, with the peak learning rate.

        It selects torch's `fused` implementation if there is one, which is several times faster on the CPU, unless the
        options select another.
        """
        kind = self._kind()
        chosen = {"fused", "foreach", "differentiable"} & self.options.keys()
        fused = {} if chosen or "fused" not in inspect.signature(kind).parameters else {"fused": True}
        return partial(kind, lr=self.lr, **self.options, **fused)

    def _kind(self) -> Callable[..., Optimizer]:
        known = optimizers()
        kind = known.get(self.name.lower())
        if kind is None:
            hint = did_you_mean(self.name.lower(), known)
            raise ValueError(f"name: {self.name!r} is not in torch.optim; {hint}known are {', '.join(known)}")
        return kind


@cache
def optimizers() -> dict[str, type[Optimizer]]:
    """All optimizers of `torch.optim`, by lower-case name."""
    from torch import optim

    return {
        name.lower(): kind
        for name, kind in vars(optim).items()
        if isinstance(kind, type) and issubclass(kind, optim.Optimizer) and kind is not optim.Optimizer
    }


def _try(kind: Callable[..., Optimizer], lr: float, options: dict[str, Any]) -> None:
    """Take a step with the optimizer on a matrix and a vector. Raises ValueError with the reason if that fails."""
    import torch
    from torch import nn

    title = getattr(kind, "__name__", str(kind))
    known = [name for name in inspect.signature(kind).parameters if name not in ("self", "params", "lr")]
    for option in options:
        if option not in known:
            hint = did_you_mean(option, known)
            raise ValueError(f"options: {title} has no {option!r}; {hint}known are {', '.join(known)}")
    if inspect.signature(kind.step).parameters["closure"].default is inspect.Parameter.empty:  # type: ignore[attr-defined]
        raise ValueError(
            f"{title} computes the loss several times per step, which is not supported; use another, such as adamw"
        )
    parameters = [nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    try:
        kind(parameters, lr=lr, **options).step()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{title} cannot train with lr {lr} and options {options}: {error}") from None
