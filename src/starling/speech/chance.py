"""Reproducible results with libraries that use global state: random generators and the number of threads."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def borrowed_generators(seed: int) -> Iterator[None]:
    """Within this context the global generators of Python, NumPy and torch's CPU are seeded; then they are restored."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.default_generator.set_state(cpu)


@contextmanager
def one_thread() -> Iterator[None]:
    """Within this context torch uses one thread: the last bits of sums depend on the number of threads."""
    threads = torch.get_num_threads()
    if threads != 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if threads != 1:
            torch.set_num_threads(threads)
