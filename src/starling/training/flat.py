"""A model with its parameters in one flat vector and its gradients in another."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from starling.checkpoint.files import MODEL, read_tensors, write_tensors
from starling.errors import ConfigError
from starling.training.freezing import Freeze

WEIGHTS = "model.safetensors"
"""Name of the file with a model's state, for jobs whose model needs nothing else."""

CUDNN_ALIGNMENT = 256
"""Alignment in bytes. Every CUDA allocation begins at a multiple of this number, so cuDNN may rely on the alignment."""


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that training changes, in the order of `in_cudnn_order`.

    Raises:
        ConfigError: The parameters do not all have the same dtype, or there are none.
    """
    parameters = [parameter for parameter in in_cudnn_order(model) if parameter.requires_grad]
    dtypes = {str(parameter.dtype) for parameter in parameters}
    if len(dtypes) != 1:
        found = ", ".join(sorted(dtypes)) or "none"
        raise ConfigError(f"model: its trainable parameters must share one dtype, found {found}")
    return parameters


def split(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return consecutive views into `flat` `[P]` with the shapes of `like`."""
    stops = accumulate(tensor.numel() for tensor in like)
    return [flat[stop - tensor.numel() : stop].view(tensor.shape) for tensor, stop in zip(like, stops, strict=True)]


NO_GRADIENT = -0.0
"""Value of the part of a gradient `[P]` that belongs to a parameter without a gradient. Because x + -0.0 is x, a mean
over learners is right if only some of them used the parameter, and is -0.0 only if none did. A gradient from backward
never consists only of -0.0, because it is accumulated onto 0.0, and 0.0 + -0.0 is 0.0."""


def split_gradient(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor | None]:
    """Return consecutive views into a gradient `[P]`, as `split` does, with None for each parameter that is marked as
    having no gradient."""
    parts = split(flat, like)
    if not parts:  # for example in a timing-only simulation
        return []
    starts = torch.tensor([0, *accumulate(part.numel() for part in parts[:-1])], device=flat.device)
    first = flat[starts.clamp_(max=len(flat) - 1)]
    may_be = _is_negative_zero(first).tolist()  # by the first number of each part, so few parts are read completely
    return [
        None if mark and part.numel() and bool(_is_negative_zero(part).all()) else part
        for part, mark in zip(parts, may_be, strict=True)
    ]


def _is_negative_zero(numbers: Tensor) -> Tensor:
    return (numbers == 0.0) & torch.signbit(numbers)


def view_weights(model: nn.Module, parameters: Sequence[nn.Parameter], weights: Tensor) -> None:
    """Make the `trainable` parameters of a model views into `weights` `[P]`. Nothing is copied."""
    for parameter, view in zip(parameters, split(weights, parameters), strict=True):
        parameter.data = view
    if weights.is_cuda:
        avoid_cudnn_packing(model, weights)


def avoid_cudnn_packing(model: nn.Module, weights: Tensor) -> None:
    """Let cuDNN use recurrent modules' weights in place, in `weights` `[P]`, instead of packing them at each call.

    cuDNN uses a module's weights in place only if they are contiguous and their torch storage begins with the first
    weight. Therefore each module's part of `weights` is wrapped in a separate storage. A module is packed at each call,
    with a warning from torch, if its part is not aligned to `CUDNN_ALIGNMENT`, if some of its parameters are frozen, if
    it has no biases, or if it has a projection. `flatten_parameters` is disabled, because it would move the parameters
    out of `weights`.
    """
    size, start_of_all = weights.element_size(), weights.data_ptr()
    for module in model.modules():
        parts = list(in_cudnn_order(module)) if isinstance(module, nn.RNNBase) else []
        if not any(part.requires_grad for part in parts):
            continue
        module.__dict__["flatten_parameters"] = _do_nothing
        addresses = [part.data_ptr() for part in parts]
        ends = [part.data_ptr() + part.numel() * size for part in parts]
        is_fitting = addresses[0] % CUDNN_ALIGNMENT == 0 and addresses[1:] == ends[:-1]
        if not is_fitting or not module.bias or module.proj_size:  # not contiguous if some parameters are frozen
            continue
        own = from_dlpack(weights[(addresses[0] - start_of_all) // size : (ends[-1] - start_of_all) // size])
        for part, view in zip(parts, split(own, parts), strict=True):
            part.data = view


class Model(ABC):
    """The model with which a gradient is computed. It is a `FlatModel`, or one rank's part of a model that is cut into
    shards.

    The `parameters`, which the optimizer updates, are views into `weights` `[P]`. Their gradients `gradients_of` are
    views into `gradients` `[P]`.
    """

    def __init__(self, model: nn.Module, parameters: list[nn.Parameter], weights: Tensor, gradients: Tensor) -> None:
        self.model, self.parameters, self.weights = model, parameters, weights
        self.use_gradients(gradients)
        self._reached: list[Tensor] = []  # parameters that received a gradient since `reached()` was last called
        self._numbers: dict[int, int] = {}  # numbers of the module's parameters, by their `id`

    @abstractmethod
    def use_weights(self, weights: Tensor) -> None:
        """Compute with `weights` `[P]`. Nothing is copied."""

    def use_gradients(self, gradients: Tensor) -> None:
        """Make each parameter's `grad` a view into `gradients` `[P]`. Nothing is copied."""
        self.gradients = gradients
        self.gradients_of = split(gradients, self.parameters)
        for parameter, view in zip(self.parameters, self.gradients_of, strict=True):
            parameter.grad = view

    def reached(self) -> set[int]:
        """Return the numbers of the parameters that received a gradient since the last call."""
        found = {self._numbers[id(parameter)] for parameter in self._reached}
        self._reached.clear()
        return found

    def notice(self, number: int, parameter: Tensor) -> None:
        """Record from now on whenever the parameter with this number receives a gradient."""
        self._numbers[id(parameter)] = number
        parameter.register_post_accumulate_grad_hook(self._reached.append)  # type: ignore[no-untyped-call]

    def numbers_of(self, frozen: tuple[Freeze, ...]) -> frozenset[int]:
        """Return the numbers of the frozen parameters. A model that is cut into shards has none."""
        return frozenset()

    def begin(self, num_parts: int) -> int:
        """Begin a gradient of `num_parts` micro-batches, so that no parameter is `reached` yet. Return the number of
        forward and backward passes; if it exceeds `num_parts`, the last pass is repeated with a weight of 0."""
        self._reached.clear()
        return num_parts


def load_buffers(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Set a model's buffers by name."""
    own = dict(model.named_buffers())
    for name, buffer in buffers.items():
        own[name].copy_(buffer)


def in_cudnn_order(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield each parameter of a model once, in the order of `model.parameters()`, except that in recurrent modules all
    matrices come before all biases, which is the order in which cuDNN stores them."""
    seen: set[nn.Parameter] = set()
    for module in model.modules():
        own = list(module.named_parameters(recurse=False))
        if isinstance(module, nn.RNNBase):
            own.sort(key=lambda named: named[0].startswith("bias"))
        for _, parameter in own:
            if parameter not in seen:
                seen.add(parameter)
                yield parameter


def _do_nothing() -> None:
    """Do nothing. This function replaces `flatten_parameters` of recurrent modules."""


class FlatModel(Model):
    """A model on `device` whose trainable parameters are views into `weights` `[P]` and whose gradients are views into
    `gradients` `[P]`."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        parameters = trainable(model.to(device))
        weights = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
        view_weights(model, parameters, weights)
        super().__init__(model, parameters, weights, torch.zeros_like(weights))
        for number, parameter in enumerate(parameters):
            self.notice(number, parameter)
        self._frozen_numbers: dict[tuple[Freeze, ...], frozenset[int]] = {(): frozenset()}
        self._buffer_places = [(module, name) for module in self.model.modules() for name in module._buffers]

    def use_weights(self, weights: Tensor) -> None:
        self.weights = weights
        view_weights(self.model, self.parameters, weights)

    def numbers_of(self, frozen: tuple[Freeze, ...]) -> frozenset[int]:
        """Return the numbers of the parameters that are frozen.

        Raises:
            ConfigError: All parameters are frozen.
        """
        if frozen not in self._frozen_numbers:
            names = {id(parameter): name for name, parameter in self.model.named_parameters()}
            self._frozen_numbers[frozen] = frozenset(
                number
                for number, parameter in enumerate(self.parameters)
                if any(each.holds(names[id(parameter)]) for each in frozen)
            )
            if len(self._frozen_numbers[frozen]) == len(self.parameters):
                raise ConfigError("freeze: it leaves no parameter to train; leave some out")
        return self._frozen_numbers[frozen]

    def own_buffers(self) -> list[Tensor | None]:
        """Return the model's buffers themselves, without copying them, in the order of its modules."""
        return [module._buffers[name] for module, name in self._buffer_places]

    def use_buffers(self, buffers: Sequence[Tensor | None]) -> None:
        """Replace the model's buffers, in the order of `own_buffers()`. Nothing is copied."""
        for (module, name), buffer in zip(self._buffer_places, buffers, strict=True):
            module._buffers[name] = buffer


def write_weights(model: nn.Module, folder: Path, weights: Tensor, buffers: dict[str, Tensor]) -> None:
    """Write a model's state, with the given weights `[P]` and buffers, as `model.safetensors`."""
    fill(model, weights, buffers)
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / WEIGHTS, model.state_dict())


def load_weights(model: nn.Module, checkpoint: Path) -> nn.Module:
    """Return `model` in evaluation mode, with the weights of a checkpoint that `write_weights` wrote."""
    model.load_state_dict(read_tensors(checkpoint / MODEL / WEIGHTS))
    return model.eval()


def fill(model: nn.Module, weights: Tensor, buffers: Mapping[str, Tensor]) -> None:
    """Copy flat weights `[P]` and buffers into a model."""
    parameters = trainable(model)
    with torch.no_grad():
        for parameter, values in zip(parameters, split(weights, parameters), strict=True):
            parameter.copy_(values)
        load_buffers(model, buffers)
