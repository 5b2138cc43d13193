"""What brings asynchronous learners back into step is found, and named with its remedy."""

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import starling
from starling.errors import ConfigError, ProtocolError
from starling.launch.joining import check_modules


def wrapped() -> DistributedDataParallel:
    """Without a process group, which its constructor needs."""
    found = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(found)
    return found


@pytest.mark.parametrize("strategy", ["adpsgd", "allreduce"])
def test_a_model_or_a_part_left_in_ddp_is_refused_under_any_strategy(strategy: str) -> None:
    """It averages gradients itself."""
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    for model in (wrapped(), nn.Sequential(nn.Linear(1, 1), wrapped())):
        with pytest.raises(ConfigError, match=r"DistributedDataParallel, which averages gradients; use its `\.module`"):
            starling.join(model, optimizer, strategy)


def test_sync_batch_norm_is_refused_where_learners_are_not_in_step() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))
    with pytest.raises(ConfigError, match=r"1 is a SyncBatchNorm, .* use BatchNorm"):
        check_modules(model, "adpsgd", is_in_step=False)
    check_modules(model, "allreduce", is_in_step=True)


def test_metrics_that_exchange_their_states_are_named() -> None:
    """As those of torchmetrics, which have this attribute."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Identity())
    model[1].sync_on_compute = True  # type: ignore[assignment]
    with pytest.warns(RuntimeWarning, match=r"model: 1: torchmetrics .* sync_on_compute=False"):
        check_modules(model, "adpsgd", is_in_step=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_modules(model, "allreduce", is_in_step=True)


def test_an_error_shows_the_loops_line_and_not_the_engine() -> None:
    """The loop, `step`, and the two calls that hide the frames below; no earlier error above it."""
    model = nn.Linear(2, 1)
    with starling.join(model, torch.optim.SGD(model.parameters(), lr=0.1)) as learner:
        with learner.consensus(final=True):
            pass
        with pytest.raises(ProtocolError, match="has finished") as caught:
            learner.step()
    assert [Path(entry.path).name for entry in caught.traceback][1:] == [
        "joined.py",
        "life.py",
    ]
    assert caught.value.__cause__ is None
