"""The parameters of somebody's own model, as views into one flat vector, whatever the loop does to the model."""

from collections.abc import Iterator

from torch import Tensor, nn
from torch.optim import Optimizer

from starling.errors import ProtocolError
from starling.training.flat import in_cudnn_order, trainable, view_weights

_SAME_PARAMETERS = (
    "all parameters that are ever trained must be the model's, and trainable or in the optimizer, at starling.join; "
    "freeze them after it, with requires_grad_(False), until they are to be trained"
)


class AdoptedParameters:
    """The parameters that learners train together, as views into `flat` `[P]`.

    They are those of the model that are trainable or in the optimizer when it joins. Each may be frozen and unfrozen
    later. `check`, at every step, notices a parameter that has been given other memory, one that is trained now and
    was not known, and one that was replaced. It takes about half a microsecond per parameter.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        like = trainable(model)[0]
        in_optimizer = {id(parameter) for parameter in _parameters_of(optimizer)}
        self.names, self.parameters = [], []
        names = {parameter: name for name, parameter in model.named_parameters()}
        for parameter in in_cudnn_order(model):
            may_be_unfrozen = id(parameter) in in_optimizer and _fits(parameter, like)
            if parameter.requires_grad or may_be_unfrozen:
                self.names.append(names[parameter])
                self.parameters.append(parameter)
        self._known = {id(parameter) for parameter in self.parameters}
        self._note_structure()

    names: list[str]
    parameters: list[nn.Parameter]

    def view(self, flat: Tensor) -> None:
        """Make the parameters views into `flat` `[P]`."""
        view_weights(self._model, self.parameters, flat)
        self._views = [parameter.data for parameter in self.parameters]
        self._addresses = [view.data_ptr() for view in self._views]

    def check(self, who: str) -> list[tuple[int, Tensor]]:
        """The parameters that have been given other memory, by number, with a copy of what they hold now.

        `ProtocolError` for a parameter that is trained now and was not known when the model joined.
        """
        if self._structure() != self._noted or any(parameter.requires_grad for parameter in self._others):
            self._check_structure(who)
            self._note_structure()
        # addresses first: `is_set_to`, which also compares sizes and strides, refuses tensors of two devices
        if [parameter.data_ptr() for parameter in self.parameters] == self._addresses and all(
            map(Tensor.is_set_to, self.parameters, self._views)
        ):
            return []
        moved = [number for number in range(len(self.parameters)) if self._has_moved(number)]
        return [(number, self.parameters[number].data.clone()) for number in moved]

    def take_back(self, number: int, who: str) -> None:
        """Make a parameter that has been given other memory a view into the flat vector again; values are lost.

        `ProtocolError` if it has another dtype, shape or device now.
        """
        parameter, view = self.parameters[number], self._views[number]
        if not _fits(parameter, view) or parameter.shape != view.shape:
            raise ProtocolError(
                f"{who}: parameter {self.names[number]} was {_describe(view)} at starling.join and is "
                f"{_describe(parameter)} now; change the model's dtype, device or shapes before starling.join"
            )
        parameter.data = view

    def release(self) -> None:
        """Give those that have other memory now, of whatever dtype or device, the values of the flat vector."""
        for number, parameter in enumerate(self.parameters):
            if self._has_moved(number) and parameter.shape == self._views[number].shape:
                parameter.data.copy_(self._views[number])

    def _has_moved(self, number: int) -> bool:
        parameter, view = self.parameters[number], self._views[number]
        return not (_fits(parameter, view) and parameter.is_set_to(view))

    def _structure(self) -> list[int]:
        """What the model and the optimizer consist of: objects by `id`, which are kept alive by `_alive`."""
        inside = [id(each) for contents in self._contents for each in contents.values()]
        return inside + [id(parameter) for parameter in _parameters_of(self._optimizer)]

    def _note_structure(self) -> None:
        modules = list(self._model.modules())
        self._contents = [contents for module in modules for contents in (module._parameters, module._modules)]
        self._others = [parameter for parameter in self._model.parameters() if id(parameter) not in self._known]
        self._alive = modules, list(_parameters_of(self._optimizer))
        self._noted = self._structure()

    def _check_structure(self, who: str) -> None:
        named = list(self._model.named_parameters())
        strange = [name for name, parameter in named if parameter.requires_grad and id(parameter) not in self._known]
        names = {id(parameter): name for name, parameter in named}
        for parameter in _parameters_of(self._optimizer):
            name = names.get(id(parameter), f"of shape {list(parameter.shape)} in the optimizer")
            if parameter.requires_grad and id(parameter) not in self._known and name not in strange:
                strange.append(name)
        if strange:
            shown = ", ".join(strange[:5]) + (f" and {len(strange) - 5} more" if len(strange) > 5 else "")
            raise ProtocolError(
                f"{who}: parameter {shown} is trained now but was unknown when the model joined, so no other learner "
                f"would see it; {_SAME_PARAMETERS}"
            )


def _parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _fits(tensor: Tensor, like: Tensor) -> bool:
    return tensor.dtype == like.dtype and tensor.device == like.device


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
