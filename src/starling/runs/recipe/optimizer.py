"""The local optimizer of every learner: any of `torch.optim`, by name."""

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from typing import Any

import torch
from pydantic import Field, model_validator
from torch import nn
from torch.optim import Optimizer

from starling.budget import Schedule
from starling.configuration import Config

OPTIMIZERS: dict[str, type[Optimizer]] = {
    name.lower(): kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
}
"""All optimizers of `torch.optim`, by lower-case name."""
WORK_WITH_ANY_RATE = ("adam", "adamw", "sgd")
"""Need no trial without options. The first optimizer of a process loads torch's compiler, which takes over a second
that processes which train nothing need not spend."""


class OptimizerConfig(Config):
    """The `optimizer:` section of a recipe."""

    name: str = "adamw"
    """A class of `torch.optim`; upper and lower case are the same."""
    lr: float = Field(default=1e-3, ge=0.0)
    """The peak learning rate; the schedule multiplies it."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the class, such as momentum or weight_decay."""
    clip_norm: float | None = Field(default=5.0, gt=0.0)
    """Gradients longer than this (2-norm) are shortened to it; null: never."""
    schedule: Schedule = Field(default_factory=lambda: Schedule(warmup=0.05))
    """How the learning rate follows the budget."""

    @model_validator(mode="after")
    def _works(self) -> "OptimizerConfig":
        kind = self._kind()
        if self.options or self.name.lower() not in WORK_WITH_ANY_RATE:
            _try(kind, self.lr, self.options)
        return self

    def maker(self) -> Callable[[list[nn.Parameter]], Optimizer]:
        """Makes the optimizer of one learner, at the peak learning rate.

        One pass over the weights (`fused`) where torch has it, several times faster on the CPU, unless the options
        choose an implementation.
        """
        kind = self._kind()
        chosen = {"fused", "foreach", "differentiable"} & self.options.keys()
        fused = {} if chosen or "fused" not in inspect.signature(kind).parameters else {"fused": True}
        return partial(kind, lr=self.lr, **self.options, **fused)

    def _kind(self) -> Callable[..., Optimizer]:
        kind = OPTIMIZERS.get(self.name.lower())
        if kind is None:
            near = get_close_matches(self.name.lower(), OPTIMIZERS, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ValueError(f"name: {self.name!r} is not in torch.optim; {hint}known are {', '.join(OPTIMIZERS)}")
        return kind


def _try(kind: Callable[..., Optimizer], lr: float, options: dict[str, Any]) -> None:
    """Make the optimizer for a matrix and a vector and take a step; ValueError says why that is impossible."""
    title = getattr(kind, "__name__", str(kind))
    known = [name for name in inspect.signature(kind).parameters if name not in ("self", "params", "lr")]
    for option in options:
        if option not in known:
            near = get_close_matches(option, known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ValueError(f"options: {title} has no {option!r}; {hint}it knows {', '.join(known)}")
    if inspect.signature(kind.step).parameters["closure"].default is inspect.Parameter.empty:  # type: ignore[attr-defined]
        raise ValueError(
            f"{title} computes the loss several times a step, which learners do not; use another, such as adamw or sgd"
        )
    parameters = [nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    try:
        kind(parameters, lr=lr, **options).step()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{title} cannot train with lr {lr} and options {options}: {error}") from None
