"""The plan by which tensor parallelism cuts a model: the model declares it as `tensor_plan`.

A plan is what torch's `parallelize_module` takes: names of modules, with wildcards, and how each is cut. `tensor_plan`
is such a mapping, or a method that returns it.
"""

from collections.abc import Mapping
from fnmatch import fnmatch
from typing import TYPE_CHECKING

from torch import nn

from starling.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


def tensor_plan(model: nn.Module) -> dict[str, "ParallelStyle"]:
    """How a model is cut. Raises ConfigError if it does not say so, or names modules that it does not have."""
    declared = getattr(model, "tensor_plan", None)
    plan = declared() if callable(declared) else declared
    if not isinstance(plan, Mapping) or not plan:
        raise ConfigError(
            f"island.tensor: {type(model).__name__} does not say which layers can be cut; give it a method tensor_plan "
            'that returns a plan of torch.distributed.tensor.parallel, such as {"output": '
            "ColwiseParallel(output_layouts=Replicate())}, or use island.sharded"
        )
    for key in plan:
        if not modules_of(model, key):
            raise ConfigError(f"island.tensor: tensor_plan names {key}, which {type(model).__name__} does not have")
    return dict(plan)


def modules_of(model: nn.Module, key: str) -> list[nn.Module]:
    """The modules that a key of a plan names."""
    wanted = key.split(".")
    return [
        module
        for name, module in model.named_modules()
        if len(parts := name.split(".")) == len(wanted) and all(map(fnmatch, parts, wanted))
    ]
