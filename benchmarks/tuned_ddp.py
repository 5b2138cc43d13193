"""DistributedDataParallel at its best, wherever it is the rival."""

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

BUCKET_MEGABYTES = 25
"""Its default; `python -m benchmarks.peers --options '{"ddp": {"bucket_cap_mb": 8}}'` measures with another."""


def tuned_ddp(model: nn.Module, **options: Any) -> DistributedDataParallel:
    """`model` in DDP whose gradients are views into its buckets: it saves a copy of every gradient."""
    return DistributedDataParallel(
        model, **{"gradient_as_bucket_view": True, "bucket_cap_mb": BUCKET_MEGABYTES, **options}
    )
