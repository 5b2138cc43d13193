"""A model and an optimizer that belong to somebody's own training loop, as a learner's replica."""

import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from starling.engines.loop.adopted import AdoptedParameters
from starling.engines.loop.gradients import are_finite, flatten, unflatten
from starling.engines.processes.communication import communicating
from starling.engines.processes.peers import ProcessHandle
from starling.errors import ConfigError
from starling.learner import Handle
from starling.training.flat import split, trainable
from starling.training.replica import Replica


class OwnGradient(Tensor):
    """A loop's gradient `[P]`. It is copied together from the parameters' `grad` when something first looks at it: a
    learner that only steps with it never pays for the copy."""

    fill: Callable[[Tensor], None]
    is_filled: bool

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is Tensor.copy_ and isinstance(args[1], OwnGradient) and not args[1].is_filled:
                args[1].fill(args[0])  # straight from the parameters
                return args[0]
            for each in _gradients_in((args, kwargs)):
                if not each.is_filled:
                    each.is_filled = True
                    each.fill(each)
            return func(*args, **(kwargs or {}))


def _gradients_in(arguments: object) -> Generator[OwnGradient, None, None]:
    if isinstance(arguments, OwnGradient):
        yield arguments
    elif isinstance(arguments, list | tuple):
        for each in arguments:
            yield from _gradients_in(each)
    elif isinstance(arguments, Mapping):
        yield from _gradients_in(list(arguments.values()))


class LoopGradient(ProcessHandle[Tensor]):
    """The gradient that the loop computes next; who awaits it waits for the loop."""

    def __init__(self, gradient: OwnGradient) -> None:
        super().__init__(lambda: gradient)
        self.is_supplied = False


class MeanOfGradient(ProcessHandle[Tensor]):
    """The mean of a gradient that the loop computes next."""

    def __init__(self, gradient: LoopGradient, mean: Callable[[Tensor], Handle[Tensor]]) -> None:
        super().__init__(lambda: mean(gradient.result()).result())
        self.gradient = gradient


def check_loop(model: nn.Module, optimizer: Optimizer) -> None:
    """`ConfigError` for a model and an optimizer that cannot be trained together with others."""
    if isinstance(model, DistributedDataParallel):
        raise ConfigError("model: it averages gradients by itself (DistributedDataParallel); give its `.module`")
    parameters = trainable(model)
    if len(devices := {str(parameter.device) for parameter in parameters}) > 1:
        raise ConfigError(f"model: its parameters must be on one device, found {', '.join(sorted(devices))}")
    own = {id(parameter) for parameter in model.parameters()}
    known = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if strange := [parameter for parameter in known if id(parameter) not in own]:
        raise ConfigError(
            f"optimizer: {len(strange)} of its {len(known)} parameters are not the model's, the first has shape "
            f"{list(strange[0].shape)}; make it from `model.parameters()`, and join all that it trains as one "
            "`nn.ModuleList`"
        )
    if not {id(parameter) for parameter in known} & {id(parameter) for parameter in parameters}:
        raise ConfigError("optimizer: it has none of the model's trainable parameters")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"optimizer: {type(optimizer).__name__} needs a closure, with which it computes several gradients in one "
            "step, and learners agree on one gradient per step; use an optimizer without a closure, such as SGD or "
            "AdamW"
        )


class LoopReplica(Replica):
    """The weights that a loop computes at, `loop` `[P]`, into which the model's parameters are views; and this
    learner's own, `weights` `[P]`.

    They are one vector where all learners step together. Otherwise others change `weights` while the loop computes,
    and `loop` holds what they were when the gradient began: right after the step before.

    The parameters are contiguous. A loop that gives them another memory format (`channels_last`) after joining trains
    on with the same values, but finds them contiguous after its next step.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, is_shared: bool) -> None:
        self._adopted = AdoptedParameters(model, optimizer)
        parameters = self._adopted.parameters
        self.model = model
        self.loop = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
        self._adopted.view(self.loop)
        self.is_stepping = False
        """Whether it is this replica that calls the optimizer's `step`."""
        self.was_finite = True
        """Whether the gradient of the newest step was, so that there was an optimizer step."""
        self._is_shared = is_shared
        weights = self.loop if is_shared else self.loop.clone()
        super().__init__(weights, torch.empty(0), parameters, lambda _: optimizer, clip_norm=None)
        optimizer._opt_called = True  # type: ignore[attr-defined]  # a server may step in its place: no schedule warns
        self.loop_version = 0
        self._own_gradient = torch.empty_like(self.loop).as_subclass(OwnGradient)
        self._own_gradient.fill = partial(flatten, parameters)
        self._aside: tuple[Tensor, list[Tensor]] | None = None  # the loop's weights and buffers, when others are shown

    def step(self, gradient: Tensor, learning_rate_factor: float) -> bool:
        """Let the loop's optimizer change the weights by `gradient` `[P]`, at the learning rates it has itself.

        Whether that was done: a gradient that is not finite changes nothing.
        """
        is_own = gradient is self._own_gradient
        self.was_finite = are_finite(self._gradients_of_optimizer() if is_own else [gradient])
        if not self.was_finite:
            if not self._is_shared:
                self.refresh_loop()
            return False
        with self._lock:
            if not is_own:
                unflatten(gradient, self._parameters)
            if not self._is_shared:
                self.loop.copy_(self.weights)
            self._step_optimizer()
            if not self._is_shared:
                self.weights.copy_(self.loop)
            self.version += 1
            self.loop_version = self.version
            return True

    def _gradients_of_optimizer(self) -> list[Tensor]:
        gradients = [parameter.grad for group in self.optimizer.param_groups for parameter in group["params"]]
        return [gradient for gradient in gradients if gradient is not None]

    def _step_optimizer(self) -> None:
        self.is_stepping = True
        try:
            self.optimizer.step()
        finally:
            self.is_stepping = False

    def check_model(self, who: str) -> None:
        """Make the model's parameters views into the loop's weights again where the loop has given them other memory,
        with the values that they have there. Raises `ProtocolError` as `AdoptedParameters` does."""
        moved = self._adopted.check(who)
        if not moved:
            return
        views = list(split(self.loop, self._parameters))
        own = list(split(self.weights, self._parameters))
        with self._lock:
            for number, values in moved:
                self._adopted.take_back(number, who)
                if not self._is_shared:  # in delta form: what the background has done meanwhile stays
                    own[number].add_(values - views[number])
                views[number].copy_(values)

    @property
    def has_gradients(self) -> bool:
        """Whether a backward of the loop has left a gradient."""
        return any(parameter.grad is not None for parameter in self._parameters)

    def finish(self) -> None:
        """Let the model hold this learner's weights, whatever memory the loop has given its parameters."""
        self.refresh_loop()
        self._adopted.release()

    def adopt(self, consensus: Tensor) -> None:
        """Take over a consensus `[P + B]` for good."""
        with self._lock:
            self._hold(consensus)
            if not self._is_shared:
                self.weights.copy_(self.loop)
            self.version += 1
            self.loop_version = self.version

    def optimizer_of_piece(self, parameters: dict[int, nn.Parameter]) -> Optimizer:
        """An optimizer of the kind that the loop has, with its groups and their options."""
        places = {id(parameter): number for number, parameter in enumerate(self._parameters)}
        groups = []
        for group in self.optimizer.param_groups:
            numbers = [places[id(parameter)] for parameter in group["params"] if id(parameter) in places]
            groups.append(group | {"params": [parameters[number] for number in numbers if number in parameters]})
        kind = type(self.optimizer)
        known = inspect.signature(kind).parameters  # AdamW's defaults contain one that only its base class accepts
        defaults = {name: value for name, value in self.optimizer.defaults.items() if name in known}
        try:
            return kind(groups, **defaults)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"optimizer: a server cannot make another {kind.__name__} with the options of yours "
                f"({error}); use one of torch.optim"
            ) from error

    @property
    def is_showing(self) -> bool:
        """Whether the model holds a consensus instead of this learner's own weights."""
        return self._aside is not None

    def own_gradient(self) -> OwnGradient:
        """The gradient that the loop computes next; valid until this is called again."""
        self._own_gradient.is_filled = False
        return self._own_gradient

    def refresh_loop(self, at: Tensor | None = None) -> None:
        """Let the loop compute at the weights as they are now, or at others `[P]`."""
        with self._lock:
            self.loop.copy_(self.weights if at is None else at)
            self.loop_version = self.version

    def pieces(self, largest: int, optimizer_state: bool) -> Sequence[slice]:
        if not optimizer_state or self._memory is not None:
            return super().pieces(largest, optimizer_state)
        gradients = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:  # an optimizer remembers nothing about one that has no gradient
            parameter.grad = torch.zeros_like(parameter)
        try:
            return super().pieces(largest, optimizer_state)
        except KeyError as error:
            raise ConfigError(
                "strategy.optimizer_state: the optimizer does not remember the same about all trainable parameters; "
                "choose local"
            ) from error
        finally:
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = gradient

    def start_from_first(self) -> None:
        """Take over all that learner 0's model holds, frozen parameters and buffers included."""
        tensors = [tensor.detach() for tensor in (*self.model.parameters(), *self.model.buffers())]
        sizes = [tensor.nbytes for tensor in tensors]
        contents = torch.cat([tensor.reshape(-1).contiguous().view(torch.uint8).cpu() for tensor in tensors])
        with communicating():
            dist.broadcast(contents, src=0)
        for tensor, content in zip(tensors, torch.split(contents, sizes), strict=True):
            tensor.copy_(content.clone().view(tensor.dtype).view(tensor.shape))
        self.refresh_weights()

    def refresh_weights(self) -> None:
        """Take the loop's weights for this learner's own."""
        with self._lock:
            self.weights.copy_(self.loop)

    def contribution(self) -> Tensor:
        """What this learner brings to the consensus: its weights and the model's floating-point buffers `[P + B]`, in
        float32 or better; its own also while it is shown a consensus."""
        with self._lock:
            loop, buffers = self._aside or (self.loop, self._floating_buffers())
            parts = [loop if self._is_shared else self.weights, *buffers]
            dtype = reduce(torch.promote_types, (part.dtype for part in parts), torch.float32)
            return torch.cat([part.detach().reshape(-1).to(dtype) for part in parts])

    @contextmanager
    def showing(self, consensus: Tensor) -> Generator[None, None, None]:
        """Let the model hold a consensus `[P + B]` while the context lasts, and then exactly what it held before."""
        every = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        with self._lock:
            self._aside = self.loop.clone(), [buffer.clone() for buffer in self._floating_buffers()]
            self._hold(consensus)
        try:
            yield
        finally:
            with self._lock:
                self.loop.copy_(self._aside[0])
                for buffer, own in every:
                    buffer.copy_(own)
                self._aside = None

    def _hold(self, consensus: Tensor) -> None:
        """Copy a consensus `[P + B]` into the loop's weights and the model's buffers; the lock is taken."""
        own = (self.loop, *self._floating_buffers())
        for tensor, agreed in zip(own, split(consensus, own), strict=True):
            tensor.copy_(agreed)

    def _floating_buffers(self) -> list[Tensor]:
        return [buffer for buffer in self.model.buffers() if buffer.is_floating_point()]
