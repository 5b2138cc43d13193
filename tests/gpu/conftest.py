"""What only a CUDA device can show. `make gpu` runs it; elsewhere it is skipped."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def device() -> torch.device:
    """The device that all learners of a test share."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here; run `make gpu` where there is one")
    return torch.device("cuda", 0)


@pytest.fixture
def two_devices() -> None:
    """Two NCCL ranks cannot share a device."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two CUDA devices, found {torch.cuda.device_count()}")
