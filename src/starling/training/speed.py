"""How fast this machine computes gradients."""

import copy
import time
from statistics import median
from typing import Any

import torch
from torch import nn

from starling.workload import Ticket, Workload

Seconds = float
LEAST_PASSES, LEAST_SECONDS = 3, 0.5
"""How often, and for how long, a gradient is measured: a fast one often, because other programs disturb single ones."""


def measured_seconds(workload: Workload[Any], model: nn.Module, device: torch.device) -> Seconds:
    """How long the gradient of the first mini-batch takes here: the median of some, after a first one. `model` does not
    change."""
    batch = [examples.to(device) for examples in workload.load(Ticket(0, 0, 0))]
    model = copy.deepcopy(model)
    found: list[Seconds] = []
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        while len(found) <= LEAST_PASSES or sum(found) < LEAST_SECONDS:
            begin = time.perf_counter()
            for examples in batch:
                workload.loss(model, examples).backward()  # type: ignore[no-untyped-call]
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            found.append(time.perf_counter() - begin)
    return max(1e-9, median(found[1:]))
