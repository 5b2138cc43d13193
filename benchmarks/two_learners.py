"""Two learners under `allreduce` against tuned DistributedDataParallel, step by step in the same two processes."""

import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.measuring import Bar, median_speed_up, milliseconds_of_both
from benchmarks.plain_loop import plain_loop, tickets_of
from benchmarks.training import SideBySide, job_for
from benchmarks.tuned_ddp import tuned_ddp
from starling.engines.processes.member import run_learner
from starling.engines.processes.place import choose_device
from starling.launch.launcher import launch
from starling.launch.link import Link, reported_errors
from starling.launch.messages import Activity, LearnerMessage, values_of
from starling.launch.rendezvous import find_place

WORLD, STEPS = 2, 600


def measure(folder: Path) -> Bar:
    """Throughput as a share of DDP's."""
    pairs: list[tuple[float, float]] = []
    command = [sys.executable, "-m", "benchmarks.two_learners", str(folder)]

    def on_message(rank: int, message: LearnerMessage) -> None:
        told: dict[str, Any] = dict(values_of(message))
        pairs.extend((own, others) for own, others in told.get("pairs", []))

    launch(command, WORLD, folder / "log", on_message)
    name, devices = "two learners, allreduce / DDP, throughput", torch.cuda.device_count()
    if devices > 0:
        name += f", {'by NCCL' if devices >= WORLD else 'on one CUDA device by gloo'}"
    return Bar.at_least(name, median_speed_up(pairs), 0.97, milliseconds_of_both(pairs))


def measure_as_learner(folder: Path) -> list[tuple[float, float]]:
    """This learner's seconds for each step of both; those of learner 0 are reported."""
    torch.set_num_threads(1)
    place = find_place()
    device = choose_device("auto", place)
    job = job_for(folder, learners=place.world, steps=STEPS)
    tickets = tickets_of(job, STEPS, place.rank, place.world)
    both = SideBySide(plain_loop(job, tickets, device, wrap=tuned_ddp), device)
    run_learner(job, place, device, "bench", both)
    return both.pairs if place.rank == 0 else []


if __name__ == "__main__":
    link = Link.from_environment()
    with reported_errors(link):
        measured = measure_as_learner(Path(sys.argv[1]))
        if link is not None:
            link.send(Activity(values={"pairs": [list(pair) for pair in measured]}))
