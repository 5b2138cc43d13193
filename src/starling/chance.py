"""Seeds that are a pure function of their purpose, so that random choices never depend on the order of learners.

Libraries use global state (random generators and a number of threads), which is changed for them and then restored.
"""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager


def derive_seed(seed: int, *purpose: str | int) -> int:
    """A seed in [0, 2^63) for one purpose, e.g. `derive_seed(run_seed, "dropout", epoch, index)`."""
    text = "/".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def derive_seeds(seed: int, purpose: str, count: int) -> list[int]:
    """The seeds of places 0 to `count - 1` for one purpose: `derive_seed(seed, purpose, place)`."""
    return [derive_seed(seed, purpose, place) for place in range(count)]


@contextmanager
def borrowed_generators(seed: int) -> Iterator[None]:
    """Within this context the global generators of Python, NumPy and torch's CPU are seeded; then they are restored."""
    import numpy as np
    import torch

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
    import torch

    threads = torch.get_num_threads()
    if threads != 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if threads != 1:
            torch.set_num_threads(threads)
