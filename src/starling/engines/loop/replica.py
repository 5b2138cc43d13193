"""A learner's replica that consists of a user's own model and optimizers. It detects changes that the user's loop makes
to the model."""

import inspect
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from starling.checkpoint.files import write_tensors
from starling.checkpoint.state import OWN_PREFIX, LearnerState, encode_state
from starling.errors import CheckpointError, ConfigError, ProtocolError, some
from starling.training.flat import NO_GRADIENT, in_cudnn_order, split, split_gradient, trainable, view_weights
from starling.training.replica import Replica
from starling.workload import Position

_BUFFER, _FROZEN, _FINAL, _DISTANCE = "buffer ", "frozen ", "final", "distance"
"""Names, or prefixes of names, of the tensors other than the weights that one learner copies from another."""
_SMALL = 10_000
"""Largest number of elements for which copying takes less time than calling a torch function."""


_SAME_PARAMETERS = (
    "at starling.join all parameters that will be trained must belong to the model and must require gradients or be in "
    "the optimizer; to train some only later, freeze them with requires_grad_(False) after starling.join"
)
_ROUNDING = 1e-6
"""Largest difference, relative to the weights, that may remain when a change was made and undone, for example by a
schedule-free optimizer."""


@dataclass(frozen=True)
class Consensus:
    """The mean of all learners' contributions `[P + B]`, and the distance of their weights `[P]` from it,
    (1/L) sum_l |w_l - mean|^2."""

    mean: Tensor
    distance: float


def are_finite(gradients: Sequence[Tensor]) -> bool:
    """Return whether all numbers in the gradients are finite."""
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
    """A loop's gradient `[P]`. It is copied from the parameters' `grad` when it is first read. If the learner uses the
    gradient only for a step, no copy is made."""

    fill: Callable[[], object]
    """Function that copies the gradient, unless it has already been copied."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            for each in tree_leaves((args, kwargs)):
                if isinstance(each, OwnGradient):
                    each.fill()
            return func(*args, **(kwargs or {}))


class LoopReplica(Replica):
    """A replica with two vectors: `loop` `[P]`, into which the model's parameters are views, and the learner's
    `weights` `[P]`.

    If all learners step together, both are the same vector. Otherwise averaging changes `weights` while the loop
    computes its gradient at `loop`, which is a copy of `weights` made after the previous step.

    The parameters are contiguous. If the loop changes their memory format (`channels_last`) after joining, they keep
    their values but are contiguous again after the next step.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, is_shared: bool, refuses_changes: str | None = None
    ) -> None:
        """Create the replica of a loop's model and optimizer. `refuses_changes` is the name of the strategy if the
        strategy cannot adopt the loop's own changes, else None."""
        # a loop that shares the learner's weights changes them directly, so there is nothing to notice
        notices_changes = refuses_changes is not None or not is_shared
        self.adopted = AdoptedParameters(model, optimizer, notices_changes)
        self.model, self.loop = model, self.adopted.flat
        parameters, weights = self.adopted.parameters, self.loop if is_shared else self.loop.clone()
        super().__init__(weights, torch.empty_like(weights), parameters, lambda _: optimizer, clip_norm=None)
        self.is_stepping = False
        """Whether this replica is calling the optimizer's `step`."""
        self.aside: list[Tensor] | None = None
        """The loop's weights and the averaged buffers while the model holds a consensus in their place, else None."""
        for member in members_of(optimizer):
            member._opt_called = True  # type: ignore[attr-defined]  # if only servers step, schedulers must not warn
        self.loop_version = 0
        self._views = split(weights, parameters), split(self.loop, parameters)
        modules = [module for module in model.modules() if getattr(module, "sparse", False) is True]
        sparse = {id(each) for module in modules for each in module.parameters(recurse=False)}
        self._sparse = {number for number, each in enumerate(parameters) if id(each) in sparse}
        """The numbers of the parameters that have had, or will have, sparse gradients."""
        self._own_gradient = self.gradients.as_subclass(OwnGradient)
        self._own_gradient.fill = self.own_gradient
        self._is_filled = False
        self._refuses_changes = refuses_changes
        self._rates: tuple[tuple[float, ...], Tensor] | None = None

    # gradients and steps

    def next_gradient(self) -> Tensor:
        """Return the gradient `[P]` that the loop computes next. It is valid until the next call of this method."""
        self._is_filled = False
        return self._own_gradient

    def own_gradient(self) -> Tensor:
        """Return the loop's gradient `[P]`. The part of a parameter without a gradient is -0.0. No other part contains
        -0.0, because 0.0 is added to these parts. A mean is -0.0 only where all learners have -0.0, so it also shows
        which parameters had no gradient on any learner."""
        parts = [] if self._is_filled else split(self.gradients, self.parameters)
        self._is_filled = True
        for number, part in enumerate(parts):
            gradient = self.parameters[number].grad
            if gradient is None:
                part.fill_(NO_GRADIENT)
                continue
            if gradient.is_sparse:
                self._sparse.add(number)
                gradient = gradient.to_dense()
            torch.add(gradient.detach(), 0.0, out=part)
        return self.gradients

    def step(self, gradient: Tensor, learning_rate_factor: float) -> bool:
        """Make a step of the loop's optimizer with `gradient` `[P]`, at its own learning rates times the factor.

        Returns False, without a step, if the gradient is not finite.
        """
        is_own = gradient is self._own_gradient
        own = [each.grad for each in parameters_of(self.optimizer) if each.grad is not None] if is_own else [gradient]
        if not are_finite(own):
            self.refresh_loop()
            return False
        with self._in_turn():
            if not is_own:
                self._give_to_parameters(gradient)
            with self._at_weights():
                self._step_optimizer(learning_rate_factor)
            self._changed()
            return True

    @contextmanager
    def _at_weights(self) -> Generator[None, None, None]:
        """Within this context, the parameters are views into the learner's weights, so that a step changes these and
        only one copy is made afterwards."""
        if self.loop is self.weights:
            yield
            return
        for parameter, own in zip(self.parameters, self._views[0], strict=True):
            parameter.data = own
        try:
            yield
        finally:
            for parameter, own, of_loop in zip(self.parameters, *self._views, strict=True):
                if parameter.data_ptr() != own.data_ptr():  # the optimizer has reallocated it
                    own.copy_(parameter.detach())
                parameter.data = of_loop
            self.loop.copy_(self.weights)

    def _changed(self) -> None:
        self.version += 1
        self.loop_version = self.version

    def _give_to_parameters(self, gradient: Tensor) -> None:
        """Make each parameter's `grad` a view into `gradient` `[P]`, or None if no learner had a gradient for the
        parameter. A sparse `grad` contains the rows that are not 0."""
        for number, part in enumerate(split_gradient(gradient, self.parameters)):
            if part is not None and number in self._sparse:
                part = part.to_sparse(1)
            self.parameters[number].grad = part

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

    def rates_of_weights(self, rates: Sequence[float]) -> Tensor:
        """Return the learning rate of each weight `[P]`, given the rates of the optimizer's groups. The rate is 0 for
        weights in no group."""
        if self._rates is None or self._rates[0] != tuple(rates):
            groups = zip(self.optimizer.param_groups, rates, strict=True)
            found = {id(parameter): rate for group, rate in groups for parameter in group["params"]}
            parts = [self.loop.new_full((each.numel(),), found.get(id(each), 0.0)) for each in self.parameters]
            self._rates = tuple(rates), torch.cat(parts)
        return self._rates[1]

    @contextmanager
    def only(self, optimizer: Optimizer) -> Generator[None, None, None]:
        """Within this context, only the parameters of `optimizer`, which is one of several, have gradients, and only
        `optimizer` steps."""
        if not isinstance(self.optimizer, OptimizerList):
            yield
            return
        own = {id(parameter) for parameter in parameters_of(optimizer)}
        others = [(each, each.grad) for each in self.parameters if id(each) not in own]
        for parameter, _ in others:
            parameter.grad = None
        self.optimizer.active = (optimizer,)
        try:
            yield
        finally:
            self.optimizer.active = self.optimizer.members
            for parameter, gradient in others:
                parameter.grad = gradient

    def optimizer_of_piece(self, parameters: dict[int, nn.Parameter]) -> Optimizer:
        """Create an optimizer for `parameters` with the same class, groups and options as the loop's optimizer."""
        return optimizer_like(self.optimizer, parameters, self.parameters)

    def reset_optimizer(self) -> None:
        with self._lock:
            for member in members_of(self.optimizer):
                member.state.clear()

    # the loop's weights

    def take_from_loop(self, learner: str) -> None:
        """Adopt the changes that the loop itself has made to its weights.

        Reallocated parameters become views into the loop's weights again, with their current values. Raises
        `ProtocolError` if `AdoptedParameters` does, or if the strategy cannot adopt a change.
        """
        self.adopted.take_back(learner)
        if self._memory is not None:
            with self._lock:
                self._memory.take_back()
        if (change := self.adopted.change()) is None:
            return
        if self._refuses_changes is None:
            with self._in_turn():  # in delta form, which keeps concurrent changes of the background
                self.weights.add_(change)
        elif not bool(torch.linalg.vector_norm(change) <= _ROUNDING * torch.linalg.vector_norm(self.loop)):
            changes = zip(self.adopted.names, split(change, self.parameters), strict=True)
            names = [name for name, part in changes if bool(part.any())]
            raise ProtocolError(
                f"{learner}: since its last step something else has changed parameter {some(names, 3)} "
                f"(load_state_dict, a clamp, another optimizer, …), which under {self._refuses_changes} would be "
                "lost or taken for progress. Load weights before starling.join; change them at each step in a hook "
                "of the optimizer (register_step_post_hook), if learners step themselves; or choose a strategy that "
                "adopts such changes, such as adpsgd or allreduce"
            )
        self.adopted.leave()

    @property
    def adopts_changes_apart(self) -> bool:
        """Whether the loop computes at weights of its own, whose changes by the loop the strategy adopts."""
        return self.loop is not self.weights and self._refuses_changes is None

    def refresh_loop(self, at: Tensor | None = None) -> None:
        """Copy the current weights, or `at` `[P]`, to the weights at which the loop computes."""
        with self._in_turn():
            self.loop.copy_(self.weights if at is None else at)
            self.loop_version = self.version

    def finish(self) -> None:
        """Copy this learner's weights to the model, including reallocated parameters."""
        self.refresh_loop()
        self.adopted.release()

    # the consensus

    def contribution(self) -> Tensor:
        """Return this learner's weights and floating-point buffers `[P + B]`, in at least float32. They are the
        learner's own values even while the model holds a consensus."""
        with self._lock:
            parts = self._contributed()
            dtype = reduce(torch.promote_types, (part.dtype for part in parts), torch.float32)
            return torch.cat([part.detach().reshape(-1).to(dtype) for part in parts])

    def _contributed(self) -> list[Tensor]:
        loop, *buffers = self.aside or self._averaged()
        return [loop if self.weights is self.loop else self.weights, *buffers]

    def _averaged(self) -> list[Tensor]:
        """Return the tensors of the model that are averaged: its weights and its floating-point buffers."""
        return [self.loop, *(each for each in self._real_buffers().values() if each.is_floating_point())]

    @contextmanager
    def showing(self, consensus: Tensor) -> Generator[None, None, None]:
        """A context in which the model holds a consensus `[P + B]`. Afterwards the model has exactly its former
        values."""
        with self._lock:
            every = [(each, each.clone()) for each in (self.loop, *self.model.buffers())]
            self.aside = [each.clone() for each in self._averaged()]
            self._hold(consensus)
        try:
            yield
        finally:
            with self._lock:
                for each, own in every:
                    each.copy_(own)
                self.aside = None

    def adopt(self, consensus: Tensor) -> None:
        """Adopt a consensus `[P + B]` permanently."""
        with self._lock:
            self._hold(consensus)
            self.weights.copy_(self.loop)
            self._changed()

    def _hold(self, consensus: Tensor) -> None:
        """Copy a consensus `[P + B]` into the loop's weights and the model's buffers. The caller must hold the lock."""
        own = self._averaged()
        for tensor, agreed in zip(own, split(consensus, own), strict=True):
            tensor.copy_(agreed)

    # states of other learners

    def state(self, rank: int, world: int, final: Consensus | None, has_optimizer: bool) -> LearnerState:
        """Return a copy of the whole model and of the states of the optimizer and the strategy. Another learner passes
        the copy to `take`."""
        with self._lock:
            weights, *floating = self._contributed()
            tensors = self._beside_weights()
            averaged = [name for name, each in tensors.items() if name.startswith(_BUFFER) and each.is_floating_point()]
            tensors |= zip(averaged, floating, strict=True)
            if final is not None:
                tensors |= {_FINAL: final.mean, _DISTANCE: torch.tensor(final.distance, dtype=torch.float64)}
            optimizer = {"state": self.optimizer.state_dict()["state"]} if has_optimizer else {}
            try:
                encode_state(optimizer, "optimizer", {})
            except CheckpointError:  # an optimizer whose state cannot be sent starts with an empty state elsewhere
                optimizer = {}
            strategy = {name: each for name, each in self.strategy_state.items() if not name.startswith(OWN_PREFIX)}
            return LearnerState(rank, world, Position(), 0.0, weights, tensors, optimizer, strategy=strategy).copy()

    def saved(self, rank: int, world: int, **more: Any) -> LearnerState:
        """Return the whole state between two steps, for a checkpoint. The state shares memory with the replica."""
        optimizer, strategy = self.optimizer.state_dict(), dict(self.strategy_state)
        buffers = {name: each.detach().cpu() for name, each in self._beside_weights().items()}
        return LearnerState(
            rank,
            world,
            minutes=0.0,
            weights=self.on_host(),
            buffers=buffers,
            optimizer=optimizer,
            strategy=strategy,
            **more,
        )

    def write_model(self, folder: Path, weights: Tensor, buffers: dict[str, Tensor]) -> None:
        """Write the model with `weights` `[P]` and the floating-point `buffers` as its `state_dict` into a folder."""
        names = [_BUFFER + name for name, each in self._real_buffers().items() if each.is_floating_point()]
        with self.showing(torch.cat([each.reshape(-1) for each in (weights, *map(buffers.__getitem__, names))])):
            folder.mkdir()
            state = self.model.state_dict()
            tensors = {name: each for name, each in state.items() if isinstance(each, Tensor)}
            write_tensors(folder / "model.safetensors", tensors)

    def resume(self, state: LearnerState) -> None:
        """Continue from a state that `saved` has returned. Raises `CheckpointError` if it belongs to another
        model."""
        found, own = {name: each.shape for name, each in state.buffers.items()}, self._beside_weights()
        if state.weights.shape != self.weights.shape or found != {name: each.shape for name, each in own.items()}:
            raise CheckpointError(
                f"the checkpoint holds {state.weights.numel()} trained weights and {len(found)} other tensors, and the "
                f"model has {self.weights.numel()} and {len(own)}, or their shapes differ; join with the model, frozen "
                "alike, that was saved"
            )
        self.restore(state.weights, state.optimizer, state.strategy)
        self.loop.copy_(self.weights)
        for name, tensor in own.items():
            tensor.copy_(state.buffers[name])
        self.adopted.leave()

    def take(self, state: LearnerState, everything: bool) -> Consensus | None:
        """Adopt another learner's strategy state or, with `everything`, its whole state. Return the final consensus if
        that learner has it. This loop keeps its own learning rates."""
        with self._lock:
            mine = {name: each for name, each in self.strategy_state.items() if name.startswith(OWN_PREFIX)}
            if state.strategy:
                self.strategy_state = state.strategy | ({} if everything else mine)
            if everything:
                self.weights.copy_(state.weights)
                self.loop.copy_(state.weights)
                self._changed()
                self.adopted.leave()
                for name, tensor in self._beside_weights().items():
                    tensor.copy_(state.buffers[name])
                self._memory = None
                if state.optimizer:
                    groups = self.optimizer.state_dict()["param_groups"]
                    self.optimizer.load_state_dict({**state.optimizer, "param_groups": groups})
        if _FINAL not in state.buffers:
            return None
        return Consensus(state.buffers[_FINAL], float(state.buffers[_DISTANCE]))

    def _beside_weights(self) -> dict[str, Tensor]:
        """Return the buffers, and the parameters that learners do not train together, by name."""
        together = {id(parameter) for parameter in self.parameters}
        named = self.model.named_parameters()
        frozen = {_FROZEN + name: parameter.detach() for name, parameter in named if id(parameter) not in together}
        return {_BUFFER + name: each for name, each in self._real_buffers().items()} | frozen

    def _real_buffers(self) -> dict[str, Tensor]:
        """Return the buffers by name. A complex buffer is returned as a view of its real and imaginary parts."""
        named = self.model.named_buffers()
        return {name: torch.view_as_real(each) if each.is_complex() else each for name, each in named}


class AdoptedParameters:
    """The parameters that learners train together, as views into `flat` `[P]`, and the loop's own changes to them.

    These are the model's parameters that are trainable or in the optimizer when the model joins. They may be frozen and
    unfrozen later. At every step, `take_back` detects parameters that were reallocated or replaced, and trained
    parameters that were unknown before. This takes about half a microsecond per parameter.

    `change` compares `flat` with the values that it had when the learner left it to the loop. Most steps need no such
    comparison: the version counters of the parameters show a change in place, and the sum of all weights shows a change
    that bypasses the counters, such as `parameter.data.clamp_`.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, notices_changes: bool) -> None:
        self._model, self._optimizer = model, optimizer
        like = trainable(model)[0]
        in_optimizer = {id(parameter) for parameter in parameters_of(optimizer)}
        self.names: list[str] = []
        self.parameters: list[nn.Parameter] = []
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
        self._left = torch.empty_like(self.flat) if notices_changes else None
        self.leave()

    def leave(self) -> None:
        """Leave the weights, with their present values, to the loop."""
        if self._left is not None:
            self._left.copy_(self.flat)
            self._signs = self._now()

    def change(self) -> Tensor | None:
        """Return the loop's changes since `leave`, `[P]`, or None if there are none or changes are not noticed."""
        if self._left is None or self._now() == self._signs or torch.equal(self.flat, self._left):
            return None
        return self.flat - self._left

    def _now(self) -> tuple[float, list[int]]:
        precise = torch.promote_types(self.flat.dtype, torch.float32)
        return float(self.flat.sum(dtype=precise)), [parameter._version for parameter in self.parameters]

    def take_back(self, learner: str) -> None:
        """Make reallocated parameters views into `flat` again, with their current values.

        Raises `ProtocolError` if the dtype, shape or device of a parameter has changed, or if there is a trained
        parameter that was unknown when the model joined.
        """
        if self._structure() != self._noted or any(parameter.requires_grad for parameter in self._others):
            self._check_structure(learner)
            self._note_structure()
        # addresses first, because `is_set_to`, which also compares sizes and strides, fails for tensors on two devices
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
        """Return the `id`s of the modules and parameters of the model and the optimizer. `_alive` keeps these objects
        alive."""
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
            raise ProtocolError(
                f"{learner}: parameter {some(unknown)} is trained but was unknown when the model joined, so its "
                f"changes would not reach other learners; {_SAME_PARAMETERS}"
            )


def _fits(tensor: Tensor, like: Tensor) -> bool:
    return tensor.dtype == like.dtype and tensor.device == like.device


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"


_OF_SCHEDULES = {"params", "lr", "initial_lr", "max_lr", "min_lr", "momentum", "max_momentum", "base_momentum", "betas"}
"""Keys of a parameter group that learning rate schedulers change."""


class OptimizerList(Optimizer):
    """Several optimizers of one model, combined into one. It has the parameter groups of all of them, and its step is a
    step of each optimizer that is `active`."""

    def __init__(self, members: Sequence[Optimizer]) -> None:
        # `Optimizer.__init__` is not called, because it would create separate parameter groups
        self.members = tuple(members)
        self.defaults: dict[str, Any] = {}
        self.active = self.members

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The parameter groups of all members, in order."""
        return [group for member in self.members for group in member.param_groups]

    @property
    def state(self) -> dict[Tensor, Any]:  # type: ignore[override]
        """The states of all members, by parameter."""
        return {parameter: state for member in self.members for parameter, state in member.state.items()}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make a step of each active member."""
        for member in self.active:
            member.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the states and groups of all members, each with the number of its member."""
        found = [member.state_dict() for member in self.members]
        return {
            "state": {number: each["state"] for number, each in enumerate(found)},
            "param_groups": [each["param_groups"] for each in found],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that `state_dict` has returned."""
        for number, member in enumerate(self.members):
            groups = state_dict["param_groups"][number]
            member.load_state_dict({"state": state_dict["state"][number], "param_groups": groups})


def as_one(optimizers: Optimizer | Sequence[Optimizer]) -> Optimizer:
    """Return one optimizer that stands for all optimizers of a loop. Raises `ConfigError` if there is no optimizer, or
    if a parameter is in several."""
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
    """Return the optimizers that a loop steps: the members of an `OptimizerList`, or the optimizer itself."""
    return optimizer.members if isinstance(optimizer, OptimizerList) else (optimizer,)


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield the parameters in an optimizer's groups."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def describe(optimizer: Optimizer) -> str:
    """Return a text with the classes and options of a loop's optimizers, without the options that schedulers change.
    The text must be the same on all learners."""
    return " + ".join(map(_description, members_of(optimizer)))


def _description(optimizer: Optimizer) -> str:
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
    if callable(value):  # its repr contains an address
        return str(getattr(value, "__qualname__", type(value).__qualname__))
    return repr(value) if value is None or isinstance(value, bool | int | float | str) else type(value).__name__


def optimizer_like(optimizer: Optimizer, parameters: dict[int, nn.Parameter], all_parameters: list[Any]) -> Optimizer:
    """Create an optimizer for `parameters` with the same class, groups and options as a loop's optimizer. `parameters`
    are given by their numbers in `all_parameters`. Raises `ConfigError` if the optimizer cannot be created."""
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
