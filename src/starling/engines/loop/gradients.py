"""Gradients that somebody's own training loop leaves in its parameters: flat, checked, unscaled."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

from starling.errors import ProtocolError
from starling.training.flat import split


def flatten(parameters: Sequence[nn.Parameter], flat: Tensor) -> None:
    """Copy the parameters' gradients into `flat` `[P]`; `unflatten` is the reverse.

    A parameter without a gradient becomes -0.0 everywhere, and no gradient contains a -0.0 (adding 0.0 makes it 0.0).
    A mean of such vectors is -0.0 only where all learners have -0.0: so it also says, without a message of its own,
    which parameters no learner used.
    """
    for parameter, part in zip(parameters, split(flat, parameters), strict=True):
        gradient = parameter.grad
        if gradient is None:
            part.fill_(-0.0)
        else:
            dense = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
            torch.add(dense, 0.0, out=part)


def unflatten(flat: Tensor, parameters: Sequence[nn.Parameter]) -> None:
    """Make the parameters' gradients views into `flat` `[P]`, and None where no learner had one."""
    sizes = torch.tensor([0, *(parameter.numel() for parameter in parameters[:-1])], device=flat.device)
    first = flat[sizes.cumsum(0).clamp_(max=len(flat) - 1)]
    may_be_unused = _is_negative_zero(first).tolist()  # by one number each, so that few are looked at in full
    for parameter, part, suspect in zip(parameters, split(flat, parameters), may_be_unused, strict=True):
        parameter.grad = None if suspect and bool(_is_negative_zero(part).all()) else part


def _is_negative_zero(numbers: Tensor) -> Tensor:
    return (numbers == 0.0) & torch.signbit(numbers)


def are_finite(gradients: Sequence[Tensor]) -> bool:
    """Whether all numbers are finite, in one pass over them."""
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


_SMALL = 10_000
"""Numbers whose copying takes less time than a call of torch."""


def unscale(scaler: GradScaler, optimizer: Optimizer, who: str) -> None:
    """Do what `scaler.step(optimizer)` does before the optimizer's step: unscale the gradients unless the loop has, and
    note for `scaler.update()` whether they are finite. `ProtocolError` for a second time before `scaler.update()`."""
    if not scaler.is_enabled():
        return
    state = scaler._per_optimizer_states[id(optimizer)]  # the only place that knows whether the loop has unscaled
    if state["stage"] is OptState.STEPPED:
        raise ProtocolError(f"{who}: step() was called twice with one GradScaler; call scaler.update() after each step")
    if state["stage"] is OptState.READY:
        scaler.unscale_(optimizer)
    state["stage"] = OptState.STEPPED
