"""One learner of Starling against a bare PyTorch loop of the same model and data."""

import sys
from pathlib import Path

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from benchmarks.measuring import Bar, alternate, median_speed_up
from benchmarks.training import Stopwatch, job_for, plain_loop, tickets_of
from starling.engines.processes import Place, run_learner
from starling.experiment.observers import LOG_EVERY, Log, Metered, Together

STEPS, ROUNDS = 43, 7


def measure(folder: Path, device: torch.device) -> Bar:
    """Throughput as a share of the bare loop's."""
    job = job_for(folder, learners=1, steps=STEPS)
    tickets = list(tickets_of(job, STEPS, rank=0, world=1))

    def ours() -> float:
        watch = Stopwatch(device)
        with (folder / "one_learner.log").open("w") as log:
            logged = Metered(Log(log), 1, LOG_EVERY)
            run_learner(job, Place(0, 1, 0, 1, HashStore()), device, "bench", Together([logged, watch]))
        return watch.seconds

    def theirs() -> float:
        return plain_loop(job, tickets, device).seconds

    pairs = alternate(ours, theirs, ROUNDS)
    sys.stderr.write(f"one learner, bare loop (s): {[(round(a, 3), round(b, 3)) for a, b in pairs]}\n")
    return Bar.at_least("one learner / bare PyTorch loop, throughput", median_speed_up(pairs), 0.97)
