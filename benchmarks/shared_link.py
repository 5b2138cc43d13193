"""The time of messages between two nodes of two learners on a throttled link that they share; learners only exchange.

Run as `python -m benchmarks.shared_link [CONGESTION_CONTROL]`. It has no bar; it explains what `calibration` finds.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.calibration import NUM_PARAMETERS, PORT, THROTTLE, WORLD
from benchmarks.namespaces import INTERFACE, joined_namespaces
from benchmarks.starting import Program, run_side_by_side
from starling.topology import find_topology

ROUNDS = 30
HALF = WORLD // 2
Peers = Callable[[int, int], Sequence[int]]
"""A function that returns the learners with which a learner exchanges, by round and rank."""


def across(rank: int, others: Sequence[int]) -> list[int]:
    """The others that are in the other node."""
    return [other for other in others if other // HALF != rank // HALF]


def patterns() -> dict[str, Peers]:
    """The exchanges by name, without those inside a node."""
    rings = find_topology("random", WORLD, seed=0)
    return {
        "one pair": lambda k, rank: [(rank + HALF) % WORLD] if rank % HALF == 0 else [],
        "two pairs at once": lambda k, rank: [(rank + HALF) % WORLD],
        "random rings": lambda k, rank: across(rank, sorted(rings.sources(k, rank))),
    }


def exchange(rank: int, note: Path) -> None:
    """Act as a learner; the first one writes the lines of the table."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=100.0))
    mine, lines = torch.zeros(NUM_PARAMETERS), []
    for name, peers_of in patterns().items():
        dist.barrier()
        begin = time.monotonic()
        for k in range(ROUNDS):
            peers = peers_of(k, rank)
            theirs = [torch.empty_like(mine) for _ in peers]
            receiving = [dist.irecv(tensor, peer, tag=k) for tensor, peer in zip(theirs, peers, strict=True)]
            sending = [dist.isend(mine, peer, tag=k) for peer in peers]
            for work in (*receiving, *sending):
                if work is not None:
                    work.wait()
        dist.barrier()
        seconds = (time.monotonic() - begin) / ROUNDS
        num_messages = sum(len(peers_of(k, each)) for k in range(ROUNDS) for each in range(HALF)) / ROUNDS
        lines.append(
            f"{name}: {seconds:.3f} s a round, {num_messages:.2f} messages in each direction, "
            f"{seconds / num_messages:.3f} s a message"
        )
    if rank == 0:
        note.write_text("\n".join(lines) + "\n")


def main(congestion_control: str) -> None:
    with (
        tempfile.TemporaryDirectory() as name,
        joined_namespaces(replace(THROTTLE, congestion_control=congestion_control)) as ends,
    ):
        note = Path(name) / "note"
        programs = [
            Program(
                ends[rank // HALF].inside([sys.executable, "-m", "benchmarks.shared_link", "--rank", str(note)]),
                {
                    "RANK": rank,
                    "WORLD_SIZE": WORLD,
                    "MASTER_ADDR": ends[0].address,
                    "MASTER_PORT": PORT,
                    "GLOO_SOCKET_IFNAME": INTERFACE,
                    "OMP_NUM_THREADS": 1,
                },
            )
            for rank in range(WORLD)
        ]
        run_side_by_side(programs, Path(name))
        sys.stdout.write(note.read_text())


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        exchange(int(os.environ["RANK"]), Path(sys.argv[2]))
    else:
        main(sys.argv[1] if len(sys.argv) > 1 else "cubic")
