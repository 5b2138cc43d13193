"""Other libraries' loops: under `allreduce` against their own DistributedDataParallel, and next to a slow process."""

import json
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.measuring import Bar, median_speed_up, milliseconds_of_both
from benchmarks.starting import Program, run_side_by_side
from starling.launch.launcher import loopback_store
from starling.launch.rendezvous import loopback_interface

ROUNDS = 3
HOSTS = {"lightning": "Lightning", "huggingface": "transformers.Trainer", "accelerate": "accelerate"}


def measure(folder: Path) -> list[Bar]:
    """Throughput of each adapter as a share of the host's own, and throughput of a fast learner as a share of a lone
    learner's."""
    bars = []
    for host, name in HOSTS.items():
        pairs = noted(host, 2, folder)
        ratio, detail = median_speed_up(pairs), milliseconds_of_both(pairs)
        bars.append(Bar.at_least(f"{name}, two learners, allreduce / its own DDP, throughput", ratio, 0.97, detail))
    alone, beside = [], []
    for _ in range(ROUNDS):
        alone.append(noted("slow", 1, folder)[0][0])
        beside.append(noted("slow", 2, folder)[0][0])
    ratio = median(one / other for one, other in zip(alone, beside, strict=True))
    detail = f"{1000 * median(beside):.1f} and {1000 * median(alone):.1f} ms a step"
    bars.append(
        Bar.at_least("Lightning, adpsgd, one of two processes 10x slower: the fast one / alone", ratio, 0.95, detail)
    )
    return bars


def noted(host: str, world: int, folder: Path) -> list[tuple[float, float]]:
    """Seconds per step of learner 0, by round: ours, and the host's own."""
    with TemporaryDirectory(dir=folder) as name, loopback_store() as port:
        notes = [Path(name) / f"{rank}.json" for rank in range(world)]
        programs = [
            Program(
                [sys.executable, "-m", "benchmarks.adapter_process", host, str(note)],
                {
                    "RANK": rank,
                    "LOCAL_RANK": rank,
                    "WORLD_SIZE": world,
                    "LOCAL_WORLD_SIZE": world,
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                    "TORCHELASTIC_USE_AGENT_STORE": True,
                    "GLOO_SOCKET_IFNAME": loopback_interface(),
                },
            )
            for rank, note in enumerate(notes)
        ]
        run_side_by_side(programs, Path(name))
        return [tuple(pair) for pair in json.loads(notes[0].read_text())]
