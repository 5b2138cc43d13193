"""Which layers of the acoustic models are cut by tensor parallelism, as torch's `parallelize_module` takes it."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.nn import functional as F


class CutDropout(ParallelStyle):
    """Dropout of units that are cut along the last dimension: each rank draws for all units what a whole model would,
    and applies its own part."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, nn.Dropout):
            raise TypeError(f"CutDropout applies to nn.Dropout, not to {type(module).__name__}")
        size, member, dropout = device_mesh.size(), device_mesh.get_local_rank(), module

        def forward(units: torch.Tensor) -> torch.Tensor:
            if not dropout.training or dropout.p == 0.0:
                return units
            ones = torch.ones(*units.shape[:-1], size * units.shape[-1], device=units.device, dtype=units.dtype)
            return units * F.dropout(ones, dropout.p).chunk(size, -1)[member]

        module.forward = forward  # type: ignore[assignment,method-assign]
        return module


def plan_of(network: nn.Module) -> dict[str, ParallelStyle]:
    """The output layer by outputs, whose results all ranks get; and feed-forward parts (modules with `widening`,
    `wide_dropout` and `narrowing`) by their inner units. Everything else is whole on all ranks."""
    plan: dict[str, ParallelStyle] = {"output": ColwiseParallel(output_layouts=Replicate())}
    for name, module in network.named_modules():
        if hasattr(module, "narrowing"):
            plan[f"{name}.widening"] = ColwiseParallel()
            plan[f"{name}.wide_dropout"] = CutDropout()
            plan[f"{name}.narrowing"] = RowwiseParallel()
    return plan
