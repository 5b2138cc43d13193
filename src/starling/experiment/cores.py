"""The number of cores that this process may use, and torch's number of threads."""

import os
from typing import TYPE_CHECKING

import torch

from starling.launch.link import NODE_CPUS

if TYPE_CHECKING:
    from starling.recipe.run import RunConfig


def use_threads(run: "RunConfig", learners_here: int) -> None:
    """Set torch's number of threads: `engine.threads`, or this learner's share of the cores."""
    torch.set_num_threads(run.engine.threads or max(1, cores_here() // learners_here))


def cores_here() -> int:
    """The number of cores that this process may use: on a Ray cluster, at most the node's CPUs."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, int(os.environ.get(NODE_CPUS, cores)))
