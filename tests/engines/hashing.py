"""What a program prints where Python hashes otherwise than here."""

import os
import subprocess
import sys

import torch

_OTHER_SEED = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
"""By which this process does not hash: it was given another, or none and hashes at random."""


def printed_under_another_hash(program: str) -> str:
    """The line that a Python program prints, with as many threads as this process has: sums are ordered by them."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": _OTHER_SEED, "OMP_NUM_THREADS": str(torch.get_num_threads())},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.removesuffix("\n")
