"""An optimizer's per-weight state as flat vectors that learners can average."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from starling.errors import ConfigError
from starling.training.flat import split

NEVER_NEGATIVE = {"exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "acc_delta"}
"""Sums and averages of squares. Adding a delta computed from an older value could make them negative."""


class OptimizerMemory:
    """One vector `[P]` for each number that the optimizer keeps per weight; its state becomes views into the vectors.

    `another` creates an equal optimizer for other parameters, given by number. Raises ConfigError if the optimizer
    keeps anything except such numbers and a step count.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: list[nn.Parameter],
        another: Callable[[dict[int, nn.Parameter]], Optimizer],
    ) -> None:
        self._optimizer = optimizer
        self._parameters = parameters
        if not optimizer.state:
            self._begin(another)
        names = self._checked_names()
        self.vectors = [
            torch.cat([optimizer.state[parameter][name].reshape(-1) for parameter in parameters]) for name in names
        ]
        self.never_negative = [name in NEVER_NEGATIVE for name in names]
        self._views = [
            (parameter, name, view)
            for name, vector in zip(names, self.vectors, strict=True)
            for parameter, view in zip(parameters, split(vector, parameters), strict=True)
        ]
        for parameter, name, view in self._views:
            optimizer.state[parameter][name] = view

    def take_back(self) -> None:
        """Take what `load_state_dict` has put in the place of the views, which are the optimizer's state again."""
        for parameter, name, view in self._views:
            state = self._optimizer.state[parameter]
            found = state.get(name)
            if found is not None and found.data_ptr() == view.data_ptr():
                continue
            if found is None:
                view.zero_()
            else:
                view.copy_(found)
            state[name] = view

    def with_vectors(self, state_dict: dict[str, Any], vectors: Sequence[Tensor]) -> dict[str, Any]:
        """A copy of the optimizer's `state_dict` whose numbers per weight are those of other vectors."""
        order = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        place = {id(parameter): number for number, parameter in enumerate(order)}
        state = {number: dict(values) for number, values in state_dict["state"].items()}
        others = [view for vector in vectors for view in split(vector, self._parameters)]
        for (parameter, name, _), other in zip(self._views, others, strict=True):
            state[place[id(parameter)]][name] = other
        return state_dict | {"state": state}

    def _begin(self, another: Callable[[dict[int, nn.Parameter]], Optimizer]) -> None:
        """Initialise the optimizer's state to zeros.

        A step of another optimizer, on a stand-in for each parameter in turn, creates the state: the parameters
        themselves must not change, because a gradient may be under way at them.
        """
        for number, parameter in enumerate(self._parameters):
            stand_in = nn.Parameter(torch.zeros_like(parameter))
            stand_in.grad = torch.zeros_like(parameter)
            other = another({number: stand_in})
            other.step()
            state = other.state[stand_in]
            for name, value in state.items():
                if isinstance(value, Tensor):
                    value.zero_()
                elif name == "step":
                    state[name] = 0
            self._optimizer.state[parameter] = state

    def _checked_names(self) -> list[str]:
        kind = type(self._optimizer).__name__
        names: list[str] = []
        for parameter in self._parameters:
            for name, value in self._optimizer.state.get(parameter, {}).items():
                if name == "step" or value is None:
                    continue
                if not isinstance(value, Tensor) or value.shape != parameter.shape:
                    raise ConfigError(
                        f"strategy.optimizer_state: {kind} keeps {name!r}, which is not one number per weight and "
                        "cannot be averaged; choose local"
                    )
                if name not in names:
                    names.append(name)
        return names
