"""A model whose parameters live in one flat vector, and its gradients in another."""

import copy
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from starling.errors import ConfigError

CUDNN_ALIGNMENT = 256
"""Bytes; every buffer that CUDA allocates, and so every one that cuDNN is used to, begins at a multiple of it."""


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that training changes, all of one dtype.

    They come in the order of `model.parameters()`, except that all matrices of a recurrent module come before all its
    biases: that is how cuDNN keeps them.
    """
    parameters = [parameter for parameter in in_cudnn_order(model) if parameter.requires_grad]
    dtypes = {str(parameter.dtype) for parameter in parameters}
    if len(dtypes) != 1:
        found = ", ".join(sorted(dtypes)) or "none"
        raise ConfigError(f"model: its trainable parameters must share one dtype, found {found}")
    return parameters


def split(flat: Tensor, like: Sequence[Tensor]) -> Iterator[Tensor]:
    """Views into `flat` `[P]` with the shapes of `like`, one after the other."""
    start = 0
    for tensor in like:
        yield flat[start : start + tensor.numel()].view(tensor.shape)
        start += tensor.numel()


NO_GRADIENT = -0.0
"""Fills the part of a gradient `[P]` that belongs to a parameter which got none. Added to a number it leaves it as it
is, so that the mean over learners is right where only some used a parameter, and a mean of nothing but this is this.
What backward computes never is this throughout: it is gathered on 0.0, and 0.0 + -0.0 is 0.0."""


def is_no_gradient(part: Tensor) -> bool:
    """Whether a part of a gradient says that its parameter got none."""
    if part.numel() == 0:
        return False
    first = float(part.reshape(-1)[0])
    return first == 0.0 and math.copysign(1.0, first) < 0.0 and bool(torch.signbit(part).all()) and not part.any()


def view_weights(model: nn.Module, parameters: Sequence[nn.Parameter], weights: Tensor) -> None:
    """Make the `trainable` parameters of a model views into `weights` `[P]`; nothing is copied."""
    for parameter, view in zip(parameters, split(weights, parameters), strict=True):
        parameter.data = view
    if weights.is_cuda:
        show_to_cudnn(model, weights)


def show_to_cudnn(model: nn.Module, weights: Tensor) -> None:
    """Let cuDNN use the recurrent modules' weights where they are in `weights` `[P]`.

    It takes the parameters of a module without packing them at each call only if their storage, as torch counts it,
    begins with the first of them: so each module gets a storage of its own over its part of the same memory. Where a
    part does not begin at `CUDNN_ALIGNMENT`, or has no biases or a projection, cuDNN packs at each call, and torch
    warns of it. `flatten_parameters` does nothing any more: it would move the parameters out of `weights`.
    """
    size, start_of_all = weights.element_size(), weights.data_ptr()
    for module in model.modules():
        parts = list(in_cudnn_order(module)) if isinstance(module, nn.RNNBase) else []
        if not any(part.requires_grad for part in parts):
            continue
        module.__dict__["flatten_parameters"] = _stay
        addresses = [part.data_ptr() for part in parts]
        ends = [part.data_ptr() + part.numel() * size for part in parts]
        is_fitting = addresses[0] % CUDNN_ALIGNMENT == 0 and addresses[1:] == ends[:-1]
        if not is_fitting or not module.bias or module.proj_size:  # a frozen one among them does not fit
            continue
        own = from_dlpack(weights[(addresses[0] - start_of_all) // size : (ends[-1] - start_of_all) // size])
        for part, view in zip(parts, split(own, parts), strict=True):
            part.data = view


def in_cudnn_order(model: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of a model, each once; of a recurrent module all matrices before all biases."""
    seen: set[nn.Parameter] = set()
    for module in model.modules():
        own = list(module.named_parameters(recurse=False))
        if isinstance(module, nn.RNNBase):
            own.sort(key=lambda named: named[0].startswith("bias"))
        for _, parameter in own:
            if parameter not in seen:
                seen.add(parameter)
                yield parameter


def _stay() -> None:
    """In the place of a recurrent module's `flatten_parameters`: its parameters stay where they are."""


class FlatModel:
    """A model on `device` whose trainable parameters are views into `weights` `[P]` and whose gradients are views into
    `gradients` `[P]`. Two models may share one vector of gradients."""

    def __init__(self, model: nn.Module, device: torch.device, gradients: Tensor | None = None) -> None:
        self.model = model.to(device)
        self.parameters = trainable(self.model)
        self.look_at(torch.cat([parameter.detach().reshape(-1) for parameter in self.parameters]))
        self.gather_in(torch.zeros_like(self.weights) if gradients is None else gradients)
        self._reached: list[Tensor] = []  # the parameters that gradients were added to
        self._numbers = {id(parameter): number for number, parameter in enumerate(self.parameters)}
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self._reached.append)  # type: ignore[no-untyped-call]
        self._buffer_places = [(module, name) for module in self.model.modules() for name in module._buffers]

    def twin(self) -> "FlatModel":
        """A model for other weights, with the same buffers and the same vector of gradients."""
        shared: dict[int, object] = {id(buffer): buffer for buffer in self.model.buffers()}
        return FlatModel(copy.deepcopy(self.model, shared), self.weights.device, gradients=self.gradients)

    def look_at(self, weights: Tensor) -> None:
        """Make the parameters views into `weights` `[P]`; nothing is copied."""
        self.weights = weights
        view_weights(self.model, self.parameters, weights)

    def gather_in(self, gradients: Tensor) -> None:
        """Let gradients gather in `gradients` `[P]`; nothing is copied."""
        self.gradients = gradients
        self.gradients_of = list(split(gradients, self.parameters))
        for parameter, view in zip(self.parameters, self.gradients_of, strict=True):
            parameter.grad = view

    def reached(self) -> set[int]:
        """The numbers of the parameters that got a gradient since this was asked last."""
        found = {self._numbers[id(parameter)] for parameter in self._reached}
        self._reached.clear()
        return found

    def own_buffers(self) -> list[Tensor | None]:
        """The model's buffers, in the order of its modules: not copies."""
        return [module._buffers[name] for module, name in self._buffer_places]

    def look_at_buffers(self, buffers: Sequence[Tensor | None]) -> None:
        """Put others in the place of `own_buffers()`; nothing is copied."""
        for (module, name), buffer in zip(self._buffer_places, buffers, strict=True):
            module._buffers[name] = buffer

    @property
    def num_parameters(self) -> int:
        return self.weights.numel()

    def load_buffers(self, buffers: dict[str, Tensor]) -> None:
        """Set the model's buffers by name."""
        own = dict(self.model.named_buffers())
        for name, buffer in buffers.items():
            own[name].copy_(buffer)
