"""Notices what a user's loop itself changes in its model: its parameters and their memory, and the weights in them."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from starling.engines.loop.optimizers import parameters_of
from starling.errors import ProtocolError
from starling.training.flat import in_cudnn_order, trainable, view_weights

_SAME_PARAMETERS = (
    "at starling.join all parameters that will be trained must belong to the model and must require gradients or be in "
    "the optimizer; to train some only later, freeze them with requires_grad_(False) after starling.join"
)
_ROUNDING = 1e-6
"""Relative to the weights: what remains of a change that was made and undone, such as by a schedule-free optimizer."""


class OutsideChanges:
    """Compares the weights at which a loop computes, `[P]`, with what they were when its learner left them to it.

    Most steps need no comparison: a change in place shows in the version counters of the parameters, and one that
    avoids them, such as `parameter.data.clamp_`, in the sum of all weights.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], weights: Tensor) -> None:
        self._parameters, self._weights = parameters, weights
        self._seen = torch.empty_like(weights)
        self.leave()

    def leave(self) -> None:
        """The learner leaves the weights to the loop, as they are now."""
        self._seen.copy_(self._weights)
        self._signs = self._now()

    def find(self) -> Tensor | None:
        """What the loop has changed since `leave`, `[P]`; None: nothing."""
        if self._now() == self._signs or torch.equal(self._weights, self._seen):
            return None
        return self._weights - self._seen

    def is_rounding(self, change: Tensor) -> bool:
        """Whether a change is no larger than rounding errors of the weights."""
        return bool(torch.linalg.vector_norm(change) <= _ROUNDING * torch.linalg.vector_norm(self._seen))

    def _now(self) -> tuple[float, list[int]]:
        precise = torch.promote_types(self._weights.dtype, torch.float32)
        return float(self._weights.sum(dtype=precise)), [parameter._version for parameter in self._parameters]


class AdoptedParameters:
    """The parameters that learners train together, as views into `flat` `[P]`.

    These are the model's parameters that are trainable or in the optimizer when it joins. They may be frozen and
    unfrozen later. At every step, `take_back` detects parameters that were reallocated or replaced, and trained
    parameters that were unknown before. It takes about half a microsecond per parameter.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        like = trainable(model)[0]
        in_optimizer = {id(parameter) for parameter in parameters_of(optimizer)}
        self.names, self.parameters = [], []
        names = {parameter: name for name, parameter in model.named_parameters()}
        for parameter in in_cudnn_order(model):
            may_be_unfrozen = id(parameter) in in_optimizer and _fits(parameter, like)
            if parameter.requires_grad or may_be_unfrozen:
                self.names.append(names[parameter])
                self.parameters.append(parameter)
        self._known = {id(parameter) for parameter in self.parameters}
        self._note_structure()
        self.flat = torch.cat([parameter.detach().reshape(-1) for parameter in self.parameters])
        view_weights(model, self.parameters, self.flat)
        self._views = [parameter.data for parameter in self.parameters]
        self._addresses = [view.data_ptr() for view in self._views]

    names: list[str]
    parameters: list[nn.Parameter]

    def take_back(self, learner: str) -> None:
        """Make reallocated parameters views into `flat` again, with their current values.

        Raises `ProtocolError` if the dtype, shape or device of one has changed, or for a trained parameter that was
        unknown when the model joined.
        """
        if self._structure() != self._noted or any(parameter.requires_grad for parameter in self._others):
            self._check_structure(learner)
            self._note_structure()
        # addresses first: `is_set_to`, which also compares sizes and strides, fails for tensors on two devices
        if [parameter.data_ptr() for parameter in self.parameters] == self._addresses and all(
            map(Tensor.is_set_to, self.parameters, self._views)
        ):
            return
        moved = [number for number in range(len(self.parameters)) if self._has_moved(number)]
        for number, values in [(number, self.parameters[number].data.clone()) for number in moved]:
            parameter, view = self.parameters[number], self._views[number]
            if not _fits(parameter, view) or parameter.shape != view.shape:
                raise ProtocolError(
                    f"{learner}: parameter {self.names[number]} is {_describe(parameter)}, but was {_describe(view)} "
                    "at starling.join; change the model's dtype, device or shapes before starling.join"
                )
            parameter.data = view
            view.copy_(values)

    def release(self) -> None:
        """Copy the flat vector's values to reallocated parameters of any dtype and device."""
        for number, parameter in enumerate(self.parameters):
            if self._has_moved(number) and parameter.shape == self._views[number].shape:
                parameter.data.copy_(self._views[number])

    def _has_moved(self, number: int) -> bool:
        parameter, view = self.parameters[number], self._views[number]
        return not (_fits(parameter, view) and parameter.is_set_to(view))

    def _structure(self) -> list[int]:
        """The `id`s of the model's and the optimizer's modules and parameters; `_alive` keeps these objects alive."""
        inside = [id(each) for contents in self._contents for each in contents.values()]
        return inside + [id(parameter) for group in self._optimizer.param_groups for parameter in group["params"]]

    def _note_structure(self) -> None:
        modules = list(self._model.modules())
        self._contents = [contents for module in modules for contents in (module._parameters, module._modules)]
        self._others = [parameter for parameter in self._model.parameters() if id(parameter) not in self._known]
        self._alive = modules, list(parameters_of(self._optimizer))
        self._noted = self._structure()

    def _check_structure(self, learner: str) -> None:
        named = list(self._model.named_parameters())
        unknown = [name for name, parameter in named if parameter.requires_grad and id(parameter) not in self._known]
        names = {id(parameter): name for name, parameter in named}
        for parameter in parameters_of(self._optimizer):
            name = names.get(id(parameter), f"of shape {list(parameter.shape)} in the optimizer")
            if parameter.requires_grad and id(parameter) not in self._known and name not in unknown:
                unknown.append(name)
        if unknown:
            shown = ", ".join(unknown[:5]) + (f" and {len(unknown) - 5} more" if len(unknown) > 5 else "")
            raise ProtocolError(
                f"{learner}: parameter {shown} is trained but was unknown when the model joined, so its changes would "
                f"not reach other learners; {_SAME_PARAMETERS}"
            )


def _fits(tensor: Tensor, like: Tensor) -> bool:
    return tensor.dtype == like.dtype and tensor.device == like.device


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
