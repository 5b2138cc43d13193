"""The cores of this machine, and how many of them torch uses."""

import os

import torch

from starling.runs.recipe.run import RunConfig


def use_threads(run: RunConfig, learners_here: int) -> None:
    """Give torch its share of this machine's cores."""
    torch.set_num_threads(run.engine.threads or max(1, cores_here() // learners_here))


def cores_here() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
