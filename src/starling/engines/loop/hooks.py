"""What happens when a loop calls `step` of an optimizer: it is refused, or made a step of the learner."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from starling.engines.loop.optimizers import members_of, parameters_of
from starling.engines.loop.replica import LoopReplica
from starling.errors import ProtocolError

MakeStep = Callable[[GradScaler | None, Optimizer | None], None]
_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class StepHooks:
    """Watches the steps of all optimizers, until it is removed.

    A step that bypasses the learner is a `ProtocolError`: one of the learner's own optimizers, or of another that has
    some of its parameters. Once the hooks are attached, each call of an own optimizer's `step` is a step of the
    learner. That step calls `optimizer.step()` itself, with the gradient and at the weights that its strategy chooses.
    So the call of the loop, which comes after the hook, gets a stand-in of the optimizer that has no parameters. Of
    several optimizers, the learner steps with the one that is called.
    """

    def __init__(self, replica: LoopReplica, learner: str) -> None:
        self.is_attached = False
        self._replica, self._learner = replica, learner
        self._optimizers = members_of(replica.optimizer)
        self._parameters = {id(parameter) for parameter in replica.parameters}
        self._harmless: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # with its number of parameters
        self._guard = register_optimizer_step_pre_hook(self._check)
        self._handles: list[RemovableHandle] = []
        self._scaler: GradScaler | None = None

    def attach(self, make_step: MakeStep, scaler: GradScaler | None) -> None:
        """Let the loop's calls of `optimizer.step()` or `scaler.step()` call `make_step`."""
        self.is_attached = True
        self._make_step = make_step
        self._handles = [each.register_step_pre_hook(self._step_attached) for each in self._optimizers]
        self._scaler = scaler
        if scaler is not None:
            self._step_of_scaler = scaler.step
            scaler.step = self._step_scaled  # type: ignore[method-assign]

    def detach(self) -> None:
        """Leave the optimizers and the scaler to the loop again, as they were before `attach`."""
        for handle in self._handles:
            handle.remove()
        if self._scaler is not None:
            vars(self._scaler).pop("step", None)

    def remove(self) -> None:
        """Allow all steps."""
        self.detach()
        self._guard.remove()

    def _check(self, optimizer: Optimizer, *_: object) -> None:
        """Called before each step of any optimizer."""
        if any(optimizer is own for own in self._optimizers):
            if not self._replica.is_stepping and not self.is_attached:
                raise ProtocolError(
                    f"{self._learner}: optimizer.step() was called on an optimizer given to starling.join, so the "
                    "other learners would not see the step; call step() of the joined learner instead, and "
                    "step(scaler) instead of scaler.step(optimizer), or use starling.attach"
                )
            return
        number = sum(len(group["params"]) for group in optimizer.param_groups)
        if self._harmless.get(optimizer) == number:
            return
        if any(id(parameter) in self._parameters for parameter in parameters_of(optimizer)):
            raise ProtocolError(
                f"{self._learner}: a step of {type(optimizer).__name__} would change parameters of the joined model, "
                "but this optimizer was not given to starling.join, so the other learners would not see the step; join "
                "the model with a list of all its optimizers, and call step(optimizer=…) of the joined learner"
            )
        self._harmless[optimizer] = number

    def _step_attached(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments | None:
        if self._replica.is_stepping:
            return None
        kwargs = dict(kwargs)
        closure = args[1] if len(args) > 1 else kwargs.pop("closure", None)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        names, own = list(before), {handle.id for handle in self._handles}
        later = names[next(place for place, name in enumerate(names) if name in own) + 1 :]
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
