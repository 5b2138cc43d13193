"""What of a loop learners cannot train together, what it still has from its life under DistributedDataParallel, and
what would harm learners."""

import inspect
import warnings
from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data.distributed import DistributedSampler

from starling.engines.loop.optimizers import members_of
from starling.errors import ConfigError
from starling.training.flat import trainable


def check_loop(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise `ConfigError` for a model or optimizer that learners cannot train together."""
    if isinstance(model, DistributedDataParallel):
        raise ConfigError("model: DistributedDataParallel averages gradients itself; pass its `.module`")
    parameters = trainable(model)
    if parameters[0].is_complex():
        name = next(name for name, each in model.named_parameters() if each is parameters[0])
        raise ConfigError(
            f"model: parameter {name} is {parameters[0].dtype}, and learners exchange real numbers; keep it as a real "
            "parameter with a last dimension of 2, and use torch.view_as_complex of it in forward"
        )
    if len(devices := {str(parameter.device) for parameter in parameters}) > 1:
        raise ConfigError(f"model: its parameters must be on one device, found {', '.join(sorted(devices))}")
    own = {id(parameter) for parameter in model.parameters()}
    known = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if foreign := [parameter for parameter in known if id(parameter) not in own]:
        raise ConfigError(
            f"optimizer: {len(foreign)} of its {len(known)} parameters do not belong to the model; the first has shape "
            f"{list(foreign[0].shape)}. Create it from `model.parameters()`; join several models as one "
            "`nn.ModuleList`, with a list of their optimizers"
        )
    if not {id(parameter) for parameter in known} & {id(parameter) for parameter in parameters}:
        raise ConfigError("optimizer: it has none of the model's trainable parameters")
    for member in members_of(optimizer):
        closure = inspect.signature(member.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ConfigError(
                f"optimizer: {type(member).__name__} needs a closure to compute several gradients per step, but a "
                "learner computes one gradient per step; use an optimizer without a closure, such as SGD or AdamW"
            )


def check_served(optimizer: Optimizer, strategy: str) -> None:
    """Raise `ConfigError` for an optimizer whose steps cannot be made by servers, or in shared memory."""
    for member in members_of(optimizer):
        kind = type(member).__name__
        if callable(getattr(member, "train", None)) and callable(getattr(member, "eval", None)):
            raise ConfigError(
                f"optimizer: {kind} has weights to train and weights to evaluate, between which train() and eval() "
                f"switch, but under {strategy} it makes its steps elsewhere; choose a strategy whose learners step "
                "themselves, such as adpsgd, or another optimizer"
            )
        if isinstance(member, torch.optim.SparseAdam):
            raise ConfigError(
                f"optimizer: {kind} needs sparse gradients, and under {strategy} they travel as whole vectors; choose "
                "Adam, or a strategy whose learners step themselves, such as adpsgd"
            )


def check_modules(model: nn.Module, strategy: str, is_in_step: bool) -> None:
    """Raise `ConfigError` for modules that average gradients themselves, or communicate although learners are not in
    step; warn of metrics that do so when they are computed."""
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            raise ConfigError(
                f"model: {name} is a DistributedDataParallel, which averages gradients; use its `.module`"
            )
        if isinstance(module, nn.SyncBatchNorm) and not is_in_step:
            raise ConfigError(
                f"model: {name or 'it'} is a SyncBatchNorm, which waits for all learners in each forward pass; under "
                f"{strategy} they are not in step: use BatchNorm (`consensus` averages its statistics), or allreduce"
            )
    metrics = [name for name, module in model.named_modules() if getattr(module, "sync_on_compute", False) is True]
    if metrics and not is_in_step:
        warnings.warn(
            f"model: {', '.join(metrics[:5])}: torchmetrics exchange their states in compute(), which makes learners "
            f"wait for each other under {strategy}; create them with sync_on_compute=False",
            RuntimeWarning,
            stacklevel=3,
        )


def warn_of_samplers(loaders: Iterable[object], strategy: str) -> None:
    """Warn of a `DistributedSampler`, which gives a slow learner as much work as a fast one."""
    for loader in loaders:
        samplers = [getattr(each, "sampler", None) for each in (loader, getattr(loader, "batch_sampler", None))]
        if any(isinstance(sampler, DistributedSampler) for sampler in samplers):
            warnings.warn(
                f"the data has a DistributedSampler: it gives all learners equal shares, so that under {strategy} the "
                "fast ones end first; use starling.SharedSampler, whose samples go to the learner that asks first",
                RuntimeWarning,
                stacklevel=3,
            )
            return
