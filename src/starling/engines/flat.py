"""A model whose parameters live in one flat vector, and its gradients in another."""

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from starling.errors import ConfigError


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that training changes, in the order of `model.parameters()`; all of one dtype."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
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


class FlatModel:
    """A model on `device` whose trainable parameters are views into `weights` `[P]` and whose gradients are views into
    `gradients` `[P]`. Two models may share one vector of gradients."""

    def __init__(self, model: nn.Module, device: torch.device, gradients: Tensor | None = None) -> None:
        self.model = model.to(device)
        self.parameters = trainable(self.model)
        self.look_at(torch.cat([parameter.detach().reshape(-1) for parameter in self.parameters]))
        self.gather_in(torch.zeros_like(self.weights) if gradients is None else gradients)

    def twin(self) -> "FlatModel":
        """A model for other weights, with the same buffers and the same vector of gradients."""
        shared: dict[int, object] = {id(buffer): buffer for buffer in self.model.buffers()}
        return FlatModel(copy.deepcopy(self.model, shared), self.weights.device, gradients=self.gradients)

    def look_at(self, weights: Tensor) -> None:
        """Make the parameters views into `weights` `[P]`; nothing is copied."""
        self.weights = weights
        for parameter, view in zip(self.parameters, split(weights, self.parameters), strict=True):
            parameter.data = view

    def gather_in(self, gradients: Tensor) -> None:
        """Let gradients gather in `gradients` `[P]`; nothing is copied."""
        self.gradients = gradients
        for parameter, view in zip(self.parameters, split(gradients, self.parameters), strict=True):
            parameter.grad = view

    @property
    def num_parameters(self) -> int:
        return self.weights.numel()

    def load_buffers(self, buffers: dict[str, Tensor]) -> None:
        """Set the model's buffers by name."""
        own = dict(self.model.named_buffers())
        for name, buffer in buffers.items():
            own[name].copy_(buffer)
