"""Computation of the gradients of many virtual learners at once, if the model allows it.

A gradient depends on the weights at which it began, and on nothing that happens later. When the first gradient of any
learner is due, all gradients that are then under way are therefore computed together: the learners' weights are
stacked, and `torch.func.vmap` runs the loss over all of them. Events keep their times and their order. Losses and
gradients agree up to rounding with those that are computed one after another, because matrix products are added in a
different order.
"""

import copy
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import unwrap
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from starling.engines.virtual.computation import Loss, Member, RealGradients
from starling.training.flat import NO_GRADIENT
from starling.training.job import Job
from starling.training.replica import Replica

MOST_STACKED_BYTES = 2**28
"""Largest size of stacked weights in bytes. If the weights of all learners are larger, they are computed in several
groups."""


@dataclass
class _Begun:
    """A gradient under way."""

    learner: Member
    at: Tensor
    examples: Any
    loss: float | None = None


class BatchedGradients(RealGradients):
    """Real gradients, computed in one call for learners that compute at the same time.

    Mini-batches are computed together if each is one micro-batch of tensors with the same shapes. Other mini-batches
    are computed one after another. All mini-batches are computed one after another if the model has buffers, draws
    random numbers or needs an operation that `vmap` cannot batch; `problem` then contains the reason.
    """

    def __init__(self, job: Job, device: torch.device) -> None:
        super().__init__(job, device)
        self._loss = _LossOf(self._model.model, job)
        names = {id(parameter): name for name, parameter in self._loss.named_parameters()}
        self._parameters = self._model.parameters
        self._names = [names[id(parameter)] for parameter in self._parameters]
        self._sizes = [each.numel() for each in self._parameters]
        self._most = max(1, MOST_STACKED_BYTES // max(1, sum(each.nbytes for each in self._parameters)))
        self._begun: dict[int, _Begun] = {}  # gradients by the learner's `id`, in the order in which they began
        self.most_together = 0
        """Largest number of learners whose gradients were computed in one call."""
        self._replicas: WeakSet[Replica] = WeakSet()
        self.problem = self._problem()
        """Reason why gradients are computed one after another; None if they are computed together."""

    def _problem(self) -> str | None:
        if next(self._loss.buffers(), None) is not None:
            return "the model has buffers"
        if self._job.faults:
            return "faults are injected"
        if self._job.freeze:
            return "parameters are thawed during the run"
        if self._job.weighting != "batches":
            return f"mini-batches are weighted by {self._job.weighting}"
        if self._job.batch_shares:
            return "learners have batch shares"
        return None

    def new_replica(self) -> Replica:
        replica = super().new_replica()
        self._replicas.add(replica)
        if self.most_together:
            _step_fast(replica)
        return replica

    def gradient(self, learner: Member, at: Tensor) -> Loss:
        batch = learner.claimed()[0][1]
        if self.problem is not None or len(batch) != 1:
            return super().gradient(learner, at)
        if id(learner) in self._begun:  # its previous gradient was not awaited
            self._compute_all()
        begun = self._begun[id(learner)] = _Begun(learner, at, batch[0].to(self._workspace.device))

        def loss() -> float | None:
            if id(learner) in self._begun:
                self._compute_all()
            return begun.loss

        return loss

    def _compute_all(self) -> None:
        """Compute all gradients that are under way."""
        begun, self._begun = list(self._begun.values()), {}
        groups: dict[Hashable, list[_Begun]] = {}
        for each in begun:
            groups.setdefault(_shape(each.examples), []).append(each)
        for group in groups.values():
            for start in range(0, len(group), self._most):
                self._compute(group[start : start + self._most])

    def _compute(self, group: Sequence[_Begun]) -> None:
        if len(group) > 1 and self.problem is None:
            try:
                self._compute_together(group)
            except Exception as error:  # of any class: an error of the workload itself is raised again below
                self.problem = f"{type(error).__name__}: {error}"
            else:
                return
        for each in group:
            each.loss = self.compute(each.learner, each.at)

    def _compute_together(self, group: Sequence[_Begun]) -> None:
        stacked = torch.stack([each.at.detach() for each in group])
        leaves = [
            part.view(len(group), *parameter.shape).requires_grad_()
            for part, parameter in zip(stacked.split_with_sizes(self._sizes, 1), self._parameters, strict=True)
        ]
        found = [_tensors(each.examples) for each in group]
        inputs = {name: torch.stack([each[name] for each in found]) for name in found[0]}
        template = _common([each.examples for each in group])

        def loss_of_one(weights: dict[str, Tensor], tensors: dict[str, Tensor]) -> Tensor:
            examples = copy.copy(template)
            vars(examples).update(tensors)
            loss: Tensor = torch.func.functional_call(self._loss, weights, (examples,))
            return loss

        named = dict(zip(self._names, leaves, strict=True))
        losses: Tensor = torch.func.vmap(loss_of_one, randomness="error")(named, inputs)
        gradients = torch.autograd.grad(losses.sum(), leaves, allow_unused=True)
        unused = {number for number, gradient in enumerate(gradients) if gradient is None}
        for leaf, gradient in zip(leaves, gradients, strict=True):
            if gradient is None:
                leaf.detach().fill_(NO_GRADIENT)
            else:
                torch.add(gradient, 0.0, out=leaf.detach())  # 0.0 + -0.0 is 0.0: see NO_GRADIENT
        for number, (each, loss) in enumerate(zip(group, losses.tolist(), strict=True)):
            each.learner.replica.gradients = stacked[number]
            each.learner.replica.sometimes_unused |= unused
            each.loss = loss
        if not self.most_together:  # until then results are bit-identical to those without batching
            for replica in self._replicas:
                _step_fast(replica)
        self.most_together = max(self.most_together, len(group))


def _step_fast(replica: Replica) -> None:
    """Let SGD, Adam and AdamW step all their parameters in one call, unless the optimizer was created with a different
    setting.

    Steps agree up to rounding. Saved states do not contain this setting, so that other engines can choose their own.
    Torch wraps a step for its profiler and its compiler. These wrappers take longer than the step of a small model, so
    they are left out where they do nothing.
    """
    optimizer = replica.optimizer
    if type(optimizer) not in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        return
    if any(
        group["fused"] is not None or group["foreach"] is not None or group["differentiable"]
        for group in optimizer.param_groups
    ):
        return
    if any(parameter.device.type != "cpu" for group in optimizer.param_groups for parameter in group["params"]):
        return  # by default, torch makes one call on these devices

    def use(optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            group["fused"] = True

    def hide(_: Optimizer, state: dict[str, Any]) -> None:
        for group in state["param_groups"]:
            group["fused"] = None

    use(optimizer)
    optimizer.register_load_state_dict_post_hook(use)
    optimizer.register_state_dict_post_hook(hide)
    if not _has_hooks(optimizer):
        replica.fast_step = torch.no_grad()(partial(unwrap(type(optimizer).step), optimizer))


def _has_hooks(optimizer: Optimizer) -> bool:
    """Return whether any hook is called before, after or in place of a step."""
    own = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    return any((*own, _global_optimizer_pre_hooks, _global_optimizer_post_hooks, "step" in vars(optimizer)))


class _LossOf(nn.Module):
    """The loss of a workload as a function of its model's parameters."""

    def __init__(self, model: nn.Module, job: Job) -> None:
        super().__init__()
        self.model, self._job = model, job

    def forward(self, examples: Any) -> Tensor:
        device = next(self.model.parameters()).device
        with torch.autocast(device.type, torch.bfloat16, enabled=self._job.autocast):
            loss: Tensor = self._job.workload.loss(self.model, examples)
        return loss


class _Differs:
    """Placeholder for a value that is not a tensor and that differs between the mini-batches of learners. A loss must
    not use it."""

    def __bool__(self) -> bool:
        raise TypeError("the loss depends on something that is no tensor and differs between mini-batches")

    __len__ = __iter__ = __eq__ = __hash__ = __bool__  # type: ignore[assignment]


def _tensors(examples: Any) -> dict[str, Tensor]:
    return {name: value for name, value in vars(examples).items() if isinstance(value, Tensor)}


def _shape(examples: Any) -> Hashable:
    """Return a key that is equal for mini-batches that can be stacked."""
    if not hasattr(examples, "__dict__"):
        return id(examples)
    return type(examples), *((name, value.shape, value.dtype) for name, value in _tensors(examples).items())


def _common(examples: Sequence[Any]) -> Any:
    """Return the first mini-batch, in which a placeholder replaces each value that is not a tensor and that differs
    between mini-batches."""
    made = copy.copy(examples[0])
    others = {name: value for name, value in vars(made).items() if not isinstance(value, Tensor)}
    vars(made).update(
        {name: _Differs() for name, value in others.items() if any(vars(each)[name] != value for each in examples)}
    )
    return made
