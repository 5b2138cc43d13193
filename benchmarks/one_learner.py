"""One learner of Starling against a bare PyTorch loop with the same model and data."""

from pathlib import Path

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from benchmarks.measuring import Bar, median_speed_up, milliseconds_of_both
from benchmarks.plain_loop import plain_loop, tickets_of
from benchmarks.training import SideBySide, job_for
from starling.engines.processes.member import run_learner
from starling.engines.processes.place import Place
from starling.experiment.observers import Log, Paced, Recorder, Together
from starling.timeouts import LOG_EVERY

STEPS = 800


def measure(folder: Path, device: torch.device) -> Bar:
    """Throughput as a share of the bare loop's, record and log included."""
    job = job_for(folder, learners=1, steps=STEPS)
    both = SideBySide(plain_loop(job, tickets_of(job, STEPS, rank=0, world=1), device), device)
    with (folder / "one_learner.log").open("w") as log:
        logged = Recorder(folder)
        logged.readers = [Paced(Log(log, 1), LOG_EVERY)]
        run_learner(job, Place(0, 1, 0, 1, HashStore()), device, "bench", Together([logged, both]))
    name = "one learner / bare PyTorch loop, throughput"
    return Bar.at_least(name, median_speed_up(both.pairs), 0.97, milliseconds_of_both(both.pairs))
