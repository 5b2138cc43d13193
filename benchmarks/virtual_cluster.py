"""What the virtual engine costs beside the gradients that it computes."""

import sys
import time
from pathlib import Path
from statistics import median

import torch

from benchmarks.measuring import Bar, alternate
from benchmarks.training import job_for
from starling.engines.cluster import Cluster, ComputeModel
from starling.engines.virtual import VirtualEngine
from starling.workload import Ticket

WORLD, STEPS, ROUNDS = 64, 128, 5


def measure(folder: Path, device: torch.device) -> list[Bar]:
    """The engine's overhead over the gradients alone with 64 learners, and its own time per 1,000 events."""
    job = job_for(folder, learners=WORLD, steps=STEPS, strategy="delay-by-one")
    cluster = Cluster(compute=ComputeModel(distribution="log-normal", spread=0.3))
    num_events: list[int] = []

    def engine() -> float:
        begin = time.perf_counter()
        num_events.append(VirtualEngine(job, WORLD, cluster, device=device).run().num_events)
        return time.perf_counter() - begin

    def gradients() -> float:
        model = job.workload.make_model().to(device)
        num_batches = job.workload.num_batches(0)
        begin = time.perf_counter()
        for step in range(STEPS):
            for batch in job.workload.load(Ticket(step // num_batches, step % num_batches, step)):
                model.zero_grad()
                loss = job.workload.loss(model, batch.to(device))
                loss.backward()
                loss.item()
        return time.perf_counter() - begin

    pairs = alternate(engine, gradients, ROUNDS)
    sys.stderr.write(f"virtual engine, gradients alone (s): {[(round(a, 3), round(b, 3)) for a, b in pairs]}\n")
    overhead = median((ours - alone) / alone for ours, alone in pairs)
    per_event = median((ours - alone) / num_events[0] for ours, alone in pairs)
    return [
        Bar.at_most("virtual engine, 64 learners: overhead / gradients' own time", overhead, 0.20),
        Bar.at_most("virtual engine: own seconds per 1,000 events", 1000.0 * per_event, 10.0),
    ]
