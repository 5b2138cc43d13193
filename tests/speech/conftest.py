"""Fixtures that all tests of speech share."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="package", autouse=True)
def one_thread_is_enough() -> Iterator[None]:
    """Tiny networks on a busy machine lose far more time to threads waiting for each other than they gain."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
