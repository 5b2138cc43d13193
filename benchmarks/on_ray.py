"""Learners on a Ray cluster on this machine: their throughput beside local learners, and the pause after a node is
lost."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from benchmarks.measuring import Bar, median_speed_up
from benchmarks.perceptron import LARGE, SMALL
from benchmarks.ray_cluster import ray_cluster
from benchmarks.runs import Run
from benchmarks.starting import launched
from benchmarks.surviving import Killing, Moments, Seconds
from starling.engines.processes.member import run_learner
from starling.engines.processes.place import choose_device
from starling.launch.joiners import Changes
from starling.launch.launcher import launch, this_machine
from starling.launch.link import Link, reported_errors
from starling.launch.messages import Activity
from starling.launch.on_ray import RayMachines
from starling.launch.process import Machines
from starling.launch.rendezvous import find_membership, find_place
from starling.launch.roster import Roster

PAIRS, SECONDS = 4, 10.0
"""Number of pairs of throughput measurements, and seconds of each run."""
WORLD, STEPS, KILLED_AT, REPEATS = 4, 900, 200, 3
GRADIENT_SECONDS = 0.05
"""Seconds of a gradient on an emulated device, so that learners do not wait for this machine's cores."""
LONGEST = {"adpsgd": 2.0, "allreduce": 5.0}
"""Longest pause of survivors in seconds."""


def measure(folder: Path) -> list[Bar]:
    """Bars for Ray / local, with everything else the same."""
    with ray_cluster() as cluster:
        cluster.add(num_cpus=2)
        bars = [_throughput(folder, RayMachines(cluster.address))]
        for strategy, longest in LONGEST.items():
            nodes, learners = [], []
            for number in range(REPEATS):
                node = cluster.add(num_cpus=2)
                machines, log = RayMachines(cluster.address), folder / f"{strategy}-{number}"
                name = node.node_id[:8]
                learners += _pauses(machines, log / "1", strategy, name, lambda pid: os.kill(pid, signal.SIGKILL), 1)
                nodes += _pauses(machines, log / "2", strategy, name, lambda pid, node=node: cluster.kill(node), 2)
            bars.append(
                Bar.at_most(
                    f"4 learners on 2 Ray nodes, {strategy}: longest pause after a node's death, s / {longest:g} s",
                    max(nodes) / longest,
                    1.0,
                    f"{max(nodes):.2f} s, median {median(nodes):.2f} s; after one learner's death "
                    f"{max(learners):.2f} s, median {median(learners):.2f} s",
                )
            )
    return bars


def _throughput(folder: Path, ray: Machines) -> Bar:
    """Gradients per second of two learners in step, from the third gradient to the last."""
    run = Run("allreduce", 2, widths=LARGE, seconds=SECONDS)

    def seconds_per_step(machines: Machines) -> Seconds:
        (outcomes,) = launched([run], folder, machines)
        return 1.0 / sum(outcome.rate for outcome in outcomes)

    pairs = []
    for number in range(PAIRS):
        order = (ray, this_machine) if number % 2 == 0 else (this_machine, ray)
        taken = {machines is ray: seconds_per_step(machines) for machines in order}
        pairs.append((taken[True], taken[False]))
    rates = [1.0 / median(column) for column in zip(*pairs, strict=True)]
    name = "two learners, allreduce: throughput on Ray / local"
    return Bar.at_least(name, median_speed_up(pairs), 0.97, f"{rates[0]:.1f} and {rates[1]:.1f} gradients/s")


def _pauses(
    machines: Machines, folder: Path, strategy: str, node: str, kill: Callable[[int], None], num_lost: int
) -> list[Seconds]:
    """The longest pause of each survivor; `kill` is called with the process id of a learner on `node`."""
    roster = Roster(WORLD)

    def kill_one(pids: dict[int, int]) -> None:
        kill(next(pid for each, pid in pids.items() if node in roster.learners[each].process.node))

    killing = Killing(WORLD, KILLED_AT, kill_one)
    command = [sys.executable, "-m", "benchmarks.on_ray", strategy]
    losses = launch(command, WORLD, folder, killing.on_message, Changes("continue"), roster, machines)
    lost = {loss.learner for loss in losses}
    if len(lost) != num_lost:
        raise RuntimeError(f"{len(lost)} learners were lost, not {num_lost}")
    return killing.pauses(lost)


def _learn(strategy: str, link: Link) -> None:
    torch.set_num_threads(1)
    place = find_place()
    link.send(Activity(values={"pid": os.getpid()}))
    job = Run(strategy, WORLD, widths=SMALL, gradient_seconds=GRADIENT_SECONDS, steps=STEPS).job()
    device = choose_device("auto", place)
    run_learner(job, place, device, "bench", Moments(link), membership=find_membership(place, link))


if __name__ == "__main__":
    own = Link.from_environment()
    with reported_errors(own):
        if own is not None:
            _learn(sys.argv[1], own)
