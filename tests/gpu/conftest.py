"""What only a CUDA device can show. `make gpu` runs it; elsewhere it is skipped.

`make test-all` rehearses on the CPU those tests that need nothing of CUDA but the device, so that they do not go stale.
"""

import os

import pytest
import torch


@pytest.fixture(scope="session")
def cuda() -> torch.device:
    """The CUDA device that all learners of a test share."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here; run `make gpu` where there is one")
    return torch.device("cuda", 0)


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """That device, or in a rehearsal the CPU."""
    if os.environ.get("STARLING_REHEARSAL") and not torch.cuda.is_available():
        return torch.device("cpu")
    found: torch.device = request.getfixturevalue("cuda")
    return found


@pytest.fixture
def two_devices(cuda: torch.device) -> None:
    """Two NCCL ranks cannot share a device."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two CUDA devices, found {torch.cuda.device_count()}")
