"""What a loop still has from its life under DistributedDataParallel, and what would harm learners."""

import warnings
from collections.abc import Iterable

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler

from starling.errors import ConfigError


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
