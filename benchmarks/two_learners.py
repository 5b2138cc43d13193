"""Two learners under `allreduce` against plain DistributedDataParallel, in the same two processes by turns."""

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.nn.parallel import DistributedDataParallel

from benchmarks.measuring import Bar, alternate, median_speed_up
from benchmarks.training import Stopwatch, job_for, plain_loop, tickets_of
from starling.engines.processes import Place, choose_device, run_learner
from starling.launch.launcher import launch
from starling.launch.link import Link, reported_errors
from starling.launch.rendezvous import find_place

WORLD, STEPS, ROUNDS = 2, 56, 7


def measure(folder: Path) -> Bar:
    """Throughput as a share of DDP's."""
    pairs: list[tuple[float, float]] = []
    command = [sys.executable, "-m", "benchmarks.two_learners", str(folder)]
    launch(command, WORLD, folder / "log", lambda rank, message: pairs.extend(message.get("pairs", [])))
    sys.stderr.write(f"allreduce, DDP (s): {[(round(a, 3), round(b, 3)) for a, b in pairs]}\n")
    return Bar.at_least("two learners, allreduce / plain DDP, throughput", median_speed_up(pairs), 0.97)


def measure_as_learner(folder: Path, place: Place) -> list[tuple[float, float]]:
    """This learner's times of both, by turns."""
    torch.set_num_threads(1)
    device = choose_device("auto", place)
    job = job_for(folder, learners=place.world, steps=STEPS)
    tickets = list(tickets_of(job, STEPS, place.rank, place.world))
    runs = iter(range(1000))

    def fresh_place() -> Place:
        store = PrefixStore(f"run{next(runs)}", place.store)
        return Place(place.rank, place.world, place.local_rank, place.local_world, store)

    def ours() -> float:
        watch = Stopwatch(device)
        run_learner(job, fresh_place(), device, "bench", watch)
        return watch.seconds

    def theirs() -> float:
        alone = device.type == "cuda" and place.local_world <= torch.cuda.device_count()
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if alone else "gloo",
            store=fresh_place().store,
            rank=place.rank,
            world_size=place.world,
            timeout=timedelta(seconds=60),
        )
        watch = plain_loop(job, tickets, device, wrap=DistributedDataParallel)
        dist.barrier()
        dist.destroy_process_group()
        return watch.seconds

    return alternate(ours, theirs, ROUNDS)


if __name__ == "__main__":
    link = Link.from_environment()
    with reported_errors(link):
        own = find_place()
        measured = measure_as_learner(Path(sys.argv[1]), own)
        if link is not None and own.rank == 0:
            link.send({"pairs": measured})
