"""The optimizers of a user's loop: several as one, what learners compare of them, and what their steps do."""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from starling.errors import ConfigError, ProtocolError

MakeStep = Callable[[GradScaler | None, Optimizer | None], None]
_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


_OF_SCHEDULES = {"params", "lr", "initial_lr", "max_lr", "min_lr", "momentum", "max_momentum", "base_momentum", "betas"}
"""What learning rate schedulers change in a parameter group."""


class OptimizerList(Optimizer):
    """Several optimizers of one model as one: its parameter groups are theirs, and its step is a step of each.

    Within `only(member)`, its step is a step of that member.
    """

    def __init__(self, members: Sequence[Optimizer]) -> None:
        # not Optimizer.__init__, which would make parameter groups of its own
        self.members = tuple(members)
        self.defaults: dict[str, Any] = {}
        self._active = self.members

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The parameter groups of all members, in order."""
        return [group for member in self.members for group in member.param_groups]

    @property
    def state(self) -> dict[Tensor, Any]:  # type: ignore[override]
        """The members' states, by parameter."""
        return {parameter: state for member in self.members for parameter, state in member.state.items()}

    @contextmanager
    def only(self, member: Optimizer) -> Iterator[None]:
        """Within this context, `step` is a step of one member."""
        self._active = (member,)
        try:
            yield
        finally:
            self._active = self.members

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make a step of each active member."""
        for member in self._active:
            member.step()

    def state_dict(self) -> dict[str, Any]:
        """The members' states and groups, each numbered by its member."""
        found = [member.state_dict() for member in self.members]
        return {
            "state": {number: each["state"] for number, each in enumerate(found)},
            "param_groups": [each["param_groups"] for each in found],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        for number, member in enumerate(self.members):
            groups = state_dict["param_groups"][number]
            member.load_state_dict({"state": state_dict["state"][number], "param_groups": groups})


def as_one(optimizers: Optimizer | Sequence[Optimizer]) -> Optimizer:
    """One optimizer for those of a loop. Raises ConfigError unless there is one, and each parameter is in one."""
    if isinstance(optimizers, Optimizer):
        return optimizers
    members = list(optimizers)
    if not members or not all(isinstance(each, Optimizer) for each in members):
        kinds = ", ".join(type(each).__name__ for each in members) or "an empty list"
        raise ConfigError(f"optimizer: expected an optimizer of torch.optim, or a list of them, got {kinds}")
    known: dict[int, str] = {}
    for number, member in enumerate(members):
        name = f"optimizer {number} ({type(member).__name__})"
        for parameter in parameters_of(member):
            if known.setdefault(id(parameter), name) != name:
                raise ConfigError(
                    f"optimizer: a parameter of shape {list(parameter.shape)} is in {known[id(parameter)]} and in "
                    f"{name}; give each parameter to one optimizer"
                )
    return members[0] if len(members) == 1 else OptimizerList(members)


def members_of(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """The optimizers that a loop steps: the members of an `OptimizerList`, or the optimizer itself."""
    return optimizer.members if isinstance(optimizer, OptimizerList) else (optimizer,)


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """The parameters in an optimizer's groups."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def describe(optimizer: Optimizer) -> str:
    """The classes and options of a loop's optimizers, which all learners share: without what schedulers change."""
    return " + ".join(map(_describe, members_of(optimizer)))


def _describe(optimizer: Optimizer) -> str:
    usual = {key: _text(each) for key, each in optimizer.defaults.items()}
    own = [
        {
            key: text
            for key, each in group.items()
            if key not in _OF_SCHEDULES and usual.get(key) != (text := _text(each))
        }
        for group in optimizer.param_groups
    ]
    shown = [f"{number}: {_options(group)}" for number, group in enumerate(own) if group]
    return f"{type(optimizer).__name__}({_options(usual)})" + (f", groups {'; '.join(shown)}" if shown else "")


def _options(options: dict[str, str]) -> str:
    return ", ".join(f"{key}={each}" for key, each in sorted(options.items()))


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        return _text(value.tolist())
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_text, value))})"
    if callable(value):  # its repr has an address
        return str(getattr(value, "__qualname__", type(value).__qualname__))
    return repr(value) if value is None or isinstance(value, bool | int | float | str) else type(value).__name__


def optimizer_like(optimizer: Optimizer, parameters: dict[int, nn.Parameter], all_parameters: list[Any]) -> Optimizer:
    """An optimizer like a loop's for `parameters`, by their numbers in `all_parameters`: with the same groups and
    options. Raises ConfigError if there cannot be one."""
    if isinstance(optimizer, OptimizerList):
        return OptimizerList([optimizer_like(each, parameters, all_parameters) for each in optimizer.members])
    places = {id(parameter): number for number, parameter in enumerate(all_parameters)}
    groups = []
    for group in optimizer.param_groups:
        numbers = [places[id(parameter)] for parameter in group["params"] if id(parameter) in places]
        groups.append(group | {"params": [parameters[number] for number in numbers if number in parameters]})
    kind = type(optimizer)
    known = inspect.signature(kind).parameters  # AdamW's defaults contain one that only its base class accepts
    defaults = {name: value for name, value in optimizer.defaults.items() if name in known}
    try:
        return kind(groups, **defaults)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"optimizer: a server cannot create a {kind.__name__} with the options of yours ({error}); use an "
            "optimizer of torch.optim that takes parameters of any shape"
        ) from error


class StepHooks:
    """Watches the steps of all optimizers, until it is removed.

    A step that bypasses the learner is a `ProtocolError`: one of the learner's own optimizers, or of another that has
    some of its parameters. Once the hooks are attached, each call of an own optimizer's `step` is a step of the
    learner. That step calls `optimizer.step()` itself, with the gradient and at the weights that its strategy chooses.
    So the call of the loop, which comes after the hook, gets a stand-in of the optimizer that has no parameters. Of
    several optimizers, the learner steps with the one that is called.
    """

    def __init__(
        self, optimizer: Optimizer, parameters: Sequence[Tensor], is_stepping: Callable[[], bool], learner: str
    ) -> None:
        """`is_stepping` returns whether the `learner`, so named in errors, is making a step."""
        self.is_attached = False
        self._is_stepping, self._learner = is_stepping, learner
        self._optimizers = members_of(optimizer)
        self._parameters = {id(parameter) for parameter in parameters}
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
            if not self._is_stepping() and not self.is_attached:
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
        if self._is_stepping():
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
