"""Same seed, same bits: seeds, and loans of what libraries take from global state."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def derive_seed(*parts: int) -> int:
    """A 63-bit seed that depends on all `parts` (each >= 0) and on nothing else.

    `derive_seed(run_seed, epoch, batch_index)` is the seed of one batch, whichever process loads it.
    """
    low, high = np.random.SeedSequence(parts).generate_state(2, np.uint32)
    return int(low) | (int(high) & 0x7FFFFFFF) << 32


@contextmanager
def borrowed_generators(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Seed the global generators of Python, NumPy and torch for a while, then put their states back.

    The CPU generator of torch is always borrowed, the one of `device` as well when it is a CUDA device.
    """
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    index = 0 if device is None or device.index is None else device.index
    cuda = torch.cuda.get_rng_state(index) if device is not None and device.type == "cuda" else None
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)
    if cuda is not None:
        torch.cuda.default_generators[index].manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.default_generator.set_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, index)


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute on one thread for a while: sums split over several threads have other last bits."""
    threads = torch.get_num_threads()
    if threads != 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if threads != 1:
            torch.set_num_threads(threads)
