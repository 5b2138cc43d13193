"""How long the code under test computes."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def computing_below(seconds: float) -> Iterator[None]:
    """What follows takes less processor time in this thread. Threads of other tests do not count, nor their garbage."""
    gc.disable()
    began = time.thread_time()
    try:
        yield
        took = time.thread_time() - began
    finally:
        gc.enable()
    assert took < seconds, f"{took:.3f} s"
