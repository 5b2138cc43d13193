"""The time that learners take to start, from `launch` to the first gradient of the last one, beside bare torch
processes."""

import json
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.measuring import Bar
from benchmarks.perceptron import SMALL
from benchmarks.runs import Run, Seconds
from benchmarks.starting import Program, launched, run_side_by_side
from starling.launch.launcher import loopback_store
from starling.launch.rendezvous import loopback_interface

ROUNDS, WORLDS = 3, (2, 4, 8)
RUN_SECONDS, GRADIENT_SECONDS = 0.5, 0.05
"""Seconds of a run, and of a gradient. A learner that is ready first waits for an emulated device, and takes no
processor time from learners that are still starting."""


def measure(folder: Path) -> list[Bar]:
    """Seconds under `adpsgd` / seconds of programs that import torch, meet through gloo and compute a gradient in
    DDP."""
    bars = []
    for world in WORLDS:
        pairs = []
        for number in range(ROUNDS):
            before = bare_seconds(world, folder) if number % 2 else None
            ours = our_seconds(world, folder)
            pairs.append((ours, bare_seconds(world, folder) if before is None else before))
        bars.append(
            Bar.at_most(
                f"start of {world} learners, adpsgd / bare torch processes, seconds",
                median(ours / bare for ours, bare in pairs),
                1.5,
                f"{median(ours for ours, _ in pairs):.1f} s and {median(bare for _, bare in pairs):.1f} s",
            )
        )
    return bars


def our_seconds(world: int, folder: Path) -> Seconds:
    """Seconds from `launch` to the first gradient of the last learner."""
    begin = time.monotonic()
    (outcomes,) = launched(
        [Run("adpsgd", world, widths=SMALL, gradient_seconds=GRADIENT_SECONDS, seconds=RUN_SECONDS)], folder
    )
    return max(outcome.stamps[0] for outcome in outcomes) - begin


def bare_seconds(world: int, folder: Path) -> Seconds:
    """Seconds from launch to the last gradient without Starling; the store is on the loopback interface, as ours is."""
    with TemporaryDirectory(dir=folder) as name, loopback_store() as port:
        notes = [Path(name) / f"first-{rank}.json" for rank in range(world)]
        programs = [
            Program(
                [sys.executable, "-m", "benchmarks.bare_torch", str(note)],
                {
                    "RANK": rank,
                    "WORLD_SIZE": world,
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                    "TORCHELASTIC_USE_AGENT_STORE": True,
                    "GLOO_SOCKET_IFNAME": loopback_interface(),
                },
            )
            for rank, note in enumerate(notes)
        ]
        begin = time.monotonic()
        run_side_by_side(programs, Path(name))
        return max(json.loads(note.read_text()) for note in notes) - begin
