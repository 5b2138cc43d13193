"""The optimizers of a user's loop: several as one, their description, which learners compare, and other optimizers like
them."""

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from starling.errors import ConfigError

_OF_SCHEDULES = {"params", "lr", "initial_lr", "max_lr", "min_lr", "momentum", "max_momentum", "base_momentum", "betas"}
"""Keys of a parameter group that learning rate schedulers change."""


class OptimizerList(Optimizer):
    """Several optimizers of one model as one: it has the parameter groups of all of them, and its step is a step of
    each that is `active`."""

    def __init__(self, members: Sequence[Optimizer]) -> None:
        # not Optimizer.__init__, which would make parameter groups of its own
        self.members = tuple(members)
        self.defaults: dict[str, Any] = {}
        self.active = self.members

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The parameter groups of all members, in order."""
        return [group for member in self.members for group in member.param_groups]

    @property
    def state(self) -> dict[Tensor, Any]:  # type: ignore[override]
        """The members' states, by parameter."""
        return {parameter: state for member in self.members for parameter, state in member.state.items()}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make a step of each active member."""
        for member in self.active:
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
    """One optimizer that stands for all optimizers of a loop. Raises ConfigError unless there is at least one, and each
    parameter is in only one."""
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
    """The classes and options of a loop's optimizers, without the options that schedulers change; the same on all
    learners."""
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
    """An optimizer like a loop's for `parameters`, given by their numbers in `all_parameters`, with the same groups and
    options. Raises ConfigError if it cannot be created."""
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
