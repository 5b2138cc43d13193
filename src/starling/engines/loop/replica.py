"""A user's own model and optimizer as a learner's replica. It detects changes that the user's loop makes to them."""

import math
from collections.abc import Callable, Container, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from starling.checkpoint.state import OWN_PREFIX, LearnerState, beyond_membership, encode_state
from starling.checkpoint.state import own as copied
from starling.engines.loop.optimizers import OptimizerList, members_of, optimizer_like, parameters_of
from starling.engines.loop.outside import AdoptedParameters, OutsideChanges
from starling.engines.loop.progress import Consensus
from starling.engines.processes.backend import communicating
from starling.errors import CheckpointError, ConfigError, ProtocolError
from starling.learner import Handle
from starling.training.flat import split
from starling.training.replica import Replica
from starling.workload import Position

_BUFFER, _FROZEN, _FINAL, _DISTANCE = "buffer ", "frozen ", "final", "distance"
"""Names, or beginnings of names, of the tensors beside the weights that one learner copies from another."""
_SMALL = 10_000
"""Up to this number of elements, copying takes less time than calling a torch function."""


def flatten(parameters: Sequence[nn.Parameter], sparse: set[int], flat: Tensor) -> None:
    """Copy the parameters' gradients into `flat` `[P]`; `unflatten` is the inverse. Adds the numbers of those whose
    gradients are sparse to `sparse`.

    A parameter without a gradient is filled with -0.0; gradients contain no -0.0, because 0.0 is added to them. A mean
    is -0.0 only where all learners have -0.0, so it also shows which parameters had no gradient on any learner.
    """
    for number, (parameter, part) in enumerate(zip(parameters, split(flat, parameters), strict=True)):
        gradient = parameter.grad
        if gradient is None:
            part.fill_(-0.0)
        elif gradient.is_sparse:
            sparse.add(number)
            torch.add(gradient.detach().to_dense(), 0.0, out=part)
        else:
            torch.add(gradient.detach(), 0.0, out=part)


def unflatten(flat: Tensor, parameters: Sequence[nn.Parameter], sparse: Container[int]) -> None:
    """Make the parameters' gradients views into `flat` `[P]`, or None if no learner had one. Those of `sparse` have the
    rows that are not 0."""
    sizes = torch.tensor([0, *(parameter.numel() for parameter in parameters[:-1])], device=flat.device)
    first = flat[sizes.cumsum(0).clamp_(max=len(flat) - 1)]
    may_be_unused = _is_negative_zero(first).tolist()  # from the first number of each part: few are read completely
    parts = zip(parameters, split(flat, parameters), may_be_unused, strict=True)
    for number, (parameter, part, suspect) in enumerate(parts):
        is_unused = suspect and bool(_is_negative_zero(part).all())
        parameter.grad = None if is_unused else part.to_sparse(1) if number in sparse else part


def _with_sparse_gradients(model: nn.Module, parameters: Sequence[nn.Parameter]) -> set[int]:
    """The numbers of the parameters whose gradients are sparse from the start."""
    modules = [each for each in model.modules() if getattr(each, "sparse", False) is True]
    found = {id(parameter) for module in modules for parameter in module.parameters(recurse=False)}
    return {number for number, parameter in enumerate(parameters) if id(parameter) in found}


def _is_negative_zero(numbers: Tensor) -> Tensor:
    return (numbers == 0.0) & torch.signbit(numbers)


def are_finite(gradients: Sequence[Tensor]) -> bool:
    """Whether all numbers of the gradients are finite."""
    dense = [gradient._values() if gradient.is_sparse else gradient for gradient in gradients]
    if not dense:
        return True
    precise = torch.promote_types(dense[0].dtype, torch.float32)  # a sum in float16 would overflow
    if dense[0].device.type != "cpu":  # one kernel for many
        return math.isfinite(float(torch.stack(list(torch._foreach_norm(dense, 2, precise))).sum()))
    # a sum is NaN or infinite if one of its numbers is, and takes half the time of a norm
    vectors = [gradient.reshape(-1) for gradient in dense if gradient.numel() > _SMALL]
    if small := [gradient.reshape(-1) for gradient in dense if gradient.numel() <= _SMALL]:
        vectors.append(torch.cat(small))
    return all(math.isfinite(float(vector.sum(dtype=precise))) for vector in vectors)


class OwnGradient(Tensor):
    """A loop's gradient `[P]`, copied from the parameters' `grad` when it is first read. A learner that only steps with
    it needs no copy."""

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


class LoopGradient(Handle[Tensor]):
    """The gradient that the loop computes next; awaiting it waits for the loop."""

    def __init__(self, gradient: OwnGradient) -> None:
        self._gradient = gradient
        self.is_supplied = False

    def result(self) -> Tensor:
        return self._gradient


class MeanOfGradient(Handle[Tensor]):
    """The mean of a gradient that the loop computes next."""

    def __init__(self, gradient: LoopGradient, mean: Callable[[Tensor], Handle[Tensor]]) -> None:
        self.gradient = gradient
        self._mean = mean
        self._handle: Handle[Tensor] | None = None

    def result(self) -> Tensor:
        self._handle = self._handle or self._mean(self.gradient.result())
        return self._handle.result()


class LoopReplica(Replica):
    """A replica with two vectors: `loop` `[P]`, viewed by the model's parameters, and the learner's `weights` `[P]`.

    They are the same vector if all learners step together. Otherwise averaging changes `weights` while the loop
    computes its gradient at `loop`, a copy of `weights` made after the previous step.

    The parameters are contiguous. If the loop changes their memory format (`channels_last`) after joining, they keep
    their values but are contiguous again after the next step.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, is_shared: bool, refuses_changes: str | None = None
    ) -> None:
        """`refuses_changes` is the name of the strategy if it cannot adopt changes that the loop makes itself."""
        self._adopted = AdoptedParameters(model, optimizer)
        parameters = self._adopted.parameters
        self.model = model
        self.loop = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
        self._adopted.view(self.loop)
        self.is_stepping = False
        """Whether this replica is calling the optimizer's `step`."""
        self.was_finite = True
        """Whether the newest gradient was finite, so that the optimizer made a step."""
        self._is_shared = is_shared
        weights = self.loop if is_shared else self.loop.clone()
        super().__init__(weights, torch.empty(0), parameters, lambda _: optimizer, clip_norm=None)
        for member in members_of(optimizer):
            member._opt_called = True  # type: ignore[attr-defined]  # if only servers step, schedulers must not warn
        self.loop_version = 0
        self._sparse = _with_sparse_gradients(model, parameters)
        self._own_gradient = torch.empty_like(self.loop).as_subclass(OwnGradient)
        self._own_gradient.fill = partial(flatten, parameters, self._sparse)
        self._refuses_changes = refuses_changes
        # without a copy to compute at, the loop changes the learner's own weights
        is_noticing = refuses_changes is not None or not is_shared
        self._outside = OutsideChanges(parameters, self.loop) if is_noticing else None
        self._rates: tuple[tuple[float, ...], Tensor] | None = None
        self._aside: tuple[Tensor, list[Tensor]] | None = None  # the loop's weights and buffers during a consensus

    def step(self, gradient: Tensor, learning_rate_factor: float) -> bool:
        """Make a step of the loop's optimizer with `gradient` `[P]`, at its own learning rates times the factor.

        Returns False, without a step, if the gradient is not finite.
        """
        is_own = gradient is self._own_gradient
        self.was_finite = are_finite(self._gradients_of_optimizer() if is_own else [gradient])
        if not self.was_finite:
            if not self._is_shared:
                self.refresh_loop()
            return False
        with self._lock:
            if not is_own:
                unflatten(gradient, self._parameters, self._sparse)
            if not self._is_shared:
                self.loop.copy_(self.weights)
            self._step_optimizer(learning_rate_factor)
            if not self._is_shared:
                self.weights.copy_(self.loop)
            self.version += 1
            self.loop_version = self.version
            return True

    def _gradients_of_optimizer(self) -> list[Tensor]:
        gradients = [parameter.grad for group in self.optimizer.param_groups for parameter in group["params"]]
        return [gradient for gradient in gradients if gradient is not None]

    def _step_optimizer(self, factor: float) -> None:
        rates = [group["lr"] for group in self.optimizer.param_groups] if factor != 1.0 else []
        self.is_stepping = True
        try:
            for group, rate in zip(self.optimizer.param_groups, rates, strict=False):
                group["lr"] = rate * factor
            self.optimizer.step()
        finally:
            self.is_stepping = False
            for group, rate in zip(self.optimizer.param_groups, rates, strict=False):
                group["lr"] = rate

    def leave_to_loop(self) -> None:
        """The loop computes at its weights from now on, and may change them."""
        if self._outside is not None:
            self._outside.leave()

    def take_from_loop(self, learner: str) -> None:
        """Adopt what the loop has changed in its weights, apart from this learner.

        Reallocated parameters become views into the loop's weights again, with their current values. Raises
        `ProtocolError` if `AdoptedParameters` does, or if the strategy cannot adopt a change.
        """
        moved = self._adopted.check(learner)
        views = list(split(self.loop, self._parameters)) if moved else []
        for number, values in moved:
            self._adopted.take_back(number, learner)
            views[number].copy_(values)
        if self._memory is not None:
            with self._lock:
                self._memory.take_back()
        if self._outside is None or (change := self._outside.find()) is None:
            return
        if self._refuses_changes is None:
            with self._lock:  # in delta form, which keeps concurrent changes of the background
                self.weights.add_(change)
        elif not self._outside.is_rounding(change):
            self._refuse_change(learner, self._refuses_changes, change)
        self._outside.leave()

    def _refuse_change(self, learner: str, strategy: str, change: Tensor) -> None:
        changes = zip(self._adopted.names, split(change, self._parameters), strict=True)
        names = [name for name, part in changes if bool(part.any())]
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise ProtocolError(
            f"{learner}: since its last step something else has changed parameter {shown} (load_state_dict, a clamp, "
            f"another optimizer, …), which under {strategy} would be lost or taken for progress. Load weights before "
            "starling.join; change them at each step in a hook of the optimizer (register_step_post_hook), if learners "
            "step themselves; or choose a strategy that adopts such changes, such as adpsgd or allreduce"
        )

    @property
    def has_gradients(self) -> bool:
        """Whether any parameter has a gradient."""
        return any(parameter.grad is not None for parameter in self._parameters)

    def finish(self) -> None:
        """Copy this learner's weights to the model, including reallocated parameters."""
        self.refresh_loop()
        self._adopted.release()

    def adopt(self, consensus: Tensor) -> None:
        """Adopt a consensus `[P + B]` permanently."""
        with self._lock:
            self._hold(consensus)
            if not self._is_shared:
                self.weights.copy_(self.loop)
            self.version += 1
            self.loop_version = self.version

    def leave_membership(self) -> None:
        """Forget what the strategy kept for one membership."""
        self.strategy_state = beyond_membership(self.strategy_state)

    def state(self, rank: int, world: int, final: Consensus | None) -> LearnerState:
        """A copy of the whole model, the optimizer's state and the strategy's, for another learner to `take`."""
        with self._lock:
            loop, floating = self._aside or (self.loop, self._floating_buffers())
            weights = loop if self._is_shared else self.weights
            floats = iter(floating)
            tensors = {
                _BUFFER + name: next(floats) if each.is_floating_point() else each
                for name, each in self._real_buffers().items()
            } | self._frozen()
            if final is not None:
                tensors |= {_FINAL: final.mean, _DISTANCE: torch.tensor(final.distance, dtype=torch.float64)}
            optimizer = {"state": self.optimizer.state_dict()["state"]}
            try:
                encode_state(optimizer, "optimizer", {})
            except CheckpointError:  # an optimizer whose state cannot be sent starts afresh elsewhere
                optimizer = {}
            own = copied(weights), copied(tensors), copied(optimizer)
            strategy = {name: each for name, each in self.strategy_state.items() if not name.startswith(OWN_PREFIX)}
            return LearnerState(rank, world, Position(), 0.0, *own, strategy=copied(strategy))

    def take(self, state: LearnerState, everything: bool) -> Consensus | None:
        """Take another learner's strategy state or, with `everything`, its whole state; returns the final consensus, if
        that learner has it. Learning rates stay those of this loop."""
        with self._lock:
            mine = {name: each for name, each in self.strategy_state.items() if name.startswith(OWN_PREFIX)}
            if state.strategy:
                self.strategy_state = {name: each.clone() for name, each in state.strategy.items()}
                self.strategy_state |= {} if everything else mine
            if everything:
                self.weights.copy_(state.weights)
                self.loop.copy_(state.weights)
                self.version += 1
                self.loop_version = self.version
                self.leave_to_loop()
                tensors = {_BUFFER + name: each for name, each in self._real_buffers().items()} | self._frozen()
                for name, tensor in tensors.items():
                    tensor.copy_(state.buffers[name])
                self._memory = None
                if state.optimizer:
                    groups = self.optimizer.state_dict()["param_groups"]
                    self.optimizer.load_state_dict({**state.optimizer, "param_groups": groups})
        if _FINAL not in state.buffers:
            return None
        return Consensus(state.buffers[_FINAL], float(state.buffers[_DISTANCE]))

    def _frozen(self) -> dict[str, Tensor]:
        """The parameters that learners do not train together."""
        together = {id(parameter) for parameter in self._parameters}
        return {
            _FROZEN + name: parameter.detach()
            for name, parameter in self.model.named_parameters()
            if id(parameter) not in together
        }

    def optimizer_of_piece(self, parameters: dict[int, nn.Parameter]) -> Optimizer:
        """An optimizer like the loop's for `parameters`, with the same groups and options."""
        return optimizer_like(self.optimizer, parameters, self._parameters)

    def rates_of_weights(self, rates: Sequence[float]) -> Tensor:
        """The learning rate of each weight `[P]`, from those of the optimizer's groups; 0 for weights in none."""
        if self._rates is None or self._rates[0] != tuple(rates):
            groups = zip(self.optimizer.param_groups, rates, strict=True)
            found = {id(parameter): rate for group, rate in groups for parameter in group["params"]}
            parts = [self.loop.new_full((each.numel(),), found.get(id(each), 0.0)) for each in self._parameters]
            self._rates = tuple(rates), torch.cat(parts)
        return self._rates[1]

    @contextmanager
    def only(self, optimizer: Optimizer | None) -> Generator[None, None, None]:
        """Within this context, only the parameters of this member of several optimizers have gradients, and only it
        steps. None: all."""
        if optimizer is None or not isinstance(self.optimizer, OptimizerList):
            yield
            return
        own = {id(parameter) for parameter in parameters_of(optimizer)}
        others = [(each, each.grad) for each in self._parameters if id(each) not in own]
        for parameter, _ in others:
            parameter.grad = None
        try:
            with self.optimizer.only(optimizer):
                yield
        finally:
            for parameter, gradient in others:
                parameter.grad = gradient

    @property
    def is_showing(self) -> bool:
        """Whether the model holds a consensus instead of this learner's own weights."""
        return self._aside is not None

    def own_gradient(self) -> OwnGradient:
        """The gradient that the loop computes next; valid until this is called again."""
        self._own_gradient.is_filled = False
        return self._own_gradient

    def refresh_loop(self, at: Tensor | None = None) -> None:
        """Copy the current weights, or `at` `[P]`, to the weights at which the loop computes."""
        with self._lock:
            self.loop.copy_(self.weights if at is None else at)
            self.loop_version = self.version

    def pieces(self, largest: int, optimizer_state: bool) -> Sequence[slice]:
        if not optimizer_state or self._memory is not None:
            return super().pieces(largest, optimizer_state)
        gradients = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:  # optimizers keep no state for parameters without a gradient
            parameter.grad = torch.zeros_like(parameter)
        try:
            return super().pieces(largest, optimizer_state)
        except KeyError as error:
            raise ConfigError(
                "strategy.optimizer_state: the optimizer's state differs between trainable parameters and cannot be "
                "averaged; choose local"
            ) from error
        finally:
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = gradient

    def start_from_first(self) -> None:
        """Copy learner 0's whole model, including frozen parameters and buffers."""
        tensors = [tensor.detach() for tensor in (*self.model.parameters(), *self.model.buffers())]
        sizes = [tensor.nbytes for tensor in tensors]
        contents = torch.cat([tensor.reshape(-1).contiguous().view(torch.uint8).cpu() for tensor in tensors])
        with communicating():
            dist.broadcast(contents, src=0)
        for tensor, content in zip(tensors, torch.split(contents, sizes), strict=True):
            tensor.copy_(content.clone().view(tensor.dtype).view(tensor.shape))
        self.refresh_weights()

    def refresh_weights(self) -> None:
        """Copy the loop's weights to this learner's own."""
        with self._lock:
            self.weights.copy_(self.loop)

    def contribution(self) -> Tensor:
        """This learner's weights and floating-point buffers `[P + B]`, in at least float32. They are its own even while
        the model holds a consensus."""
        with self._lock:
            loop, buffers = self._aside or (self.loop, self._floating_buffers())
            parts = [loop if self._is_shared else self.weights, *buffers]
            dtype = reduce(torch.promote_types, (part.dtype for part in parts), torch.float32)
            return torch.cat([part.detach().reshape(-1).to(dtype) for part in parts])

    @contextmanager
    def showing(self, consensus: Tensor) -> Generator[None, None, None]:
        """Within this context the model holds a consensus `[P + B]`; afterwards exactly what it held before."""
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
        """Copy a consensus `[P + B]` into the loop's weights and the model's buffers; the caller holds the lock."""
        own = (self.loop, *self._floating_buffers())
        for tensor, agreed in zip(own, split(consensus, own), strict=True):
            tensor.copy_(agreed)

    def _real_buffers(self) -> dict[str, Tensor]:
        """The buffers, by name; of a complex one, a view of its real and imaginary parts."""
        named = self.model.named_buffers()
        return {name: torch.view_as_real(each) if each.is_complex() else each for name, each in named}

    def _floating_buffers(self) -> list[Tensor]:
        """The buffers that are averaged."""
        return [buffer for buffer in self._real_buffers().values() if buffer.is_floating_point()]
