"""DistributedDataParallel at its best, for all benchmarks in which it is the rival."""

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

BUCKET_MEGABYTES = 25
"""DDP's default; `python -m benchmarks.peers --options '{"ddp": {"bucket_cap_mb": 8}}'` measures with another value."""


def tuned_ddp(model: nn.Module, **options: Any) -> DistributedDataParallel:
    """`model` in DDP whose gradients are views into its buckets, which saves a copy of every gradient."""
    return DistributedDataParallel(
        model, **{"gradient_as_bucket_view": True, "bucket_cap_mb": BUCKET_MEGABYTES, **options}
    )
