"""File systems that a test mounts for itself, out of sight of everybody else."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run_with(mount: str, program: str, timeout: float = 100.0) -> str:
    """What a Python program prints that sees what the shell command `mount` mounts. Skips the test where it cannot."""
    script = f'{mount} && echo mounted && exec {sys.executable} -c "$1"'
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh", program]
    try:
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)
    except FileNotFoundError:
        pytest.skip("no unshare here")
    if "mounted" not in run.stdout:
        pytest.skip(f"nothing can be mounted here: {run.stderr}")
    assert run.returncode == 0, run.stderr
    return run.stdout


def small_disk(folder: Path, size: str) -> str:
    """The command that mounts a disk of `size`, such as 64m, on a folder."""
    return f"mount -t tmpfs -o size={size} tmpfs {folder}"
