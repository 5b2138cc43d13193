"""Audio that kills the process that reads it, like a lack of memory; a module that the nodes of a cluster import."""

import os
import signal
from pathlib import Path

import numpy as np

RATE = 8000


def read_or_die(mark: Path | None) -> tuple[np.ndarray, int]:
    """The first process that reads the audio makes the file `mark` and dies, and the others hear a tone; without a
    file, every process dies."""
    if mark is None or not mark.exists():
        if mark is not None:
            mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return np.sin(np.arange(RATE // 2) * 0.3).astype(np.float32) * 0.3, RATE
