"""Lets a loop that cannot be changed make a learner's steps: through the hooks of its optimizer."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from starling.engines.loop.optimizers import members_of
from starling.engines.loop.replica import LoopReplica

MakeStep = Callable[[GradScaler | None, Optimizer | None], None]
_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class StepHook:
    """Makes each call of an optimizer's `step` a step of the learner, until it is removed.

    The learner's step calls `optimizer.step()` itself, with the gradient and at the weights that its strategy chooses.
    So the call of the loop, which comes after the hook, gets a stand-in of the optimizer that has no parameters. Of
    several optimizers, the learner steps with the one that is called.
    """

    def __init__(self, replica: LoopReplica, make_step: MakeStep, scaler: GradScaler | None) -> None:
        self._replica, self._make_step = replica, make_step
        self._optimizers = members_of(replica.optimizer)
        self._handles = [each.register_step_pre_hook(self._before_step) for each in self._optimizers]
        self._ids = {handle.id for handle in self._handles}
        self._scaler = scaler
        if scaler is not None:
            self._step_of_scaler = scaler.step
            scaler.step = self._step_scaled  # type: ignore[method-assign]

    def remove(self) -> None:
        """Leave the optimizer and the scaler as they were."""
        for handle in self._handles:
            handle.remove()
        if self._scaler is not None:
            vars(self._scaler).pop("step", None)

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments | None:
        if self._replica.is_stepping:
            return None
        kwargs = dict(kwargs)
        closure = args[1] if len(args) > 1 else kwargs.pop("closure", None)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        names = list(before)
        later = names[next(place for place, name in enumerate(names) if name in self._ids) + 1 :]
        # each hook must act once on the gradient: those before this one have, and the post hooks follow
        optimizer._optimizer_step_pre_hooks = OrderedDict((name, before[name]) for name in later)
        optimizer._optimizer_step_post_hooks = OrderedDict()
        try:
            self._make_step(None, optimizer)
        finally:
            optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = before, after
        return (_without_parameters(optimizer),), kwargs if closure is None else {**kwargs, "closure": lambda: loss}

    def _step_scaled(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """In place of `scaler.step`, which would skip the learner's step if this learner's gradient is not finite."""
        if self._scaler is None or not any(optimizer is own for own in self._optimizers):
            return self._step_of_scaler(optimizer, *args, **kwargs)
        self._make_step(self._scaler, optimizer)
        return None


def _without_parameters(optimizer: Optimizer) -> Optimizer:
    """An optimizer of the same class whose step changes nothing."""
    stand_in = object.__new__(type(optimizer))
    stand_in.__dict__.update(optimizer.__dict__)
    stand_in.param_groups = [{**group, "params": []} for group in optimizer.param_groups]
    stand_in.state = type(optimizer.state)(dict) if type(optimizer.state) is not dict else {}  # type: ignore[assignment]
    return stand_in
