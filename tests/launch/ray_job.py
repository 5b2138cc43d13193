"""A toy job for learners on Ray: it takes its time until a file says that it may hurry."""

import time
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import starling

EPOCHS, BATCHES = 6, 60


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))


def loss(slow: Path, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Slow for as long as the file `slow` exists."""
    if slow.exists():
        time.sleep(0.4)
    points, labels = batch
    return nn.functional.cross_entropy(model(points), labels)


def make_job(slow: Path, strategy: str = "adpsgd", epochs: int = EPOCHS) -> starling.Job:
    """Points and their quadrants, in `BATCHES` mini-batches each epoch."""
    points = torch.randn(20 * BATCHES, 2, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(points, (points.prod(dim=1) > 0).long())
    chosen = starling.STRATEGIES[strategy]
    return starling.Job(
        starling.DataWorkload(make_model, partial(loss, slow), data, batch_size=20),
        chosen,
        starling.Budget(epochs=epochs),
        partial(torch.optim.SGD, lr=0.1),
        options=chosen.options(),
    )
